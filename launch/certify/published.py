"""What becomes of a certification once it is there: files, tables on the terminal, and the report."""

from collections.abc import Sequence

from calm_beam.calibration.file_names import FAILURES, REPORT, RISK_TABLE
from calm_beam.calibration.ledger import LEDGER
from calm_beam.calibration.publish import EarlierResult, publish
from calm_beam.calibration.settings import SettingRow
from calm_beam.errors import CalmBeamError
from calm_beam.launch.terminal import say, tell
from calm_beam.launch.terminal.certification import print_certification
from calm_beam.manifest import MANIFEST, SettingManifest
from calm_beam.storage import is_file, joined, make_folder, remove_unfinished

NEXT_IDS = "next_ids.txt"


def publish_and_tell(
    output: str, manifest: SettingManifest, *, rows: Sequence[Sequence[SettingRow]], earlier: EarlierResult
) -> None:
    """Writes a certification into a directory that exists, tells it, and builds its report.

    Args:
      output: The directory.
      manifest: The result.
      rows: For every test, what it says of every setting.
      earlier: What may be replaced.

    Raises:
      ManifestError: If another run has published meanwhile.
    """
    publish(output, manifest, rows=[row for of_test in rows for row in of_test], failures=(), earlier=earlier)
    print_certification(manifest, rows)
    _report(output)


def files_of(output: str) -> tuple[str, ...]:
    """Returns the names of all files that a certification may write into a directory."""
    return tuple(joined(output, name) for name in (MANIFEST, RISK_TABLE, FAILURES, REPORT, LEDGER, NEXT_IDS))


def prepare_output(output: str) -> None:
    """Makes the directory, and takes away what calls that were killed have left of files that they were writing."""
    make_folder(output)
    for path in files_of(output):
        remove_unfinished(path)


def report_if_missing(output: str) -> None:
    """Builds the report of a certification that was killed between its result and its report."""
    if not is_file(joined(output, REPORT)):
        _report(output)


def _report(output: str) -> None:
    """Builds the report; says so if that fails, since the result stands without it."""
    # Here, since it loads what draws the other kind of report too.
    from calm_beam.launch.report.command import write_external_report

    path = joined(output, REPORT)
    try:
        write_external_report(output, path)
    except (CalmBeamError, OSError) as error:
        again = f"calm-beam report --calibration={output}"
        say(f"caution: no report ({error}). The result in {output} is whole; try: {again}")
    else:
        tell(f"Report: {path}")
