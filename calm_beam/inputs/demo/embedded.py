"""Paths of the demo model and its calibration set, and their default settings."""

import pathlib

_HERE = pathlib.Path(__file__).parent

MODEL = _HERE / "model"
CALIBRATION_SET = _HERE / "calibration.jsonl.gz"

# Denser at the top, where the risk moves fastest; fixed before the calibration set was decoded.
THRESHOLDS = (
    0.99,
    0.98,
    0.97,
    0.96,
    0.95,
    0.9,
    0.85,
    0.8,
    0.75,
    0.7,
    0.65,
    0.6,
    0.55,
    0.5,
    0.4,
    0.3,
    0.2,
    0.1,
    0.05,
    0.0,
)
PROMPT = "Do they want to repair their car?"
"""A prompt like those of the calibration set."""

# The demo's default losses.
CONSISTENCIES = ("textual", "risk")
METRICS = ("rouge_l_unicode",)
DELTAS = (0.02, 0.05, 0.1, 0.2)
