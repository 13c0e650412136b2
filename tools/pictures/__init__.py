"""Regenerates the documentation's pictures from the commands' outputs."""
