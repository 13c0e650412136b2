"""Risk control: losses in [0, 1], exact totals, p-values and the test that picks a threshold.

Import from the module that holds the idea, for example `calm_beam.risk.pvalues`.
"""
