"""Early exits of tokens: confidence measures, threshold schedules, and the rule that names them.

Import its modules one by one: `rule` and `thresholds` need no JAX.
"""
