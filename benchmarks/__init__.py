"""Scripts behind docs/measurements.md; each prints the machine it ran on."""
