"""From losses, of stored outputs or of anybody's files, to what is proved of thresholds and other settings.

Import from the module that holds the idea, for example `calm_beam.calibration.plan`: help and flags need few of them.
"""
