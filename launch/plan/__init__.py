"""`calm-beam plan`: says how many examples a calibration needs, and what it will cost, before any compute is paid for.

    calm-beam plan --delta=0.1 --epsilon=0.05 --risk_guess=0.03,0.05,0.07 --output=plan.svg

answers for thresholds whose expected loss is 0.03, 0.05 or 0.07: with so many examples they are accepted with
probability `--power`. Without more said, losses are taken to be 0 or 1, the widest spread there is; `--loss_std`
narrows it (to a beta distribution), and a file of `--pilot` has some losses that were measured, one per line.

    calm-beam calibrate --confidence=softmax --output=pilot
    calm-beam plan --pilot=pilot --examples=1e6 --workers=20 --price_per_hour=0.7

takes the output directory of a small calibration of one measure, and says from what was measured there what a large one
takes: hours, money, bytes and memory, into how many shards to divide it, and what watching the proof while it grows may
save.

    calm-beam plan --device=v5e --checkpoint=checkpoints/my_t5 --dtype=bfloat16

forecasts, from bytes and operations alone, what a step of the model takes on an accelerator at the least, and which
confidence measures can pay there at which exit layers.
"""

from collections.abc import Sequence

from calm_beam.launch.flags import FlagParser, parsed, request_parser
from calm_beam.launch.flags.requests import with_result

from .request import PlanRequest

_ESSENTIALS = (
    "--pilot",
    "--delta",
    "--epsilon",
    "--power",
    "--risk_guess",
    "--loss_std",
    "--examples",
    "--workers",
    "--price_per_hour",
    "--device",
    "--checkpoint",
    "--output",
)


def flag_parsers() -> tuple[FlagParser, ...]:
    """Returns the parsers of all forms of the command."""
    return (with_result(request_parser("plan", PlanRequest, doc=__doc__, essentials=_ESSENTIALS)),)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    (parser,) = flag_parsers()
    request = parsed(PlanRequest, argv, parser=parser)
    # Here, since each takes much that the others, and help, do without.
    if request.device is not None:
        from .cost import plan_device

        return plan_device(request, request.device)
    if request.is_about_run:
        from .cost import plan_cost

        return plan_cost(request)
    from .power import plan_power

    return plan_power(request)
