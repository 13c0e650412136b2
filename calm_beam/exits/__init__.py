"""When a token may leave the decoder: confidence measures, threshold schedules, and the rule that names them.

Modules are imported one by one: `rule` and `thresholds` need no JAX.
"""
