"""The flags of `calm-beam calibrate`, which are the options of a request."""

from calm_beam.launch.flags import FlagParser, add_request

from .request import CalibrateRequest

_ESSENTIALS = (
    "--checkpoint",
    "--data",
    "--max_decode_length",
    "--confidence",
    "--min_exit_layer",
    "--thresholds",
    "--consistency",
    "--metric",
    "--delta",
    "--epsilon",
    "--sequential",
    "--output",
    "--overwrite",
    "--resume",
    "--generations",
)


def calibrate_parser(doc: str | None = None) -> FlagParser:
    """Returns the parser of the command line; its help shows what the docstring says."""
    parser = FlagParser(prog="calm-beam calibrate", doc=doc, essentials=_ESSENTIALS)
    add_request(parser, CalibrateRequest)
    return parser
