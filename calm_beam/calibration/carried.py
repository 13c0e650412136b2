"""The evidence of several tests of one manifest, carried from run to run in a file."""

from collections.abc import Collection
from typing import Any

from calm_beam.errors import CalmBeamError, UsageError
from calm_beam.storage import check_writable, exists, version
from calm_beam.storage.sealed_json import read_sealed, write_sealed
from calm_beam.text import counted

from .anytime import AnytimeEvidence

_SCHEMA = "calm-beam/verification/v1"


class StateError(CalmBeamError, ValueError):
    """A stored state that cannot be used."""


class CarriedState:
    """The evidence of the runs up to now, and the file that keeps it."""

    def __init__(self, path: str, *, manifest: str, promises: int, alpha: float) -> None:
        """Takes up what is stored, or starts anew.

        Args:
          path: The file.
          manifest: The manifest's digest.
          promises: How many of its entries promise something.
          alpha: Chance of ever calling any promise broken that is kept.

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
        """Refuses units that have counted in an earlier run; returns a caution where they may have.

        Args:
          names: Of the units of this run.
          are_own: Whether the names stood in the data. If not they were made of the content, and equal ones may be two
            draws of the same prompt.
          unit: What one is called.

        Raises:
          UsageError: If a unit comes again; without names of their own, if all do.
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
        """Keeps the evidence after this run.

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
