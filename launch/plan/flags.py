"""The flags of `calm-beam plan`, and the file that it may write."""

import argparse
import math
from collections.abc import Sequence

from calm_beam.arithmetic import DTYPES
from calm_beam.launch.flags import FlagParser, UsageError, add_device_flag, naming, numbers, texts, whole_number
from calm_beam.risk.pvalues import P_VALUES
from calm_beam.storage import check_writable, is_cloud_path, is_folder, parent
from calm_beam.text import written_float

# Flags that mean something for one of the three questions only; without a default.
POWER_FLAGS = ("risk_guess", "loss_std", "p_value")
COST_FLAGS = (
    "examples",
    "workers",
    "workers_per_machine",
    "accelerator",
    "speedup",
    "price_per_hour",
    "num_shards",
)
DEVICE_FLAGS = ("checkpoint", "dtype", "positions", "batch_size")
PAGE = ".html"
_MOST_EXAMPLES = 10**12
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


def plan_parser(doc: str | None) -> FlagParser:
    """Returns the parser of the command line; its help shows what the docstring says."""
    parser = FlagParser(prog="calm-beam plan", doc=doc, essentials=_ESSENTIALS)
    parser.add_config_flag()
    parser.add_argument(
        "--pilot",
        help="what was measured: the output directory of a small calibration, to forecast the cost of a large one, or "
        "a file with one loss per line, instead of --risk_guess and --loss_std; of examples that the calibration "
        "will not use",
    )
    parser.add_argument(
        "--delta", type=float, help="risk tolerance, in (0, 1); default with a run: those of its manifest"
    )
    parser.add_argument(
        "--epsilon",
        type=float,
        help="allowed probability of error, in (0, 1); default: 0.05, with a run those of its manifest",
    )
    parser.add_argument("--power", type=float, default=0.9, help="probability of acceptance asked for, in (0, 1)")
    parser.add_argument(
        "--replications",
        type=whole_number(100),
        help="simulated calibrations, where some are needed; default: 1000, with a run 200",
    )
    parser.add_argument("--seed", type=whole_number(0), default=0, help="of the simulation")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="file for a page with charts and tables: .html; without a run, also for a plot alone: .svg, .png or .pdf",
    )
    power = parser.add_argument_group("examples needed, without a run")
    power.add_argument("--risk_guess", type=numbers, help="expected losses below delta, comma-separated")
    power.add_argument("--loss_std", type=float, help="standard deviation of the losses; without it they are 0 or 1")
    power.add_argument(
        "--p_value",
        type=texts,
        help=f"of {', '.join(P_VALUES)}; default: all that take such losses, but for losses of 0 and 1 only those that "
        "need no simulation",
    )
    cost = parser.add_argument_group("cost, from a run")
    cost.add_argument(
        "--examples", metavar="N", type=_examples, help="examples of the run that is planned, such as 1e6"
    )
    cost.add_argument("--workers", type=whole_number(1, 100_000), help="processes that decode; default: 1")
    cost.add_argument(
        "--workers_per_machine",
        type=whole_number(1, 1000),
        help="processes that share the cores of a machine like the pilot's; default: 1",
    )
    cost.add_argument("--accelerator", help="what workers decode on, such as nvidia-l4; default: what the pilot ran on")
    cost.add_argument(
        "--speedup",
        type=_positive,
        help="how many times faster than the pilot a worker decodes, if it runs on something else",
    )
    cost.add_argument("--price_per_hour", metavar="X", type=_price, help="of one worker, in any currency")
    cost.add_argument("--num_shards", type=whole_number(1), help="default: what suits examples and workers")
    device = parser.add_argument_group("time on an accelerator, without a run")
    add_device_flag(device)
    device.add_argument("--checkpoint", help="folder of the model that is to decode there")
    device.add_argument("--dtype", choices=DTYPES, help="type of weights, states, keys and values; default: float32")
    device.add_argument(
        "--positions", type=whole_number(1), help="tokens of a prompt and its output that are attended to; default: 192"
    )
    device.add_argument("--batch_size", type=whole_number(1), help="prompts that take a step together; default: 1")
    return parser


def check_fractions(flags: argparse.Namespace) -> None:
    """Refuses a tolerance, error or power that is no fraction; one that was left out passes."""
    for name in ("delta", "epsilon", "power"):
        value = getattr(flags, name)
        if value is not None and not 0 < value < 1:
            raise UsageError(f"--{name} must be in (0, 1), got {value:g}. It is a fraction: for 5 % pass 0.05.")


def check_output(path: str, *, kinds: Sequence[str]) -> None:
    """Refuses a file that cannot be written, or of another kind than those.

    Raises:
      UsageError: Says what is wrong.
    """
    if not path.endswith(tuple(kinds)):
        *others, last = kinds
        expected = f"{', '.join(others)} or {last}" if others else last
        raise UsageError(f"--output {path}: expected a name that ends in {expected}.")
    with naming("--output"):
        if not is_cloud_path(path) and not is_folder(parent(path)):
            raise UsageError(f"--output {path}: the folder {parent(path)} does not exist.")
        check_writable(path)


def _examples(value: str) -> int:
    try:
        number = written_float(value)
    except ValueError:
        number = math.nan
    if not (1 <= number <= _MOST_EXAMPLES and number == int(number)):
        raise argparse.ArgumentTypeError(f"expected a number of examples such as 1000000 or 1e6, got {value!r:.40}")
    return int(number)


def _positive(value: str) -> float:
    number = _number(value)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {value!r:.40}")
    return number


def _price(value: str) -> float:
    number = _number(value)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a price of at least 0, got {value!r:.40}")
    return number


def _number(value: str) -> float:
    try:
        return written_float(value)
    except ValueError:
        return math.nan
