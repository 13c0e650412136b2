"""Tasks, prompts and outputs for tests of the experiments."""

from collections.abc import Sequence
from typing import Any

from calm_beam.evaluation.performance import Task
from calm_beam.inputs.examples import Example
from calm_beam.inputs.prompts import Prompt
from calm_beam.outputs import Generation, Output
from tests.builders import build_checkpoint, build_config


def build_prompt(name: str, ids: Sequence[int], *, references: Sequence[str] = ()) -> Prompt:
    """Returns a prompt given as token ids."""
    example = Example(
        id=name,
        has_own_id=True,
        input=None,
        input_ids=tuple(ids),
        references=tuple(references),
        file_index=0,
        line=1,
    )
    return Prompt(example=example, ids=tuple(ids), truncated=False)


def build_task(prompts: Sequence[Prompt], **changes: Any) -> Task:
    """Returns a task with a tiny model and Token-F1, with the given fields changed."""
    fields: dict[str, Any] = {
        "checkpoint": build_checkpoint(build_config(num_encoder_layers=1, num_decoder_layers=3)),
        "vocabulary": None,
        "prompts": tuple(prompts),
        "metric": "token_f1",
        "max_input_length": 32,
        "max_decode_length": 6,
        "batch_size": 4,
    }
    return Task(**{**fields, **changes})


def build_generation(prompt: Prompt, outputs: Sequence[tuple[str, Sequence[int]]]) -> Generation:
    """Returns a generation with outputs of the given texts and exit layers."""
    return Generation(
        example=prompt.example,
        truncated=False,
        duplicate=False,
        failure=None,
        outputs=tuple(
            Output(text=text, tokens=(5,) * len(layers), exit_layers=tuple(layers), confidences=(0.5,) * len(layers))
            for text, layers in outputs
        ),
    )
