"""Greedy decoding with early exits, at every threshold of a grid.

Import its modules one by one: only some need JAX.
"""
