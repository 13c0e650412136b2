"""What decoding costs on whatever devices JAX finds, in one command."""
