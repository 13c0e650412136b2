"""What verdicts on promises are called, whatever the promises are about."""

from collections.abc import Sequence
from typing import Any

from calm_beam.calibration.anytime import AnytimeEvidence
from calm_beam.calibration.verification import Verdict
from calm_beam.errors import UsageError
from calm_beam.launch.terminal import PlainConsole
from calm_beam.text import counted

BROKEN = 3
"""Exit status if a promise is broken."""


def check_alpha(alpha: float) -> None:
    """Refuses a number that is no probability."""
    if not 0 < alpha < 1:
        raise UsageError(f"--alpha must be in (0, 1), got {alpha:g}. It is a probability: for 5 % pass 0.05.")


def verdict_in_words(verdict: Verdict[Any]) -> str:
    """Returns a verdict in a word or two."""
    if verdict.is_broken:
        return "BROKEN"
    return "proved again" if verdict.is_proved_again else "not contradicted"


def conclude(
    console: PlainConsole, verdicts: Sequence[Verdict[Any]], *, alpha: float, evidence: AnytimeEvidence | None
) -> None:
    """Prints how many promises are broken, or proved again; `evidence` is of all runs, where they count together."""
    runs = "" if evidence is None else f" of {counted(evidence.runs, 'run')} together"
    scope = "" if evidence is None else ", over all runs with --anytime, those to come as well,"
    broken = sum(verdict.is_broken for verdict in verdicts)
    if broken:
        console.print(
            f"{broken} of {counted(len(verdicts), 'promise')} {'is' if broken == 1 else 'are'} BROKEN: the fresh "
            f"losses{runs} prove that the risk exceeds delta. If all were kept, the chance of such a finding{scope} "
            f"would be at most {alpha:g}. Calibrate anew."
        )
    else:
        proved = sum(verdict.is_proved_again for verdict in verdicts)
        console.print(
            f"No promise is found broken at level {alpha:g}{scope.removesuffix(',')}; {proved} of {len(verdicts)} "
            f"{'is' if proved == 1 else 'are'} proved again, each "
            "at its own epsilon."
        )
    if evidence is not None:
        units = max(of_promise.n for of_promise in evidence.promises)
        console.print(f"{counted(evidence.runs, 'run')} with --anytime, {units} losses of a promise at most.")
