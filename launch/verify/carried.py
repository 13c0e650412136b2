"""Where `verify --anytime` keeps what runs find together: beside the manifest, or where `--state` says."""

import os

from calm_beam.calibration.carried import CarriedState
from calm_beam.launch.flags.data import check_parent
from calm_beam.launch.terminal import say
from calm_beam.storage import exists, joined, parent

from .request import STATE, Promises


def take_up(request: Promises, path: str, *, manifest: str, promises: int) -> CarriedState | None:
    """Returns the state to go on with; None for a run by itself, and then says if there is a state.

    Args:
      request: Says whether runs count together, and where that is kept.
      path: Of the manifest.
      manifest: Its digest.
      promises: How many of its entries promise something.

    Raises:
      StateError: As `CarriedState`.
      UsageError: As `CarriedState`.
    """
    beside = joined(parent(path), STATE)
    if request.anytime:
        place = beside if request.state is None else os.fspath(request.state)
        check_parent("--state", place)
        return CarriedState(place, manifest=manifest, promises=promises, alpha=request.alpha)
    if exists(beside):
        say(
            f"{beside} keeps what earlier runs with --anytime have found. This run is not among them, and its alpha is "
            "for itself alone: of many such runs, more than a share alpha calls a promise broken that is kept"
        )
    return None
