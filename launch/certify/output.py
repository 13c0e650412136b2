"""The directory that a certification writes to: its files, and whether it may be written."""

from calm_beam.calibration.ledger import LEDGER, Ledger
from calm_beam.calibration.publish import EarlierResult
from calm_beam.launch.flags import UsageError, naming
from calm_beam.launch.flags.data import find_folder
from calm_beam.launch.terminal import say
from calm_beam.manifest import MANIFEST
from calm_beam.manifest.file_names import FAILURES, REPORT, RISK_TABLE
from calm_beam.storage import check_writable, is_cloud_path, is_file, joined, make_folder, remove_unfinished

from .request import CertifyRequest

NEXT_IDS = "next_ids.txt"
"""The file that names which examples to evaluate next."""
_SEEN_BEFORE = (
    "caution: --overwrite begins anew where losses have been looked at, which have decided how many there are. For the "
    "same examples, what follows proves nothing."
)


def checked_output(request: CertifyRequest) -> str:
    """Returns the directory to write to, which can be written to.

    Raises:
      UsageError: If it cannot.
    """
    output = find_folder(request.output)
    with naming("--output"):
        # In a bucket nothing can be in the way of a name.
        for path in (joined(output, MANIFEST),) if is_cloud_path(output) else _files_of(output):
            check_writable(path)
    return output


def check_empty(output: str, earlier: EarlierResult) -> None:
    """Refuses a directory with an earlier result, or with what leads to one.

    Raises:
      UsageError: If there is one.
    """
    if is_file(joined(output, LEDGER)):
        raise UsageError(
            f"--output {output}: holds a sequential certification. Its losses have been looked at, so that a test "
            "for all examples at once proves nothing of them. Go on with --sequential, or choose another directory "
            "for other examples."
        )
    earlier.check_may_go(output, overwrite=False)


def warn_of_counted(output: str) -> None:
    """Says so if the ledger that is to be taken away has counted a round, or cannot tell."""
    try:
        ledger = Ledger.read(joined(output, LEDGER))
        has_counted = ledger is not None and bool(ledger.rounds)
    except UsageError:
        has_counted = True
    if has_counted:
        say(_SEEN_BEFORE)


def prepare_output(output: str) -> None:
    """Makes the directory, and takes away what calls that were killed have left of files that they were writing."""
    make_folder(output)
    for path in _files_of(output):
        remove_unfinished(path)


def _files_of(output: str) -> tuple[str, ...]:
    """Returns the names of all files that a certification may write into a directory."""
    return tuple(joined(output, name) for name in (MANIFEST, RISK_TABLE, FAILURES, REPORT, LEDGER, NEXT_IDS))
