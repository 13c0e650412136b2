"""The files of a result, put in place in such an order that a manifest never stands beside the files of another run."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Self

from calm_beam.errors import UsageError
from calm_beam.manifest import MANIFEST, Manifest, SettingManifest, lost_race, manifest_text, write_manifest
from calm_beam.manifest.file_names import FAILURES, REPORT, RISK_TABLE
from calm_beam.storage import is_file, joined, open_input, remove_file, replacing, strict_json, version

from .risk_table import write_risk_table


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlierResult:
    """The result that a run found when it began, by the versions of its files; empty for those that were not there.

    That is what the run may replace; whatever appeared since belongs to another run.
    """

    manifest: str = ""
    risk_table: str = ""
    failures: str = ""

    @classmethod
    def found_in(cls, output: str) -> Self:
        """Returns what is in an output directory now."""
        names = (MANIFEST, RISK_TABLE, FAILURES)
        manifest, risk_table, failures = (version(joined(output, name)) for name in names)
        return cls(manifest=manifest, risk_table=risk_table, failures=failures)

    def check_may_go(self, output: str, *, overwrite: bool) -> None:
        """Refuses an output directory that holds a manifest, unless it is to be overwritten.

        Raises:
          UsageError: If it does.
        """
        if self.manifest and not overwrite:
            raise UsageError(
                f"--output {output}: holds a manifest already. Choose another directory, or pass --overwrite."
            )


def withdraw(output: str, earlier: EarlierResult) -> None:
    """Takes an earlier result away, its manifest before all else.

    Raises:
      FileExistsError: If a file was written since by another run.
    """
    remove_file(joined(output, MANIFEST), removes=earlier.manifest)
    # Whoever made it and when: it shows the result that is no more.
    remove_file(joined(output, REPORT))
    remove_file(joined(output, RISK_TABLE), removes=earlier.risk_table)
    remove_file(joined(output, FAILURES), removes=earlier.failures)


def publish(
    output: str,
    manifest: Manifest | SettingManifest,
    *,
    rows: Sequence[Any],
    failures: Sequence[tuple[str, str]],
    earlier: EarlierResult,
) -> str:
    """Writes risk table, list of failures and manifest, the manifest last; returns its path.

    Each file appears whole or not at all. Until the manifest stands there is no result, whatever else does. Of several
    runs that publish, the one whose table is there first does so, and the others write nothing more. A step that is
    run again publishes the same once more, and succeeds. An earlier result's report is taken away: it is made anew of
    what was published.

    Args:
      output: A directory that exists.
      manifest: The result.
      rows: The risk table, as `write_risk_table` takes it.
      failures: Id and reason of examples that count as failed; without any there is no such file.
      earlier: What may be replaced.

    Raises:
      ManifestError: If another run has published meanwhile.
    """
    path = joined(output, MANIFEST)
    content = manifest_text(manifest).encode("utf-8")
    if _holds(path, content):
        return path
    try:
        remove_file(path, removes=earlier.manifest)
        remove_file(joined(output, REPORT))
        write_risk_table(joined(output, RISK_TABLE), rows, replaces=earlier.risk_table)
        _write_failures(joined(output, FAILURES), failures, replaces=earlier.failures)
    except FileExistsError:
        if _holds(path, content):
            return path
        raise lost_race(path) from None
    write_manifest(manifest, path)
    return path


def read_failures(output: str) -> tuple[tuple[str, str], ...]:
    """Returns id and reason of the examples that failed, by the list in an output directory; none if there is no list.

    Raises:
      ValueError: If the list is not as it was written; says where.
    """
    path = joined(output, FAILURES)
    if not is_file(path):
        return ()
    failures = []
    with open_input(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                row = strict_json.loads(line)
                failure = (row["id"], row["reason"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}, line {number}: is not as calm-beam writes it ({type(error).__name__}: {error})."
                ) from error
            if not all(isinstance(text, str) for text in failure):
                raise ValueError(f"{path}, line {number}: is not as calm-beam writes it: id and reason must be texts.")
            failures.append(failure)
    return tuple(failures)


def _write_failures(path: str, failures: Sequence[tuple[str, str]], *, replaces: str) -> None:
    if not failures:
        remove_file(path, removes=replaces)
        return
    lines = [json.dumps({"id": name, "reason": reason}, ensure_ascii=False) for name, reason in failures]
    with replacing(path, replaces=replaces) as temporary:
        temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _holds(path: str, content: bytes) -> bool:
    """Returns whether a file is there and holds just this."""
    if not is_file(path):
        return False
    with open_input(path) as file:
        return file.read() == content
