"""How a calibration or a certification ended that was watched round by round, in words."""

from calm_beam.risk.stopping import ROUNDS_WITHOUT_GAIN
from calm_beam.text.counted import counted

from ._external import ExternalManifest
from ._manifest import Manifest
from ._sequential import SequentialRecord


def rounds_in_words(manifest: Manifest) -> str:
    """Returns how a calibration that was watched round by round ended; empty for others."""
    ended, plan = manifest.sequential, manifest.plan
    if ended is None or plan is None or plan.sequential is None:
        return ""
    rule = plan.sequential
    why = {
        "stop_at_threshold": f"every promise had come down to threshold {rule.stop_at_threshold or 0:g}",
        "stop_at_layers": f"no promise used more than {rule.stop_at_layers or 0:g} layers",
        "stop_gain": _gained_little(rule.stop_gain, "the layers"),
        **_WITHOUT_RULE,
    }[ended.ended_by]
    return _in_words(ended, why=why, examples=manifest.data.examples)


def external_rounds_in_words(manifest: ExternalManifest) -> str:
    """Returns how a certification that was watched round by round ended; empty for others."""
    ended, rule = manifest.sequential, manifest.plan.sequential
    if ended is None or rule is None:
        return ""
    why = {
        "stop_at_setting": f"every promise had come to setting {rule.stop_at_setting}, or to a later one",
        "stop_at_cost": f"no promise cost more than {rule.stop_at_cost or 0:g}",
        "stop_gain": _gained_little(rule.stop_gain, "the cost"),
        **_WITHOUT_RULE,
    }[ended.ended_by]
    return _in_words(ended, why=why, examples=manifest.data.examples)


_WITHOUT_RULE = {"all_proved": "nothing was left to prove", "end_of_data": "no rule had stopped them before"}


def _gained_little(share: float | None, what: str) -> str:
    return f"{ROUNDS_WITHOUT_GAIN} rounds in a row had saved less than {100 * (share or 0):g} % of {what}"


def _in_words(ended: SequentialRecord, *, why: str, examples: int) -> str:
    before = [
        f"It had stopped after round {end.rounds} before, and was continued by another rule." for end in ended.continues
    ]
    where = (
        f"after the last of {counted(ended.rounds, 'round')}"
        if ended.rounds == ended.of_rounds
        else f"after round {ended.rounds} of {ended.of_rounds}"
    )
    return " ".join(
        [
            f"The tests were looked at after every round of examples, and ended {where}, with "
            f"{examples:,} of {counted(ended.of_examples, 'example')}: {why}.",
            *before,
        ]
    )
