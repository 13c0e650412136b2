"""Losses that other programs have computed: tables of losses, and scores in the logs of evaluation frameworks."""

DIRECTIONS = HIGHER, LOWER = ("higher", "lower")
"""Whether higher or lower scores of a metric are better."""
