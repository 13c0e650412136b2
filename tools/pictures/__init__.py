"""The documentation's pictures, made again from what the commands write."""
