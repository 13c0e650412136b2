"""The power of a test, on the terminal, in a plot or on a page."""

import dataclasses
import functools
import io
import math
import os
from collections.abc import Mapping, Sequence

from calm_beam.errors import UsageError
from calm_beam.inputs.examples import bounded_lines, check_utf_8
from calm_beam.launch.flags import as_usage, naming
from calm_beam.launch.terminal import PlainConsole, give, say, tell
from calm_beam.launch.terminal.lines import PlainTable
from calm_beam.options.groups import DELTA, EPSILON
from calm_beam.report import write_page
from calm_beam.report.document import short_place
from calm_beam.report.line_chart import check_plots_available
from calm_beam.report.power_page import power_page, write_power_figure
from calm_beam.risk.pvalues import P_VALUES
from calm_beam.risk.sample_size import COIN_P_VALUES, Curve, GuessedLosses, PowerQuestion
from calm_beam.storage import is_file, open_input, why_no_file
from calm_beam.text import counted, written_float

from .request import PAGE, PlanRequest, checked_output

_REPLICATIONS = 1000


def plan_power(request: PlanRequest) -> int:
    """Prints the number of examples that each p-value needs to show a risk below delta; returns the exit status."""
    with as_usage():
        run = _prepared(request)
    curves = [
        run.question.curves(
            guess,
            run.p_values,
            has_points=run.output is not None,
            simulating=functools.partial(_say_simulated, guess.title),
        )
        for guess in run.guesses
    ]
    _print(run, curves)
    give(
        {
            "delta": run.question.delta,
            "epsilon": run.question.epsilon,
            "power": request.power,
            "needed": [
                {"risk": guess.risk, "std": guess.std, "p_value": each.name, "examples": each.needed}
                for guess, row in zip(run.guesses, curves, strict=True)
                for each in row
            ],
        }
    )
    if run.output is not None:
        _write({guess.title: row for guess, row in zip(run.guesses, curves, strict=True)}, run, output=run.output)
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """A plan that has been checked.

    Attributes:
      request: What was asked for.
      question: What is asked of each test.
      guesses: How losses may be distributed.
      p_values: Names of the tests.
      output: The page or the plot to write; None where none is asked for.
    """

    request: PlanRequest
    question: PowerQuestion
    guesses: Sequence[GuessedLosses]
    p_values: Sequence[str]
    output: str | None

    def simulated(self) -> str:
        """Returns a sentence on how simulation replaces what cannot be computed."""
        return f"{counted(self.question.replications, 'calibration')}, seed {self.request.seed}"

    def meaning(self) -> str:
        """Returns a sentence about the meaning of the numbers."""
        return (
            f"Epsilon {self.question.epsilon:g}. From so many examples on, the probability is reached and stays so. "
            "That is exact for losses of 0 and 1 with p-values that ignore their order, elsewhere simulated "
            f"({self.simulated()}). Settle the p-value before calibrating."
        )


def _prepared(request: PlanRequest) -> _Run:
    delta = DELTA if request.delta is None else request.delta
    output = checked_output(request, kinds=(".svg", ".png", ".pdf", PAGE))
    if output is not None and not output.endswith(PAGE):
        check_plots_available()
    guesses = _guesses(request, delta=delta)
    return _Run(
        request=request,
        question=PowerQuestion(
            delta=delta,
            epsilon=EPSILON if request.epsilon is None else request.epsilon,
            power=request.power,
            replications=request.replications or _REPLICATIONS,
            seed=request.seed,
        ),
        guesses=guesses,
        p_values=_p_values(request, guesses),
        output=output,
    )


def _write(panels: Mapping[str, Sequence[Curve]], run: _Run, *, output: str) -> None:
    """Writes the page or the plot that was asked for, and tells where."""
    request = run.request
    if not output.endswith(PAGE):
        title = f"delta {run.question.delta:g}, epsilon {run.question.epsilon:g}"
        write_power_figure(output, panels, target=request.power, title=title)
        tell(f"Plot: {output}")
        return
    facts = [
        ("Tolerance δ", f"{run.question.delta:g}"),
        ("Error ε", f"{run.question.epsilon:g}"),
        ("Power", f"{request.power:g}"),
        ("Losses", "0 or 1" if request.pilot is None and request.loss_std is None else "as they are named above"),
        *([] if request.pilot is None else [("Pilot", short_place(os.fspath(request.pilot)))]),
        ("Simulation", run.simulated()),
    ]
    page = power_page(panels, delta=run.question.delta, target=request.power, meaning=run.meaning(), facts=facts)
    write_page(page, output)
    tell(f"Page: {output}")


def _guesses(request: PlanRequest, *, delta: float) -> list[GuessedLosses]:
    if request.pilot is not None:
        if request.risk_guess is not None or request.loss_std is not None:
            raise UsageError("--pilot takes the place of --risk_guess and --loss_std: leave them out.")
        guesses = [_pilot_guess(os.fspath(request.pilot))]
    elif request.risk_guess is None:
        raise UsageError("--risk_guess is missing: expected losses, comma-separated (or --pilot with measured ones).")
    else:
        guesses = [GuessedLosses.with_moments(risk, request.loss_std) for risk in request.risks]
    for guess in guesses:
        if guess.risk >= delta:
            raise UsageError(
                f"an expected loss of {guess.risk:g} is not below --delta={delta:g}: no number of examples can prove "
                "that it is. Plan for a larger delta or a safer threshold."
            )
    return guesses


def _pilot_guess(path: str) -> GuessedLosses:
    with naming("--pilot"):
        if not is_file(path):
            raise UsageError(f"--pilot {path}: {why_no_file(path)}")
        opened = open_input(path)
    losses = []
    with opened as raw, io.TextIOWrapper(raw, "utf-8", errors="surrogateescape") as file:
        for number, line in bounded_lines(file, name=f"--pilot {path}"):
            check_utf_8(line, f"--pilot {path}, line {number}")
            try:
                loss = written_float(line)
            except ValueError:
                loss = math.nan
            if not -1 <= loss <= 1:
                raise UsageError(
                    f"--pilot {path}, line {number}: expected a loss in [-1, 1], got {line.strip()!r:.100}."
                )
            losses.append(loss)
    if not losses:
        raise UsageError(f"--pilot {path}: holds no losses.")
    return GuessedLosses.measured(losses)


def _p_values(request: PlanRequest, guesses: Sequence[GuessedLosses]) -> list[str]:
    """Returns the p-values to plan for: those asked for, or all that apply."""
    names = []
    usual = COIN_P_VALUES if all(guess.is_coin for guess in guesses) else P_VALUES
    # Of those that bet in an order nothing but a simulation tells, which may take minutes: only where it is asked for.
    for name in dict.fromkeys(request.p_values or usual):
        if all(guess.fits(name) for guess in guesses):
            names.append(name)
        elif request.p_values:
            kind = "in [0, 1]" if any(guess.is_signed for guess in guesses) else "of 0 and 1"
            raise UsageError(f"--p_value {name}: is for losses {kind} only.")
    return names


def _left_out(run: _Run) -> str:
    """Returns a sentence about the p-values that were left out since they take a simulation; nothing without any."""
    names = [name for name in P_VALUES if name not in run.p_values and all(guess.fits(name) for guess in run.guesses)]
    if run.request.p_values or not names:
        return ""
    return (
        f"Left out, since only a simulation tells, which takes a while: {' and '.join(names)}. Ask for them by "
        f"--p_value={','.join(names)}. calibrate takes star_bets by default, unless losses are 0 or 1, or too many to "
        "keep."
    )


def _say_simulated(title: str, name: str) -> None:
    # It may take a minute.
    say(f"simulating {name} at {title}")


def _print(run: _Run, curves: Sequence[Sequence[Curve]]) -> None:
    console = PlainConsole()
    asked = run.question
    title = f"Examples needed to accept a threshold at delta {asked.delta:g} with probability {asked.power:g}"
    table = PlainTable(title)
    table.add_column("expected loss\ndeviation", no_wrap=True)
    for guess in run.guesses:
        table.add_numbers(f"{guess.risk:.4g}\n{guess.std:.3g}")
    for by_guess in zip(*curves, strict=True):
        table.add_row(by_guess[0].name, *(curve.needed_in_words() for curve in by_guess))
    console.print(table)
    console.print(run.meaning())
    if left_out := _left_out(run):
        console.print(left_out)
