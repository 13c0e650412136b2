"""What fresh losses say of the settings that a manifest of settings promises."""

from collections.abc import Iterable

import numpy as np

from calm_beam.errors import UsageError
from calm_beam.inputs.losses.shown import named
from calm_beam.manifest import SettingCalibration, SettingManifest
from calm_beam.outputs.fingerprint import come_again, fingerprint_text
from calm_beam.text import counted

from .anytime import AnytimeEvidence
from .loss_table import LossTable
from .verification import Verdict, judged


def promised(manifest: SettingManifest) -> tuple[SettingCalibration, ...]:
    """Returns the entries that promise something of a setting."""
    return tuple(entry for entry in manifest.calibrations if entry.setting is not None)


def check_fresh(sweep: LossTable, manifest: SettingManifest) -> None:
    """Refuses losses that cannot test a manifest.

    Raises:
      UsageError: If a promised setting or a group has no losses, there are losses of a setting that was not swept, or
        all are the losses that were certified.
    """
    entries = promised(manifest)
    wanted = sorted({str(entry.setting) for entry in entries})
    if missing := [name for name in wanted if name not in sweep.settings]:
        raise UsageError(f"there are no fresh losses of {named(missing, 'promised setting')}.")
    if extra := [name for name in sweep.settings if name not in manifest.plan.order]:
        raise UsageError(
            f"there are fresh losses of {named(extra, 'setting')} that the manifest is not about. Name settings as it "
            "does, and leave out the others."
        )
    groups = {entry.group for entry in entries if entry.group is not None}
    if lacking := sorted(groups - set(sweep.groups or ())):
        raise UsageError(f"there are no fresh losses of {named(lacking, 'group')}.")
    certified = {setting.name: setting.fingerprint for setting in manifest.settings}
    if all(fingerprint_text(sweep.fingerprints[name]) == certified[name] for name in wanted):
        raise UsageError(
            "these are the very losses that were certified. What chose the setting cannot test it: take examples that "
            "were drawn anew."
        )


def why_not_fresh(sweep: LossTable, manifest: SettingManifest) -> str | None:
    """Returns a caution if examples that were certified seem to be among fresh ones; None otherwise.

    Ids say it, and ids that merely number the rows of a file are the same in every file: so this is no error.
    """
    sample = manifest.data.id_sample
    if sample is None or not (again := come_again(sample, sweep.ids)):
        return None
    return (
        f"of {counted(len(sample), 'certified id')} that the manifest remembers, {again} "
        f"{'is' if again == 1 else 'are'} among the fresh ones. If these are the same examples, leave them out: what "
        "chose the setting cannot test it."
    )


def verify_settings(
    sweep: LossTable, manifest: SettingManifest, *, alpha: float
) -> tuple[Verdict[SettingCalibration], ...]:
    """Returns a verdict on each entry that promises something.

    Args:
      sweep: Losses of examples drawn independently of those that were certified; `check_fresh` has found them good.
      manifest: What was promised.
      alpha: Chance of calling any promise broken that is kept, in (0, 1).

    Raises:
      EvidenceError: If an entry's p-value is for losses of 0 and 1, and there are others.

    Source: ours; see `calm_beam.calibration.verification`.
    """
    return judged(promised(manifest), _losses(sweep, manifest), alpha=alpha)


def unit_names(sweep: LossTable) -> tuple[frozenset[str], str]:
    """Returns the names of the independent units of a sweep, and what one is called: an example, or a cluster."""
    if sweep.clusters is None:
        return frozenset(sweep.ids), "example"
    return frozenset(sweep.clusters), "cluster"


def with_settings(
    evidence: AnytimeEvidence, names: Iterable[str], *, sweep: LossTable, manifest: SettingManifest
) -> AnytimeEvidence:
    """Returns the evidence of earlier runs after one more.

    Args:
      evidence: Of the earlier ones.
      names: Of the units of this one, none of which has counted before.
      sweep: Its losses, as `verify_settings` takes them.
      manifest: What was promised.
    """
    return evidence.after_run(names, _losses(sweep, manifest), entries=promised(manifest))


def _losses(sweep: LossTable, manifest: SettingManifest) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the losses of every promise. Nobody says which outputs failed: no loss is more lenient than another."""
    in_order = [_in_order(sweep, entry, salt=manifest.plan.salt) for entry in promised(manifest)]
    return [(of_entry, of_entry) for of_entry in in_order]


def _in_order(sweep: LossTable, entry: SettingCalibration, *, salt: str) -> np.ndarray:
    """Returns the losses that an entry is about in betting order, shape (units,)."""
    assert entry.setting is not None
    return sweep.in_betting_order(salt=salt, order=(entry.setting,), group=entry.group, tail=entry.tail)[:, 0]
