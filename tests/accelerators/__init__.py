"""What runs on accelerators, compiled by their own compilers: `make accelerators`."""
