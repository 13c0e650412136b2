"""The power of a test: how many examples it takes to accept a threshold whose losses are guessed, or were measured.

Only the threshold itself is looked at. Fixed sequence testing accepts the safer ones before it more easily; for
procedures that divide epsilon among K thresholds, or entries that are to hold together, divide `--epsilon` as they do.
"""

import dataclasses
import functools
import io
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from calm_beam.errors import UsageError
from calm_beam.inputs.examples import bounded_lines, check_utf_8
from calm_beam.launch.flags import as_usage, naming
from calm_beam.launch.terminal import PlainConsole, say, tell
from calm_beam.launch.terminal.tables import PlainTable
from calm_beam.report import write_page
from calm_beam.report.elements import short_place
from calm_beam.report.figures import check_plots_available
from calm_beam.report.power_page import Curve, power_page, write_power_figure
from calm_beam.risk.pvalues import P_VALUES
from calm_beam.risk.sample_size import (
    COIN_P_VALUES,
    Losses,
    beta_losses,
    coin_examples_needed,
    coin_losses,
    exact_power,
    resampled_losses,
    simulated_examples_needed,
    simulated_power,
)
from calm_beam.storage import is_file, open_input, why_no_file
from calm_beam.text import counted, written_float

from .request import PAGE, PlanRequest, checked_output

# What options that are left out mean here.
_EPSILON, _REPLICATIONS = 0.05, 1000
_MOST_EXAMPLES_COMPUTED = 10_000_000
_MOST_EXAMPLES_SIMULATED = 100_000
_POINTS_OF_A_CURVE = 16


def plan_power(request: PlanRequest, *, delta: float) -> int:
    """Prints the number of examples that each p-value needs to show a risk below delta; returns the exit status."""
    with as_usage():
        run = _prepared(request, delta=delta)
    curves = [_curves(guess, run) for guess in run.guesses]
    _print(run, curves)
    if run.output is not None:
        _write({guess.title: row for guess, row in zip(run.guesses, curves, strict=True)}, run, output=run.output)
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """What is planned, all of which has been found good.

    Attributes:
      request: What was asked for.
      delta: Risk tolerance.
      epsilon: Allowed probability of error.
      replications: Simulated calibrations, where some are needed.
      guesses: How losses may be distributed.
      p_values: Names of the tests.
      output: The page or the plot to write; None where none is asked for.
    """

    request: PlanRequest
    delta: float
    epsilon: float
    replications: int
    guesses: "Sequence[_Guess]"
    p_values: Sequence[str]
    output: str | None

    def simulated(self) -> str:
        """Returns in words how what cannot be computed is simulated."""
        return f"{counted(self.replications, 'calibration')}, seed {self.request.seed}"

    def meaning(self) -> str:
        """Returns in words what the numbers mean."""
        return (
            f"Epsilon {self.epsilon:g}. From so many examples on, the probability is reached and stays so. That is "
            "exact for losses of 0 and 1 with p-values that ignore their order, elsewhere simulated "
            f"({self.simulated()}). Settle the p-value before calibrating."
        )


def _prepared(request: PlanRequest, *, delta: float) -> _Run:
    output = checked_output(request, kinds=(".svg", ".png", ".pdf", PAGE))
    if output is not None and not output.endswith(PAGE):
        check_plots_available()
    guesses = _guesses(request, delta=delta)
    return _Run(
        request=request,
        delta=delta,
        epsilon=_EPSILON if request.epsilon is None else request.epsilon,
        replications=request.replications or _REPLICATIONS,
        guesses=guesses,
        p_values=_p_values(request, guesses),
        output=output,
    )


def _write(panels: Mapping[str, Sequence[Curve]], run: _Run, *, output: str) -> None:
    """Writes the page or the plot that was asked for, and tells where."""
    request = run.request
    if not output.endswith(PAGE):
        title = f"delta {run.delta:g}, epsilon {run.epsilon:g}"
        write_power_figure(output, panels, target=request.power, title=title)
        tell(f"Plot: {output}")
        return
    facts = [
        ("Tolerance δ", f"{run.delta:g}"),
        ("Error ε", f"{run.epsilon:g}"),
        ("Power", f"{request.power:g}"),
        ("Losses", "0 or 1" if request.pilot is None and request.loss_std is None else "as they are named above"),
        *([] if request.pilot is None else [("Pilot", short_place(os.fspath(request.pilot)))]),
        ("Simulation", run.simulated()),
    ]
    page = power_page(panels, delta=run.delta, target=request.power, meaning=run.meaning(), facts=facts)
    write_page(page, output)
    tell(f"Page: {output}")


class _Guess:
    """How the losses at one threshold may be distributed.

    Attributes:
      risk: Expected loss.
      std: Standard deviation.
      losses: Draws them.
      is_coin: Whether they are 0 or 1.
      is_signed: Whether some are negative.
    """

    def __init__(
        self, risk: float, std: float, *, losses: Losses, is_coin: bool = False, is_signed: bool = False
    ) -> None:
        self.risk = risk
        self.std = std
        self.losses = losses
        self.is_coin = is_coin
        self.is_signed = is_signed

    @property
    def title(self) -> str:
        """The guess in words."""
        return f"expected loss {self.risk:.4g}, deviation {self.std:.3g}"


def _guesses(request: PlanRequest, *, delta: float) -> list[_Guess]:
    if request.pilot is not None:
        if request.risk_guess is not None or request.loss_std is not None:
            raise UsageError("--pilot takes the place of --risk_guess and --loss_std: leave them out.")
        guesses = [_pilot_guess(os.fspath(request.pilot))]
    elif request.risk_guess is None:
        raise UsageError("--risk_guess is missing: expected losses, comma-separated (or --pilot with measured ones).")
    else:
        guesses = [_own_guess(risk, request.loss_std) for risk in request.risks]
    for guess in guesses:
        if guess.risk >= delta:
            raise UsageError(
                f"an expected loss of {guess.risk:g} is not below --delta={delta:g}: no number of examples can prove "
                "that it is. Plan for a larger delta or a safer threshold."
            )
    return guesses


def _own_guess(risk: float, std: float | None) -> _Guess:
    if std is None:
        return _Guess(risk, math.sqrt(risk * (1 - risk)), losses=coin_losses(risk), is_coin=True)
    return _Guess(risk, std, losses=beta_losses(risk, std=std))


def _pilot_guess(path: str) -> _Guess:
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
    values = np.array(losses)
    return _Guess(
        float(values.mean()),
        float(values.std()),
        losses=resampled_losses(losses),
        is_coin=bool(np.isin(values, (0, 1)).all()),
        is_signed=bool((values < 0).any()),
    )


def _p_values(request: PlanRequest, guesses: Sequence[_Guess]) -> list[str]:
    """Returns the p-values to plan for: those asked for, or all that apply."""
    is_coin, is_signed = all(guess.is_coin for guess in guesses), any(guess.is_signed for guess in guesses)
    names = []
    # Of those that bet in an order nothing but a simulation tells, which may take minutes: only where it is asked for.
    usual = COIN_P_VALUES if is_coin else P_VALUES
    for name in dict.fromkeys(request.p_values or usual):
        applies = (is_coin or P_VALUES[name].takes_fractions) and (not is_signed or P_VALUES[name].takes_signed)
        if applies:
            names.append(name)
        elif request.p_values:
            kind = "in [0, 1]" if is_signed else "of 0 and 1"
            raise UsageError(f"--p_value {name}: is for losses {kind} only.")
    return names


def _curves(guess: _Guess, run: _Run) -> list[Curve]:
    """Returns the number of examples needed by each p-value and, with a plot to make, the power around it."""
    curves, powers = [], []
    test: dict[str, float] = {"delta": run.delta, "epsilon": run.epsilon}
    power = run.request.power
    for name in run.p_values:
        if guess.is_coin and name in COIN_P_VALUES:
            at_most = _MOST_EXAMPLES_COMPUTED
            needed = coin_examples_needed(name, risk=guess.risk, power=power, at_most=at_most, **test)
            powers.append(functools.partial(_exact_power, name, guess, test))
        else:
            at_most = _MOST_EXAMPLES_SIMULATED
            simulation: dict[str, Any] = {**test, "replications": run.replications, "seed": run.request.seed}
            # It may take a minute.
            say(f"simulating {name} at {guess.title}")
            needed = simulated_examples_needed(name, guess.losses, power=power, at_most=at_most, **simulation)
            powers.append(functools.partial(_simulated_power, name, guess, simulation))
        curves.append(Curve(name=name, needed=needed, at_most=at_most, points=()))
    if run.output is None:
        return curves
    found = [curve.needed or curve.at_most for curve in curves]
    grid = sorted({int(n) for n in np.geomspace(max(1, min(found) / 10), 1.5 * max(found), _POINTS_OF_A_CURVE)})
    return [
        dataclasses.replace(curve, points=tuple((n, power_of(n)) for n in grid if n <= curve.at_most))
        for curve, power_of in zip(curves, powers, strict=True)
    ]


def _exact_power(name: str, guess: _Guess, test: Mapping[str, Any], n: int) -> float:
    return exact_power(name, n=n, risk=guess.risk, **test)


def _simulated_power(name: str, guess: _Guess, simulation: Mapping[str, Any], n: int) -> float:
    return simulated_power(name, guess.losses, n=n, **simulation)


def _print(run: _Run, curves: Sequence[Sequence[Curve]]) -> None:
    console = PlainConsole()
    title = f"Examples needed to accept a threshold at delta {run.delta:g} with probability {run.request.power:g}"
    table = PlainTable(title)
    table.add_column("expected loss\ndeviation", no_wrap=True)
    for guess in run.guesses:
        table.add_numbers(f"{guess.risk:.4g}\n{guess.std:.3g}")
    for by_guess in zip(*curves, strict=True):
        table.add_row(by_guess[0].name, *(curve.needed_in_words() for curve in by_guess))
    console.print(table)
    console.print(run.meaning())
