"""Finding the promise that losses are held against, and saying what the losses have to be of."""

import io

from calm_beam.errors import UsageError
from calm_beam.inputs.examples import bounded_lines
from calm_beam.launch.flags import naming
from calm_beam.launch.flags.manifest import entry_choice, entry_in_words, find_manifest
from calm_beam.launch.terminal import say
from calm_beam.manifest import (
    ANY_ENTRY,
    Calibration,
    EntryChoice,
    Manifest,
    ManifestError,
    SettingManifest,
    read_any_manifest,
)
from calm_beam.risk.monitor import WatchedPromise
from calm_beam.serving.watched import Watched, entry_of_row
from calm_beam.storage import is_file, open_input, why_no_file
from calm_beam.text import printable_line

from .request import STREAM, MonitorRequest


def prepare(request: MonitorRequest) -> Watched:
    """Returns what losses are held against, and says of what they have to be.

    Raises:
      UsageError: If there is no such entry, or no file of losses.
    """
    manifest = read_any_manifest(find_manifest(request.manifest))
    choice = entry_choice(request, manifest)
    with naming("--losses"):
        if request.losses != STREAM and not is_file(request.losses):
            raise UsageError(f"--losses {request.losses}: {why_no_file(request.losses)} Pass - for standard input.")
        if choice == ANY_ENTRY and request.losses != STREAM:
            choice = _choice_of_rows(request.losses, manifest)
    watched = _watched(manifest, choice)
    _say_what_losses_are(manifest, watched)
    return watched


def _choice_of_rows(path: str, manifest: Manifest | SettingManifest) -> EntryChoice:
    """Returns the entry that the first row of a probe is about, if it is one of this manifest; else any entry."""
    with open_input(path) as raw, io.TextIOWrapper(raw, "utf-8", errors="surrogateescape") as file:
        first = next((line for _, line in bounded_lines(file, name=path)), "")
    place = entry_of_row(first, digest=manifest.digest)
    if place is None or place >= len(manifest.calibrations):
        return ANY_ENTRY
    return EntryChoice.named_by(manifest.calibrations[place])


def _watched(manifest: Manifest | SettingManifest, choice: EntryChoice) -> Watched:
    """Returns the entry that is chosen."""
    if isinstance(manifest, SettingManifest):
        return _watched_setting(manifest, choice)
    entry = _chosen_entry(manifest, choice)
    return Watched(
        promise=WatchedPromise.of(manifest, entry),
        tail=entry.objective.tail,
        words=entry_in_words(entry),
        remedy="Serve the full model, and calibrate anew.",
    )


def _watched_setting(manifest: SettingManifest, choice: EntryChoice) -> Watched:
    try:
        entry = manifest.calibration(choice)
    except ManifestError as error:
        raise UsageError(f"{error} Choose by --group, --tail, --delta and --epsilon.") from error
    if entry.setting is None:
        raise UsageError("what was asked for found no safe setting: there is no risk to watch.")
    of_group = "all examples" if entry.group is None else f"group {entry.group}"
    above = "" if entry.tail is None else f" > {entry.tail:g}"
    return Watched(
        promise=WatchedPromise.of(manifest, entry),
        tail=entry.tail,
        words=f"{of_group}, loss{above}, delta {entry.delta:g}, epsilon {entry.epsilon:g} (setting {entry.setting})",
        remedy="Go back to a safer setting, and certify anew.",
    )


def _chosen_entry(manifest: Manifest, choice: EntryChoice) -> Calibration:
    try:
        named = manifest.matching(choice)
    except ManifestError as error:
        raise UsageError(f"--group: {error}") from error
    found = [entry for entry in named if entry.threshold is not None]
    if named and not found:
        raise UsageError("what was asked for says never exit: there is no risk to watch.")
    if len(found) != 1:
        there = "; ".join(entry_in_words(entry) for entry in manifest.of_group(choice.group))
        raise UsageError(
            f"{len(found)} entries of the manifest have a threshold and match what was asked; exactly one is watched. "
            "Choose by --consistency, --metric, --loss, --delta and --epsilon, the entry's own. "
            f"The manifest has: {there}."
        )
    return found[0]


def _say_what_losses_are(manifest: Manifest | SettingManifest, watched: Watched) -> None:
    """Says of what every line has to be the loss, where that is not an example of all prompts."""
    if manifest.data.clusters is not None:
        say("the manifest is about clusters: every line has to be the mean loss of one")
    if manifest.data.groups:
        group = watched.promise.group
        whose = "all groups, as they come" if group is None else f"group {printable_line(group)} alone"
        what, where = ("prompts", "at this entry's threshold")
        if isinstance(manifest, SettingManifest):
            what, where = ("examples", "under this entry's setting")
        say(f"the manifest tells groups apart: these have to be losses of {what} of {whose}, {where}")
