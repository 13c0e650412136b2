"""Greedy decoding with early exits, at every threshold of a grid.

Modules are imported one by one: only some need JAX.
"""
