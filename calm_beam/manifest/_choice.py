"""Which entry of a manifest is meant, as one value that is passed on whole."""

import dataclasses
from collections.abc import Iterable
from typing import Self, TypedDict, TypeVar

from calm_beam.errors import ManifestError

from ._guarantee import SETTINGS, THRESHOLDS
from ._tests import AskedTest

PROMISE = ("consistency", "metric", "loss", "delta", "epsilon")
"""What is asked of a promise, whatever group it is about."""


# What only entries of a kind are told apart by, and what to do where a manifest is of the other.
_ONLY = {
    THRESHOLDS: (("consistency", "metric", "loss", "confidence"), "Leave it out."),
    SETTINGS: (("tail",), "Name its {sign}loss."),
}
_Entry = TypeVar("_Entry", bound=AskedTest)


class EntryWords(TypedDict, total=False):
    """The arguments by which callers name an entry: the fields of `EntryChoice`."""

    consistency: str | None
    metric: str | None
    loss: str | None
    group: str | None
    tail: float | None
    delta: float | None
    epsilon: float | None
    confidence: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntryChoice:
    """The entry of a manifest that is asked for. What is None is left open, where one entry matches the rest.

    Attributes:
      consistency: `textual` or `risk`.
      metric: Name of the metric. Losses by code of the user's are measured only if it is named here.
      loss: What is made of its scores, such as `signed` or `dissimilarity>0.3`.
      group: Group that the entry is about; None for the entry about all prompts or examples.
      tail: Of an entry about settings, the loss that an example may have; None for the entry of the mean loss.
      delta: Risk tolerance, exactly as calibrated.
      epsilon: Allowed probability of breaking it, exactly as calibrated.
      confidence: The confidence measure, if the manifest names code of the user's. It chooses no entry: it is named
        since a file alone does not decide what runs.
    """

    consistency: str | None = None
    metric: str | None = None
    loss: str | None = None
    group: str | None = None
    tail: float | None = None
    delta: float | None = None
    epsilon: float | None = None
    confidence: str | None = None

    @classmethod
    def named_by(cls, holder: object) -> Self:
        """Returns the choice that flags, or the fields of a transform, make.

        Args:
          holder: What has attributes of the same names; what it has no attribute for is left open.
        """
        return cls(**{field.name: getattr(holder, field.name, None) for field in dataclasses.fields(cls)})

    def promise(self) -> dict[str, str | float]:
        """Returns what is asked of the promise, whatever group it is about: values by name, without those left open."""
        values = {name: getattr(self, name) for name in PROMISE}
        return {name: value for name, value in values.items() if value is not None}

    def among(self, entries: Iterable[_Entry]) -> tuple[_Entry, ...]:
        """Returns the entries about its group that have the promise that is asked for, as far as it is."""
        asked = {"group": self.group, **self.promise()}
        return tuple(entry for entry in entries if all(getattr(entry, name) == asked[name] for name in asked))

    def check_for(self, kind: str, *, sign: str = "") -> None:
        """Raises ManifestError if it names what no entry of a kind has.

        Args:
          kind: `THRESHOLDS` or `SETTINGS`.
          sign: What stands before names in the message: `--` where they are flags.
        """
        for other, (names, remedy) in _ONLY.items():
            for name in names:
                if other != kind and getattr(self, name) is not None:
                    raise ManifestError(
                        f"{sign}{name} is for manifests of kind {other}, and this one is of kind {kind}. "
                        f"{remedy.format(sign=sign)}"
                    )


ANY_ENTRY = EntryChoice()
"""The choice of whoever names nothing: the entry that is served, or the only one."""
