"""When a token may leave the decoder: confidence measures, threshold schedules, state propagation.

Modules are imported one by one: `rule` and `schedule` need no JAX.
"""
