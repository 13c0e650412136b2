"""The power of a test, on the terminal, in a plot or on a page."""

import dataclasses
import functools
import io
import math
import os
from collections.abc import Sequence

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
    found = [
        _Answer(
            question=question,
            guess=guess,
            curves=question.curves(
                guess,
                run.p_values,
                has_points=run.output is not None,
                simulating=functools.partial(_say_simulated, run.title(question, guess)),
            ),
        )
        for question in run.questions
        for guess in run.guesses
        if guess.risk < question.delta
    ]
    _print(run, found)
    give(
        {
            "power": request.power,
            "needed": [
                {
                    "delta": answer.question.delta,
                    "epsilon": answer.question.epsilon,
                    "risk": answer.guess.risk,
                    "std": answer.guess.std,
                    "p_value": curve.name,
                    "examples": curve.needed,
                }
                for answer in found
                for curve in answer.curves
            ],
        }
    )
    if run.output is not None:
        _write(found, run, output=run.output)
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Answer:
    """The power of each test, where losses are distributed as guessed.

    Attributes:
      question: What was asked.
      guess: How losses may be distributed.
      curves: One a test.
    """

    question: PowerQuestion
    guess: GuessedLosses
    curves: Sequence[Curve]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """A plan that has been checked.

    Attributes:
      request: What was asked for.
      questions: What is asked of each test, once a tolerance and probability of error.
      guesses: How losses may be distributed.
      p_values: Names of the tests.
      output: The page or the plot to write; None where none is asked for.
    """

    request: PlanRequest
    questions: Sequence[PowerQuestion]
    guesses: Sequence[GuessedLosses]
    p_values: Sequence[str]
    output: str | None

    def simulated(self) -> str:
        """Returns a sentence on how simulation replaces what cannot be computed."""
        return f"{counted(self.questions[0].replications, 'calibration')}, seed {self.request.seed}"

    def title(self, question: PowerQuestion, guess: GuessedLosses) -> str:
        """Returns the name of a question about guessed losses."""
        epsilon = "" if len(self.epsilons()) == 1 else f", epsilon {question.epsilon:g}"
        return f"{guess.title} at delta {question.delta:g}{epsilon}"

    def deltas(self) -> list[float]:
        """Returns the tolerances, in order."""
        return list(dict.fromkeys(question.delta for question in self.questions))

    def epsilons(self) -> list[float]:
        """Returns the allowed probabilities of error, in order."""
        return list(dict.fromkeys(question.epsilon for question in self.questions))

    def meaning(self) -> str:
        """Returns a sentence about the meaning of the numbers."""
        return (
            f"Epsilon {_listed(self.epsilons())}. From so many examples on, the probability is reached and stays so. "
            "That is exact for losses of 0 and 1 with p-values that ignore their order, elsewhere simulated "
            f"({self.simulated()}). Settle the p-value before calibrating."
        )


def _prepared(request: PlanRequest) -> _Run:
    deltas = dict.fromkeys(request.deltas or (DELTA,))
    output = checked_output(request, kinds=(".svg", ".png", ".pdf", PAGE))
    if output is not None and not output.endswith(PAGE):
        check_plots_available()
    guesses = _guesses(request, delta=max(deltas))
    return _Run(
        request=request,
        questions=[
            PowerQuestion(
                delta=delta,
                epsilon=epsilon,
                power=request.power,
                replications=request.replications or _REPLICATIONS,
                seed=request.seed,
            )
            for epsilon in dict.fromkeys(request.epsilons or (EPSILON,))
            for delta in deltas
        ],
        guesses=guesses,
        p_values=_p_values(request, guesses),
        output=output,
    )


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _write(found: Sequence[_Answer], run: _Run, *, output: str) -> None:
    """Writes the page or the plot that was asked for, and tells where."""
    request = run.request
    panels = {run.title(answer.question, answer.guess): answer.curves for answer in found}
    if not output.endswith(PAGE):
        if len(run.questions) == 1:
            # The title of the whole has the tolerance, for which panels are narrow.
            panels = {answer.guess.title: answer.curves for answer in found}
        title = f"delta {_listed(run.deltas())}, epsilon {_listed(run.epsilons())}"
        write_power_figure(output, panels, target=request.power, title=title)
        tell(f"Plot: {output}")
        return
    facts = [
        ("Tolerance δ", _listed(run.deltas())),
        ("Error ε", _listed(run.epsilons())),
        ("Power", f"{request.power:g}"),
        ("Losses", "0 or 1" if request.pilot is None and request.loss_std is None else "as they are named above"),
        *([] if request.pilot is None else [("Pilot", short_place(os.fspath(request.pilot)))]),
        ("Simulation", run.simulated()),
    ]
    page = power_page(panels, target=request.power, meaning=run.meaning(), facts=facts)
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
            raise UsageError(f"{_is_not_below(guess, delta)}. Plan for a larger delta or a safer threshold.")
    return guesses


def _is_not_below(guess: GuessedLosses, delta: float) -> str:
    return (
        f"an expected loss of {guess.risk:g} is not below --delta={delta:g}: no number of examples can prove that it is"
    )


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


def _print(run: _Run, found: Sequence[_Answer]) -> None:
    console = PlainConsole()
    for question in run.questions:
        answers = [answer for answer in found if answer.question == question]
        epsilon = "" if len(run.epsilons()) == 1 else f", epsilon {question.epsilon:g},"
        table = PlainTable(
            f"Examples needed to accept a threshold at delta {question.delta:g}{epsilon} with probability "
            f"{question.power:g}"
        )
        table.add_column("expected loss\ndeviation", no_wrap=True)
        for answer in answers:
            table.add_numbers(f"{answer.guess.risk:.4g}\n{answer.guess.std:.3g}")
        for by_guess in zip(*(answer.curves for answer in answers), strict=True):
            table.add_row(by_guess[0].name, *(curve.needed_in_words() for curve in by_guess))
        if answers:
            console.print(table)
        for guess in run.guesses:
            if guess.risk >= question.delta:
                console.print(f"{_is_not_below(guess, question.delta)}.")
    console.print(run.meaning())
    if left_out := _left_out(run):
        console.print(left_out)
