"""Evidence about a manifest's promises over many runs: `verify --anytime` may be repeated on new examples forever.

A p-value for one set of examples does not allow that: sixty runs on sixty sets, each with alpha = 5 %, report most
promises as broken whose risk is just at delta. Capitals allow it. Against "the risk is at most delta" bettors stake
fixed shares on every loss, as `signed_mixture` does against the opposite, and multiply their capital by
1 + bet (loss - delta). If the risk is at most delta no bettor gains in expectation, so the chance that all together
ever have 1 / p times what they started with is at most p (Ville's inequality), over all examples of all runs, whatever
decides when the next run comes.

A capital is a product of factors, one for each example, and its logarithm a sum of integers: it does not depend on the
order of the examples. It is tested after every run, and a file carries it from run to run.
"""

import dataclasses
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar

import numpy as np

from calm_beam.errors import CalmBeamError, UsageError
from calm_beam.manifest import AskedTest
from calm_beam.risk.elementary import log_capital, log_floor
from calm_beam.risk.fwer import holm_test
from calm_beam.risk.losses import LOSS_SCALE, to_signed_fixed_point
from calm_beam.risk.pvalues.signed_mixture import BETS, mixture_p_value
from calm_beam.storage import check_writable, exists, version
from calm_beam.storage.strict_json import read_sealed, write_sealed
from calm_beam.text import counted

from .verification import Verdict

_P = TypeVar("_P", bound=AskedTest)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromiseEvidence:
    """The evidence of all runs up to now about one promise.

    Attributes:
      n: Number of independent units: examples, or clusters of them.
      loss_sum: Sum of their losses in units of 2^-32; failed examples have loss 1.
      proof: For each bettor against "the risk exceeds delta", the logarithm of its capital in units of 2^-32.
      excess: The same against "the risk is at most delta", where failed examples have the lowest possible loss.
      p_value: p-value for "the risk exceeds delta": the least after any run.
      excess_p_value: p-value for "the risk is at most delta": the least after any run.
    """

    n: int = 0
    loss_sum: int = 0
    proof: tuple[int, ...] = (0,) * len(BETS)
    excess: tuple[int, ...] = (0,) * len(BETS)
    p_value: float = 1.0
    excess_p_value: float = 1.0

    def after(self, strict: np.ndarray, lenient: np.ndarray, *, delta: float, is_signed: bool) -> Self:
        """Returns the evidence after one more run.

        Args:
          strict: shape (units,). Losses of the run's units; failed units have loss 1.
          lenient: The same, except that failed units have the lowest possible loss.
          delta: Risk tolerance, in (0, 1).
          is_signed: Whether losses lie in [-1, 1].

        Source: as in `mixture_p_value`; the capitals are evaluated once per run.
        """
        fixed, fixed_lenient = to_signed_fixed_point(strict), to_signed_fixed_point(lenient)
        proof = tuple(
            before + int(log_capital(fixed, delta=delta, share=share).sum())
            for before, share in zip(self.proof, BETS, strict=True)
        )
        excess = tuple(
            before + int(_excess_log_capital(fixed_lenient, delta=delta, share=share, is_signed=is_signed).sum())
            for before, share in zip(self.excess, BETS, strict=True)
        )
        return dataclasses.replace(
            self,
            n=self.n + fixed.size,
            loss_sum=self.loss_sum + int(fixed.sum()),
            proof=proof,
            excess=excess,
            p_value=min(self.p_value, _p_value(proof)),
            excess_p_value=min(self.excess_p_value, _p_value(excess)),
        )


def _p_value(capitals: Sequence[int]) -> float:
    return float(mixture_p_value(np.array(capitals, np.int64)[:, None])[0])


def _excess_log_capital(fixed_losses: np.ndarray, *, delta: float, share: float, is_signed: bool) -> np.ndarray:
    """Returns the growth of log capital of a bettor on "the risk exceeds delta", rounded down."""
    # The factor is least at the least loss there can be, 0 or -1, and is 1 - share there.
    bet = share / (1 + delta if is_signed else delta)
    return log_floor(1 + bet * (fixed_losses / LOSS_SCALE - delta))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnytimeEvidence:
    """The evidence of all runs up to now about the promises of a manifest; each run passes it to the next.

    Attributes:
      manifest: The manifest's digest.
      alpha: Chance of ever reporting a kept promise as broken, in (0, 1).
      runs: Number of runs.
      seen: Digests of the names of the units that have counted.
      promises: Evidence for every entry that promises something, in the manifest's order.
    """

    manifest: str
    alpha: float
    runs: int = 0
    seen: frozenset[str] = frozenset()
    promises: tuple[PromiseEvidence, ...]

    @classmethod
    def start(cls, manifest: str, *, promises: int, alpha: float) -> Self:
        """Returns the evidence before the first run."""
        return cls(manifest=manifest, alpha=alpha, promises=(PromiseEvidence(),) * promises)

    def come_again(self, names: Iterable[str]) -> int:
        """Returns how many of the named units have counted already."""
        return len(self.seen & _digests(names))

    def after_run(
        self,
        names: Iterable[str],
        losses: Sequence[tuple[np.ndarray, np.ndarray] | None],
        *,
        entries: Sequence[AskedTest],
    ) -> Self:
        """Returns the evidence after one more run.

        Args:
          names: Names of the run's units.
          losses: For every promise, the losses of the run's units as `PromiseEvidence.after` takes them; None where the
          run has none.
          entries: Every promise, in the manifest's order.

        Source: ours; see the module docstring.
        """
        return dataclasses.replace(
            self,
            runs=self.runs + 1,
            seen=self.seen | _digests(names),
            promises=tuple(
                before if run is None else before.after(*run, delta=entry.delta, is_signed=entry.is_signed)
                for before, run, entry in zip(self.promises, losses, entries, strict=True)
            ),
        )

    def verdicts(self, entries: Sequence[_P]) -> tuple[Verdict[_P], ...]:
        """Returns a verdict on each entry that any run had losses of.

        Holm's procedure runs over all promises, including those without losses: which promises a run tests may depend
        on earlier findings.

        Args:
          entries: All entries that promise something, in the manifest's order.
        """
        excess = np.array([of_promise.excess_p_value for of_promise in self.promises])
        is_broken = holm_test(excess, epsilon=self.alpha).rejected
        return tuple(
            Verdict(
                entry=entry,
                risk=of_promise.loss_sum / LOSS_SCALE / of_promise.n,
                p_value=of_promise.p_value,
                excess_p_value=of_promise.excess_p_value,
                is_broken=bool(broken),
            )
            for entry, of_promise, broken in zip(entries, self.promises, is_broken, strict=True)
            if of_promise.n
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the evidence as plain JSON values; numbers read back exactly."""
        return {
            "manifest": self.manifest,
            "alpha": self.alpha,
            "runs": self.runs,
            "seen": sorted(self.seen),
            "promises": [
                {**dataclasses.asdict(of_promise), "proof": list(of_promise.proof), "excess": list(of_promise.excess)}
                for of_promise in self.promises
            ],
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Returns the evidence from a dict of `to_dict`, read from an undamaged file."""
        return cls(
            manifest=value["manifest"],
            alpha=value["alpha"],
            runs=value["runs"],
            seen=frozenset(value["seen"]),
            promises=tuple(
                PromiseEvidence(
                    **{**of_promise, "proof": tuple(of_promise["proof"]), "excess": tuple(of_promise["excess"])}
                )
                for of_promise in value["promises"]
            ),
        )


def _digests(names: Iterable[str]) -> frozenset[str]:
    return frozenset(hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16] for name in names)


_SCHEMA = "calm-beam/verification/v1"


class StateError(CalmBeamError, ValueError):
    """A stored state that cannot be used."""


class CarriedState:
    """The evidence of the runs up to now, and the file that keeps it."""

    def __init__(self, path: str, *, manifest: str, promises: int, alpha: float) -> None:
        """Loads the stored evidence, or starts from none.

        Args:
          path: The file.
          manifest: The manifest's digest.
          promises: How many of its entries promise something.
          alpha: Chance of ever reporting a kept promise as broken.

        Raises:
          StateError: If the file is not as it was written.
          UsageError: If it cannot be written, or was kept for another manifest or alpha.
        """
        self._path = path
        try:
            check_writable(path)
        except OSError as error:
            raise UsageError(f"{error} Name another place for the state with --state.") from error
        self._version = version(path)
        self.evidence = AnytimeEvidence.start(manifest, promises=promises, alpha=alpha)
        if not exists(path):
            return
        stored = _read(path)
        if stored.manifest != manifest or len(stored.promises) != promises:
            raise UsageError(
                f"--state {path}: was kept for another manifest. Name the one that it was kept for, or another file."
            )
        if stored.alpha != alpha:
            raise UsageError(
                f"--state {path}: was kept with --alpha={stored.alpha:g}, now it is {alpha:g}. An alpha changed on the "
                "way promises nothing: go on with the old one."
            )
        self.evidence = stored

    def check_new(self, names: Collection[str], *, are_own: bool, unit: str) -> str | None:
        """Refuses units that have counted in an earlier run; returns a warning if they may have.

        Args:
          names: Names of the units of this run.
          are_own: Whether the names come from the data. Otherwise they are derived from the content, and equal ones may
            be two draws of the same prompt.
          unit: The noun for one unit.

        Raises:
          UsageError: If a unit is repeated; where names are derived from content, if all units are.
        """
        again = self.evidence.come_again(names)
        if not again:
            return None
        found = f"{again} of {counted(len(names), unit)} {'was' if again == 1 else 'were'} counted by an earlier run"
        if are_own or again == len(names):
            raise UsageError(
                f"{found} ({self._path} says so). Counted twice, they are less evidence than they seem: give each run "
                "new ones alone. If they are other examples whose ids only number the rows of a file, give them ids of "
                "their own."
            )
        return (
            f"caution: {found}, by prompt and references, as they have no ids. If they are the same examples, and not "
            "prompts that repeat by themselves, alpha does not hold: give each run new ones alone"
        )

    def keep(self, evidence: AnytimeEvidence) -> None:
        """Writes the evidence after this run.

        Raises:
          UsageError: If another run has written the file meanwhile.
        """
        content: dict[str, Any] = {"schema": _SCHEMA, **evidence.to_dict()}
        try:
            write_sealed(self._path, content, replaces=self._version)
        except FileExistsError:
            raise UsageError(f"{self._path}: another run has written it meanwhile. Repeat this one.") from None
        self.evidence = evidence


def _read(path: str) -> AnytimeEvidence:
    content = read_sealed(path, schema=_SCHEMA, kind=StateError, of="runs", again="Name another file with --state")
    try:
        return AnytimeEvidence.from_dict(content)
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"{path}: is not as calm-beam writes it ({error}).") from error
