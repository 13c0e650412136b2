"""Losses that others have computed: tables of them, and scores in the logs of frameworks of evaluation."""

DIRECTIONS = HIGHER, LOWER = ("higher", "lower")
"""Which scores of a metric are better."""
