"""How a calibration ended that was watched round by round, in words."""

from calm_beam.counted import counted
from calm_beam.risk.stopping import ROUNDS_WITHOUT_GAIN

from ._manifest import Manifest


def rounds_in_words(manifest: Manifest) -> str:
    """Returns how a calibration that was watched round by round ended; empty for others."""
    ended, plan = manifest.sequential, manifest.plan
    if ended is None or plan is None or plan.sequential is None:
        return ""
    rule = plan.sequential
    why = {
        "stop_at_threshold": f"every promise had come down to threshold {rule.stop_at_threshold or 0:g}",
        "stop_at_layers": f"no promise used more than {rule.stop_at_layers or 0:g} layers",
        "stop_gain": f"{ROUNDS_WITHOUT_GAIN} rounds in a row had saved less than {100 * (rule.stop_gain or 0):g} % of "
        "the layers",
        "all_proved": "nothing was left to prove",
        "end_of_data": "no rule had stopped them before",
    }[ended.ended_by]
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
            f"{manifest.data.examples:,} of {counted(ended.of_examples, 'example')}: {why}.",
            *before,
        ]
    )
