"""Folders for what workers decode and this machine reads back, which are gone once it was read."""

import contextlib
import os
import tempfile
from collections.abc import Iterator

from apache_beam.options.pipeline_options import GoogleCloudOptions

from calm_beam.launch.flags import UsageError, naming
from calm_beam.launch.terminal import say
from calm_beam.storage import absolute, check_writable, is_cloud_path, is_folder, joined, parent, remove_folder

from .workers import Workers


def shared_place(workers: Workers, *, beside: str | None = None) -> str:
    """Returns a folder in which workers and this machine can both make files, as far as flags tell.

    Workers on this machine need no cloud for that, and workers elsewhere no disk of it. Those that run elsewhere and
    are told of a folder here refuse to decode (`check_folder`).

    Args:
      workers: Who decodes.
      beside: A file that is made of what they decode, and that may be written; None if none is. Then `--temp_location`
        names the place, and this machine's folder for temporary files is taken where it is left out.

    Raises:
      UsageError: If nothing can be written to `--temp_location`.
    """
    if beside is not None:
        place = parent(beside)
    else:
        given = workers.options.view_as(GoogleCloudOptions)
        # As Beam does.
        place = given.temp_location or given.staging_location
    if place is None or (workers.are_here and is_cloud_path(place)):
        return tempfile.gettempdir()
    if beside is None:
        with naming("--temp_location"):
            if not is_cloud_path(place) and not is_folder(place):
                raise UsageError(f"--temp_location {place}: no such folder.")
            check_writable(joined(place, _random_name("calm-beam")))
    return absolute(place)


@contextlib.contextmanager
def passing_folder(place: str, *, name: str) -> Iterator[str]:
    """Gives an empty folder, and removes it with all that is in it when the block ends, however it ends.

    Only what a job elsewhere may still write to stays, and the interrupt that ends the block then says so.

    Args:
      place: Of `shared_place`.
      name: What the name of the folder begins with.

    Raises:
      KeyboardInterrupt: If the block is interrupted.
    """
    if not is_cloud_path(place):
        with tempfile.TemporaryDirectory(prefix=name, dir=place) as folder:
            yield folder
        return
    folder = joined(place, _random_name(name))
    is_left = False
    try:
        yield folder
    except KeyboardInterrupt as interrupt:
        # It says what goes on elsewhere.
        is_left = bool(interrupt.args)
        if is_left:
            raise KeyboardInterrupt(
                f"{interrupt}; nobody will read what it decodes: cancel it, and remove {folder}"
            ) from interrupt
        raise
    finally:
        if not is_left:
            _remove(folder, place)


def _random_name(name: str) -> str:
    return f"{name}{os.urandom(6).hex()}"


def _remove(folder: str, place: str) -> None:
    try:
        remove_folder(folder, inside=place)
    except OSError as error:
        # What was made of it stands, or what ended the run is more important.
        say(f"caution: {folder} could not be removed, and is of no more use: {error}")
