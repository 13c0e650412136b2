"""`calm-beam suitability`: says whether a model can exit early at all, before any compute is paid for.

    calm-beam suitability --checkpoint=checkpoints/my_t5 --data='prompts/*.jsonl.gz'

decodes a sample of prompts by the full model, and looks at what each layer would have predicted for every token: how
often it agrees with the last layer, how surprised it is, and how many layers exits by softmax would use. A model that
was not trained for it seldom exits: better known now than after a sweep. This is a forecast from one pass; what may be
promised says `calm-beam calibrate` alone. On an accelerator, where a step takes as long as its bytes,

    calm-beam suitability --checkpoint=checkpoints/my_t5 --data='prompts/*.jsonl.gz' --device=v5e --dtype=bfloat16

also forecasts what steps take there at the least, and which measures can pay at which exit layers.
"""

from collections.abc import Sequence

from calm_beam.launch.flags import FlagParser, parsed, request_parser
from calm_beam.launch.flags.requests import with_result
from calm_beam.launch.terminal import say_loading

from .request import SuitabilityRequest

_ESSENTIALS = (
    "--checkpoint",
    "--vocabulary",
    "--data",
    "--chat_template",
    "--system",
    "--max_examples",
    "--max_decode_length",
    "--agreeing",
    "--device",
    "--output",
    "--overwrite",
)


def flag_parsers() -> tuple[FlagParser, ...]:
    """Returns the parsers of all forms of the command."""
    return (with_result(request_parser("suitability", SuitabilityRequest, doc=__doc__, essentials=_ESSENTIALS)),)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    (parser,) = flag_parsers()
    request = parsed(SuitabilityRequest, argv, parser=parser)
    # Here, since it loads JAX, and help does without.
    say_loading("jax")
    from .command import tell_suitability

    return tell_suitability(request)
