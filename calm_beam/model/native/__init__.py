"""C code for computations that are slow in XLA on CPUs: built at installation, and optional where that fails."""
