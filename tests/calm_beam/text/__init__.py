"""Tests of `calm_beam.text`."""
