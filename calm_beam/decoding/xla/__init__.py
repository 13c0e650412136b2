"""The engine that XLA compiles, for any device and in any precision: `engine.py`, and what it runs on the device."""
