"""Programs for accelerators, compiled by the accelerators' own compilers: `make accelerators`."""
