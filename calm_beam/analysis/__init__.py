"""The paper's experiments: what early exits do to outputs, measured on a sample of prompts.

Modules are imported one by one: only some need JAX.
"""
