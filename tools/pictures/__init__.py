"""The README's pictures, made again from what the commands write."""
