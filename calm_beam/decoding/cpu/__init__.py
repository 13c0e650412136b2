"""The engine of compiled code for processors: `engine.py`, and the prompts that it takes over from XLA."""
