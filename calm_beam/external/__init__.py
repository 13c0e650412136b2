"""Sweeps that were made elsewhere: their losses, read and checked, and what is proved of their settings."""
