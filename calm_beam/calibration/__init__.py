"""Calibration: from losses, of stored outputs or in your own files, to proven thresholds and other settings.

Import from the module that holds the idea, for example `calm_beam.calibration.plan`: help and flags need few of them.
"""
