"""From generations to calibrated thresholds: losses, totals, tests.

Import from the module that holds the idea, for example `calm_beam.calibration.plan`: help and flags need few of them.
"""
