"""SeqIO tasks for tests; importing it registers them, as `--seqio_module` does."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import seqio
import tensorflow as tf

from tests.pipelines import text_rows

TEXT_TASK = "calm_beam_text"
"""Gives the prompts and the references of `text_rows(30)`, in a split of one shard."""


def _dataset(split: str, shuffle_files: bool, rows: Sequence[Mapping[str, Any]]) -> tf.data.Dataset:
    def generate() -> Any:
        for row in rows:
            yield {"inputs": row["input"], "targets": row["references"]}

    signature = {"inputs": tf.TensorSpec([], tf.string), "targets": tf.TensorSpec([None], tf.string)}
    return tf.data.Dataset.from_generator(generate, output_signature=signature)


def text_features() -> dict[str, seqio.Feature]:
    """Returns features whose values pass as they are."""
    return {
        name: seqio.Feature(seqio.PassThroughVocabulary(size=64), add_eos=False, dtype=tf.string)
        for name in ("inputs", "targets")
    }


seqio.TaskRegistry.add(
    TEXT_TASK,
    source=seqio.FunctionDataSource(functools.partial(_dataset, rows=text_rows(30)), splits=["validation"]),
    preprocessors=[],
    output_features=text_features(),
)
seqio.MixtureRegistry.add("calm_beam_mixture", [TEXT_TASK], default_rate=1)
