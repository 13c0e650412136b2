"""Whether data that test a promise are fresh, or those that it was calibrated with."""

import sys
from collections.abc import Sequence

from calm_beam.inputs.examples import Example
from calm_beam.inputs.set_parts import CALIBRATING, CONFIRMING, Split
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary
from calm_beam.manifest import Manifest
from calm_beam.outputs import stored_prompts
from calm_beam.outputs.fingerprint import content_sum_of, fingerprint_text


def is_calibration_set(examples: Sequence[Example], manifest: Manifest) -> bool:
    """Returns whether examples are those that a manifest was calibrated with, or those that confirmed it.

    Args:
      examples: With unique ids.
      manifest: The manifest.
    """
    return bool(_fingerprints(examples, manifest) & _used_fingerprints(manifest))


def count_known_prompts(
    examples: Sequence[Example], shards: Sequence[str], *, vocabulary: Vocabulary | None, task_prefix: str
) -> int:
    """Returns how many examples have prompts that stored generations have, too.

    Args:
      examples: Fresh ones.
      shards: Files of generations.
      vocabulary: Of the model; None where prompts are token ids.
      task_prefix: Put before every textual prompt.
    """
    known = {
        _whole_prompt(prompt, vocabulary, task_prefix=task_prefix) for path in shards for prompt in stored_prompts(path)
    }
    return sum(
        _whole_prompt((example.input, example.input_ids), vocabulary, task_prefix=task_prefix) in known
        for example in examples
    )


def _fingerprints(examples: Sequence[Example], manifest: Manifest) -> set[str]:
    """Returns the fingerprints of examples: of all of them, and of each part, where some confirm what others chose."""
    share = None if manifest.plan is None else manifest.plan.confirm_share
    sets = [examples]
    if manifest.plan is not None and share is not None:
        parts = [Split(name=name, confirm_share=share, salt=manifest.plan.salt) for name in (CALIBRATING, CONFIRMING)]
        sets += [[example for example in examples if part.takes(example)] for part in parts]
    return {fingerprint_text(content_sum_of(some)) for some in sets if some}


def _used_fingerprints(manifest: Manifest) -> set[str]:
    confirmed = () if manifest.confirmation is None else (manifest.confirmation.data.fingerprint,)
    return {manifest.data.fingerprint, *confirmed}


def _whole_prompt(
    prompt: tuple[str | None, tuple[int, ...] | None], vocabulary: Vocabulary | None, *, task_prefix: str
) -> str | tuple[int, ...] | None:
    """Returns a prompt as token ids, where they can be had: what came as text may come back as ids."""
    text, ids = prompt
    if text is None or vocabulary is None:
        return text if ids is None else ids
    ids, _ = vocabulary.encode_prompt(task_prefix + text, room=sys.maxsize)
    return ids
