"""`calm-beam report --calibration=DIR`: builds the report of a calibration, one HTML file that opens offline.

    calm-beam report --calibration=calibration

`calibrate` makes the same file at its end. What it shows is read from the directory: manifest, risk table, failures,
and the generations, which --generations names where they lie elsewhere. For texts of tokens it needs the vocabulary,
for floating point operations the sizes of the model: both are looked for where the manifest says that the model was.
Speedups are shown where `evaluate` measured some at the chosen thresholds (--speedup).
"""

from collections.abc import Sequence

from calm_beam.launch.flags import FlagParser, parsed, request_parser

from .request import ReportRequest

_ESSENTIALS = ("--calibration", "--output", "--generations", "--checkpoint", "--speedup")


def flag_parsers() -> tuple[FlagParser, ...]:
    """Returns the parsers of all forms of the command."""
    return (request_parser("report", ReportRequest, doc=__doc__, essentials=_ESSENTIALS),)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    (parser,) = flag_parsers()
    request = parsed(ReportRequest, argv, parser=parser)
    # Here, since it reads generations and models, and help does without.
    from .command import build_report

    return build_report(request)
