"""The request of `calm-beam plan`: examples that a test needs, the cost of a run, or the time on an accelerator."""

import dataclasses
import math
import os
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from calm_beam.errors import UsageError
from calm_beam.launch.device_times import Device
from calm_beam.launch.flags import naming
from calm_beam.launch.flags.shared_options import check_parent
from calm_beam.options import Options, again, listed, option, options_of
from calm_beam.options.groups import DELTA, EPSILON, Memory, ModelSource, PrecisionOptions, Spread, check_fractions
from calm_beam.options.kinds import Kind, ValueRefusedError, number, numbers, texts, whole_number
from calm_beam.risk.pvalues import P_VALUES
from calm_beam.storage import check_writable, is_folder
from calm_beam.text import written_float

PAGE = ".html"
_MOST_EXAMPLES = 10**12


def _number(value: Any) -> float:
    try:
        return written_float(str(value))
    except ValueError:
        return math.nan


def _examples(value: Any) -> int:
    found = _number(value)
    if not (1 <= found <= _MOST_EXAMPLES and found == int(found)):
        raise ValueRefusedError(f"expected a number of examples such as 1000000 or 1e6, got {value!r:.40}")
    return int(found)


def _positive(value: Any) -> float:
    found = _number(value)
    if not 0 < found < math.inf:
        raise ValueRefusedError(f"expected a number above 0, got {value!r:.40}")
    return found


def _price(value: Any) -> float:
    found = _number(value)
    if not 0 <= found < math.inf:
        raise ValueRefusedError(f"expected a price of at least 0, got {value!r:.40}")
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned(Options):
    """The quantity that is planned, and its input."""

    pilot: str | os.PathLike[str] | None = option(
        None,
        "what was measured: the output directory of a small calibration of one measure (calibrate "
        "--confidence=softmax), to forecast the cost of a large one, or a file with one loss per line, instead of "
        "--risk_guess and --loss_std; of examples that the calibration will not use",
    )
    delta: float | Sequence[float] | None = option(
        None, f"risk tolerances in (0, 1); default: {DELTA:g}, with a run those of its manifest", kind=numbers
    )
    epsilon: float | Sequence[float] | None = option(
        None,
        f"allowed probabilities of error in (0, 1); default: {EPSILON:g}, with a run those of its manifest",
        kind=numbers,
    )
    power: float = option(0.9, "probability of acceptance asked for, in (0, 1)", kind=number)
    replications: int | None = option(
        None,
        "simulated calibrations, where some are needed; default: 1000, with a run 200",
        kind=whole_number(100),
    )
    seed: int = option(0, "of the simulation", kind=whole_number(0))
    output: str | os.PathLike[str] | None = option(
        None,
        "file for a page with charts and tables: .html; without a run, also for a plot alone: .svg, .png or .pdf",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fractions(delta=self.deltas, epsilon=self.epsilons, power=(self.power,))

    @property
    def deltas(self) -> tuple[float, ...]:
        """The tolerances that are asked for; none for the default."""
        return listed(self.delta)

    @property
    def epsilons(self) -> tuple[float, ...]:
        """The allowed probabilities of error that are asked for; none for the default."""
        return listed(self.epsilon)


_OF_SIGNED = " Where the mean of signed losses is negative, guess 0, or give losses that were measured (--pilot)."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guess(Options):
    """Losses that are guessed, and how they will be tested."""

    SECTION: ClassVar[str | None] = "examples needed, without a run"

    risk_guess: float | Sequence[float] | None = option(
        None, "expected losses below delta, comma-separated", kind=numbers
    )
    loss_std: float | None = option(None, "standard deviation of the losses; without it they are 0 or 1", kind=number)
    p_value: str | Sequence[str] | None = option(
        None,
        f"of {', '.join(P_VALUES)}; default: all that take such losses, but for losses of 0 and 1 only those that need "
        "no simulation",
        kind=texts,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.p_values:
            if name not in P_VALUES:
                raise UsageError(f"--p_value {name}: not known. Choose from {', '.join(P_VALUES)}.")
        for risk in self.risks:
            if not 0 <= risk < 1:
                raise UsageError(f"--risk_guess must be in [0, 1), got {risk:g}.{_OF_SIGNED if risk < 0 else ''}")

    @property
    def risks(self) -> tuple[float, ...]:
        """Expected losses that are guessed."""
        return listed(self.risk_guess)

    @property
    def p_values(self) -> tuple[str, ...]:
        """The tests that are asked for by name."""
        return tuple(self.p_value or ())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Options):
    """A run whose cost is forecast."""

    SECTION: ClassVar[str | None] = "cost, from a run"

    examples: int | None = option(
        None,
        "examples of the run that is planned, such as 1e6",
        kind=Kind(_examples, _examples, placeholder="N"),
    )
    workers: int = option(1, "processes that decode", kind=whole_number(1, 100_000))
    workers_per_machine: int = option(
        1, "processes that share the cores of a machine like the pilot's", kind=whole_number(1, 1000)
    )
    accelerator: str | None = option(None, "what workers decode on, such as nvidia-l4; default: what the pilot ran on")
    speedup: float | None = option(
        None,
        "how many times faster than the pilot a worker decodes, if it runs on something else",
        kind=Kind(_positive, _positive),
    )
    price_per_hour: float | None = option(
        None, "of one worker, in any currency", kind=Kind(_price, _price, placeholder="X")
    )
    num_shards: int | None = again(Spread, "num_shards", sentence="default: what suits examples and workers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps(Device):
    """Steps of a model that are forecast for an accelerator."""

    SECTION: ClassVar[str | None] = "time on an accelerator, without a run"

    device: str | None = again(Device, "device")
    checkpoint: str | os.PathLike[str] | None = again(
        ModelSource, "checkpoint", sentence="folder of the model that is to decode there"
    )
    dtype: str = again(PrecisionOptions, "dtype", sentence="type of weights, states, keys and values")
    # A prompt of 128 tokens, and 64 of its output.
    positions: int = option(192, "tokens of a prompt and its output that are attended to", kind=whole_number(1))
    batch_size: int = again(Memory, "batch_size", default=1, sentence="prompts that take a step together")


_ABOUT_STEPS = tuple(name for name, _ in options_of(Steps) if name != "device")
_ABOUT_POWER = tuple(name for name, _ in options_of(Guess))
_ABOUT_COST = tuple(name for name, _ in options_of(Run))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest(Planned, Guess, Run, Steps):
    """One of three questions: `device` asks for the time of a step, a run as `pilot` for a cost, all else for power."""

    @property
    def is_about_run(self) -> bool:
        """Whether the pilot is a run, from which the cost of another is forecast."""
        with naming("--pilot"):
            return self.pilot is not None and is_folder(self.pilot)

    def check_given(self, names: Collection[str]) -> None:
        """Refuses what means something to another question only.

        Args:
          names: Options that were given, with whatever value.
        """
        if self.device is not None:
            others = ("pilot", "delta", "epsilon", *_ABOUT_POWER, *_ABOUT_COST, "output")
            if (given := next((name for name in others if name in names), None)) is not None:
                raise UsageError(
                    f"--{given} is about examples, or the cost of a run, and --device={self.device} about the time of "
                    "a model's steps: ask one after the other."
                )
            return
        if (given := next((name for name in _ABOUT_STEPS if name in names), None)) is not None:
            raise UsageError(f"--{given} is about the time on an accelerator: pass --device, such as --device=v5e.")
        if self.is_about_run:
            if (given := next((name for name in _ABOUT_POWER if name in names), None)) is not None:
                raise UsageError(
                    f"--{given} is about the power of a test, and --pilot={self.pilot} is a run, from which costs are "
                    "forecast. Leave it out, or pass a file of losses."
                )
        elif (given := next((name for name in _ABOUT_COST if name in names), None)) is not None:
            raise UsageError(
                f"--{given} is about the cost of a run, which is forecast from a pilot: pass the output directory of a "
                "small calibration as --pilot."
            )


def checked_output(request: PlanRequest, *, kinds: Sequence[str]) -> str | None:
    """Returns the file to write, of one of the kinds that its name tells; None where none is asked for.

    Raises:
      UsageError: If it is of another kind, or cannot be written.
    """
    if request.output is None:
        return None
    path = os.fspath(request.output)
    if not path.endswith(tuple(kinds)):
        *others, last = kinds
        expected = f"{', '.join(others)} or {last}" if others else last
        raise UsageError(f"--output {path}: expected a name that ends in {expected}.")
    with naming("--output"):
        check_parent("--output", path)
        check_writable(path)
    return path
