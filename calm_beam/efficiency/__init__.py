"""What exits save: floating point operations by formula, and time by the clock.

Modules are imported one by one: only some need JAX.
"""
