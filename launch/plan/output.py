"""The file that `calm-beam plan` may write."""

from collections.abc import Sequence

from calm_beam.launch.flags import UsageError, naming
from calm_beam.storage import check_writable, is_cloud_path, is_folder, parent

PAGE = ".html"


def check_output(path: str, *, kinds: Sequence[str]) -> None:
    """Refuses a file that cannot be written, or of another kind than those.

    Raises:
      UsageError: Says what is wrong.
    """
    if not path.endswith(tuple(kinds)):
        *others, last = kinds
        expected = f"{', '.join(others)} or {last}" if others else last
        raise UsageError(f"--output {path}: expected a name that ends in {expected}.")
    with naming("--output"):
        if not is_cloud_path(path) and not is_folder(parent(path)):
            raise UsageError(f"--output {path}: the folder {parent(path)} does not exist.")
        check_writable(path)
