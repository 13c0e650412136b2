"""The XLA engine, for any device and any precision: `engine.py`, and the steps that it runs on the device."""
