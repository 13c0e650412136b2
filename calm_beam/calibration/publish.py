"""The files of a result, put in place in such an order that a manifest never stands beside the files of another run."""

import json
from collections.abc import Sequence

from calm_beam.manifest import Manifest, ManifestError, manifest_text, write_manifest
from calm_beam.storage import exists, joined, open_input, remove_file, replacing

from .result import RiskRow
from .risk_table import write_risk_table

MANIFEST = "manifest.json"
RISK_TABLE = "risk_table.csv"
FAILURES = "failures.jsonl"


def publish(
    output: str,
    manifest: Manifest,
    rows: Sequence[RiskRow],
    failures: Sequence[tuple[str, str]],
    *,
    overwrite: bool = False,
) -> str:
    """Writes risk table, list of failures and manifest, the manifest last; returns its path.

    Each file appears whole or not at all. Until the manifest stands there is no result, whatever else does.

    Args:
      output: A directory that exists.
      manifest: The result.
      rows: The risk table.
      failures: Id and reason of examples that count as failed; without any there is no such file.
      overwrite: Whether an earlier result is replaced; its manifest is taken away before anything else.

    Raises:
      ManifestError: If another manifest stands there and is not to be replaced, written meanwhile by another run.
    """
    path = joined(output, MANIFEST)
    if overwrite:
        remove_file(path)
    _check_own(path, manifest)
    failed = joined(output, FAILURES)
    if failures:
        with replacing(failed) as temporary:
            lines = [json.dumps({"id": name, "reason": reason}, ensure_ascii=False) for name, reason in failures]
            temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    else:
        remove_file(failed)
    write_risk_table(joined(output, RISK_TABLE), rows)
    try:
        write_manifest(manifest, path, overwrite=False)
    except FileExistsError:
        _check_own(path, manifest)
    return path


def _check_own(path: str, manifest: Manifest) -> None:
    """Refuses a manifest that stands there already, unless it is this one: a step that a runner repeats finds that."""
    if exists(path):
        with open_input(path) as file:
            if file.read() != manifest_text(manifest).encode():
                raise ManifestError(f"{path}: another run has written its manifest meanwhile.")
