"""Checks by the accelerators' own compilers, on a machine without accelerators."""
