"""The power of a test: how many examples it takes to accept a threshold whose losses are guessed, or were measured.

Only the threshold itself is looked at. Fixed sequence testing accepts the safer ones before it more easily; for
procedures that divide epsilon among K thresholds, or entries that are to hold together, divide `--epsilon` as they do.
"""

import argparse
import dataclasses
import functools
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from calm_beam.inputs.examples import bounded_lines, check_utf_8
from calm_beam.launch.flags import (
    UsageError,
    as_usage,
    naming,
)
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

from .flags import PAGE, check_fractions, check_output

# What flags that are left out mean here.
_EPSILON, _REPLICATIONS = 0.05, 1000
_MOST_EXAMPLES_COMPUTED = 10_000_000
_MOST_EXAMPLES_SIMULATED = 100_000
_POINTS_OF_A_CURVE = 16


def plan_power(flags: argparse.Namespace) -> int:
    """Prints the number of examples that each p-value needs, and returns the exit status."""
    flags.epsilon = _EPSILON if flags.epsilon is None else flags.epsilon
    flags.replications = flags.replications or _REPLICATIONS
    with as_usage():
        _check(flags)
        guesses = _guesses(flags)
        names = _p_values(flags, guesses)
    curves = [_curves(guess, names, flags=flags) for guess in guesses]
    _print(guesses, curves, flags=flags)
    if flags.output:
        _write({guess.title: row for guess, row in zip(guesses, curves, strict=True)}, flags=flags)
    return 0


def _write(panels: Mapping[str, Sequence[Curve]], *, flags: argparse.Namespace) -> None:
    """Writes the page or the plot that was asked for, and tells where."""
    if not flags.output.endswith(PAGE):
        title = f"delta {flags.delta:g}, epsilon {flags.epsilon:g}"
        write_power_figure(flags.output, panels, target=flags.power, title=title)
        tell(f"Plot: {flags.output}")
        return
    facts = [
        ("Tolerance δ", f"{flags.delta:g}"),
        ("Error ε", f"{flags.epsilon:g}"),
        ("Power", f"{flags.power:g}"),
        ("Losses", "0 or 1" if flags.pilot is None and flags.loss_std is None else "as they are named above"),
        *([] if flags.pilot is None else [("Pilot", short_place(flags.pilot))]),
        ("Simulation", f"{counted(flags.replications, 'calibration')}, seed {flags.seed}"),
    ]
    page = power_page(panels, delta=flags.delta, target=flags.power, meaning=_meaning(flags), facts=facts)
    write_page(page, flags.output)
    tell(f"Page: {flags.output}")


def _meaning(flags: argparse.Namespace) -> str:
    return (
        f"Epsilon {flags.epsilon:g}. From so many examples on, the probability is reached and stays so. That is exact "
        "for losses of 0 and 1 with p-values that ignore their order, elsewhere simulated "
        f"({counted(flags.replications, 'calibration')}, seed {flags.seed}). Settle the p-value before calibrating."
    )


def _check(flags: argparse.Namespace) -> None:
    check_fractions(flags)
    for name in flags.p_value or ():
        if name not in P_VALUES:
            raise UsageError(f"--p_value {name}: not known. Choose from {', '.join(P_VALUES)}.")
    if flags.output:
        check_output(flags.output, kinds=(".svg", ".png", ".pdf", PAGE))
        if not flags.output.endswith(PAGE):
            check_plots_available()


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


def _guesses(flags: argparse.Namespace) -> list[_Guess]:
    if flags.pilot is not None:
        if flags.risk_guess is not None or flags.loss_std is not None:
            raise UsageError("--pilot takes the place of --risk_guess and --loss_std: leave them out.")
        guesses = [_pilot_guess(flags.pilot)]
    elif flags.risk_guess is None:
        raise UsageError("--risk_guess is missing: expected losses, comma-separated (or --pilot with measured ones).")
    else:
        for risk in flags.risk_guess:
            if not 0 <= risk < 1:
                raise UsageError(f"--risk_guess must be in [0, 1), got {risk:g}.")
        guesses = [_own_guess(risk, flags.loss_std) for risk in flags.risk_guess]
    for guess in guesses:
        if guess.risk >= flags.delta:
            raise UsageError(
                f"an expected loss of {guess.risk:g} is not below --delta={flags.delta:g}: no number of examples can "
                "prove that it is. Plan for a larger delta or a safer threshold."
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


def _p_values(flags: argparse.Namespace, guesses: Sequence[_Guess]) -> list[str]:
    """Returns the p-values to plan for: those asked for, or all that apply."""
    is_coin, is_signed = all(guess.is_coin for guess in guesses), any(guess.is_signed for guess in guesses)
    names = []
    # Of those that bet in an order nothing but a simulation tells, which may take minutes: only where it is asked for.
    usual = COIN_P_VALUES if is_coin else P_VALUES
    for name in dict.fromkeys(flags.p_value or usual):
        applies = (is_coin or P_VALUES[name].takes_fractions) and (not is_signed or P_VALUES[name].takes_signed)
        if applies:
            names.append(name)
        elif flags.p_value:
            kind = "in [0, 1]" if is_signed else "of 0 and 1"
            raise UsageError(f"--p_value {name}: is for losses {kind} only.")
    return names


def _curves(guess: _Guess, names: Sequence[str], *, flags: argparse.Namespace) -> list[Curve]:
    """Returns the number of examples needed by each p-value and, with a plot to make, the power around it."""
    curves, powers = [], []
    test: dict[str, float] = {"delta": flags.delta, "epsilon": flags.epsilon}
    for name in names:
        if guess.is_coin and name in COIN_P_VALUES:
            at_most = _MOST_EXAMPLES_COMPUTED
            needed = coin_examples_needed(name, risk=guess.risk, power=flags.power, at_most=at_most, **test)
            powers.append(functools.partial(_exact_power, name, guess, test))
        else:
            at_most = _MOST_EXAMPLES_SIMULATED
            simulation = {**test, "replications": flags.replications, "seed": flags.seed}
            # It may take a minute.
            say(f"simulating {name} at {guess.title}")
            needed = simulated_examples_needed(name, guess.losses, power=flags.power, at_most=at_most, **simulation)
            powers.append(functools.partial(_simulated_power, name, guess, simulation))
        curves.append(Curve(name=name, needed=needed, at_most=at_most, points=()))
    if not flags.output:
        return curves
    found = [curve.needed or curve.at_most for curve in curves]
    grid = sorted({int(n) for n in np.geomspace(max(1, min(found) / 10), 1.5 * max(found), _POINTS_OF_A_CURVE)})
    return [
        dataclasses.replace(curve, points=tuple((n, power(n)) for n in grid if n <= curve.at_most))
        for curve, power in zip(curves, powers, strict=True)
    ]


def _exact_power(name: str, guess: _Guess, test: Mapping[str, Any], n: int) -> float:
    return exact_power(name, n=n, risk=guess.risk, **test)


def _simulated_power(name: str, guess: _Guess, simulation: Mapping[str, Any], n: int) -> float:
    return simulated_power(name, guess.losses, n=n, **simulation)


def _print(guesses: Sequence[_Guess], curves: Sequence[Sequence[Curve]], *, flags: argparse.Namespace) -> None:
    console = PlainConsole()
    title = f"Examples needed to accept a threshold at delta {flags.delta:g} with probability {flags.power:g}"
    table = PlainTable(title)
    table.add_column("expected loss\ndeviation", no_wrap=True)
    for guess in guesses:
        table.add_numbers(f"{guess.risk:.4g}\n{guess.std:.3g}")
    for by_guess in zip(*curves, strict=True):
        table.add_row(by_guess[0].name, *(curve.needed_in_words() for curve in by_guess))
    console.print(table)
    console.print(_meaning(flags))
