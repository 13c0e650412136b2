"""Text metrics: each maps (candidate, references) to [0, 1], 1 being best.

Look one up by name with `calm_beam.metrics.registry.get_metric`.
"""
