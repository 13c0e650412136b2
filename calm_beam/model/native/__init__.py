"""Code in C for what XLA does slowly on processors: made where it is used, and done without where that fails."""
