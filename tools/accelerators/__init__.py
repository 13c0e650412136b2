"""Checks with the accelerators' own compilers, on a machine without accelerators."""
