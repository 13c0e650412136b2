"""The flags of `calm-beam report`."""

from calm_beam.calibration.file_names import REPORT
from calm_beam.launch.flags import FlagParser, add_model_flags, whole_number
from calm_beam.launch.flags.manifest import add_confidence_flag

_MOST_EXAMPLES = 500
_ESSENTIALS = ("--calibration", "--output", "--generations", "--checkpoint", "--speedup")


def report_parser(doc: str | None = None) -> FlagParser:
    """Returns the parser of the command line; its help shows what the docstring says."""
    parser = FlagParser(prog="calm-beam report", doc=doc, essentials=_ESSENTIALS)
    parser.add_argument("--calibration", metavar="DIR", help="output directory of calibrate, or of certify")
    parser.add_argument("--output", metavar="FILE", help=f"where to; default: {REPORT} in that directory")
    parser.add_argument(
        "--generations", metavar="DIR", help="its generations, if it was made with --generations; default: its own"
    )
    parser.add_argument("--checkpoint", help="the model, if it is no longer where the manifest says")
    add_model_flags(parser)
    add_confidence_flag(parser)
    parser.add_argument("--vocabulary", help="SentencePiece model; default: in or beside the checkpoint")
    parser.add_argument(
        "--speedup", metavar="DIR", help="output directory of calm-beam evaluate --speedup with the same model"
    )
    parser.add_argument(
        "--max_examples",
        type=whole_number(0),
        default=_MOST_EXAMPLES,
        help="most examples to show; fewer where the page would grow beyond 5 MB",
    )
    parser.add_argument("--seed", type=whole_number(0), default=0, help="of the draw of examples")
    return parser
