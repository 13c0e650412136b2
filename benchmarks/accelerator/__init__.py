"""The cost of decoding on the devices that JAX finds, in one command."""
