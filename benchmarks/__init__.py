"""Scripts behind BENCHMARKS.md; each prints the machine it ran on."""
