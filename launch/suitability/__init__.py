"""`calm-beam suitability`: says whether a model can exit early at all, before anybody pays for a calibration.

    calm-beam suitability --checkpoint=checkpoints/my_t5 --data='prompts/*.jsonl.gz'

decodes a sample of prompts by the full model, and looks at what each layer would have predicted for every token: how
often it agrees with the last layer, how surprised it is, and how many layers exits by softmax would use. A model that
was not trained for it seldom exits: better known now than after a sweep. This is a forecast from one pass; what may be
promised says `calm-beam calibrate` alone. On an accelerator, where a step takes as long as its bytes,

    calm-beam suitability --checkpoint=checkpoints/my_t5 --data='prompts/*.jsonl.gz' --device=v5e --dtype=bfloat16

also forecasts what steps take there at the least, and which measures can pay at which exit layers.
"""

import argparse
from collections.abc import Sequence

from calm_beam.launch.flags import (
    FlagParser,
    add_device_flag,
    add_task_flags,
    as_usage,
    parse_own_flags,
    share,
    whole_number,
)

_ESSENTIALS = (
    "--checkpoint",
    "--vocabulary",
    "--data",
    "--max_examples",
    "--agreeing",
    "--device",
    "--output",
    "--overwrite",
)


def flag_parsers() -> tuple[FlagParser, ...]:
    """Returns the parsers of all forms of the command."""
    return (_parser(),)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    with as_usage():
        flags = parse_own_flags(_parser(), argv)
    # Here, since it loads JAX, and help does without.
    from .command import tell_suitability

    return tell_suitability(flags)


def _parser() -> FlagParser:
    parser = FlagParser(prog="calm-beam suitability", doc=__doc__, essentials=_ESSENTIALS)
    add_task_flags(parser)
    parser.add_argument(
        "--max_examples", type=whole_number(1), default=100, help="size of the sample, drawn by a hash of the ids"
    )
    parser.add_argument(
        "--agreeing",
        type=_share_or_all,
        default=0.98,
        help="share of tokens that softmax exits may not change, in (0, 1]",
    )
    add_device_flag(parser)
    parser.add_argument("--output", help="JSON file for the figures; default: the terminal alone")
    parser.add_argument("--overwrite", action="store_true", help="replace --output")
    parser.only_with("--overwrite", "--output")
    return parser


def _share_or_all(text: str) -> float:
    """Returns a share above 0 and up to 1, given as such or in per cent."""
    if text in ("1", "1.0", "100%"):
        return 1.0
    try:
        return share(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(
            f"expected a share above 0 and up to 1, such as 98% or 0.98, got {text!r:.40}"
        ) from error
