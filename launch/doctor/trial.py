"""A small run: sweeps a few prompts with the demo model and serves one of them; both outputs must agree."""

import dataclasses
import itertools
import time

import numpy as np

from calm_beam.checkpoints import load_checkpoint
from calm_beam.decoding.branches import Branch, BranchResult, PromptResult, sweep_branches
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.decoding.single_prompts import single_prompt_decoder
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs import read_examples
from calm_beam.inputs.demo import embedded
from calm_beam.inputs.prompts import encode_prompt
from calm_beam.inputs.vocabularies.vocabulary import open_vocabulary, output_text

_PROMPTS = 4
_THRESHOLDS = (0.9, 0.5)
_SETTINGS = DecodeSettings(rule=ExitRule(), thresholds=_THRESHOLDS, max_input_length=48, max_decode_length=32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """The result of a small run.

    Attributes:
      prompt: The prompt that was served.
      answer: Its output at the highest threshold.
      layers: Mean layers per token of the answer.
      num_layers: Layers of the decoder.
      difference: Description of how the served output differs from the sweep's; None if it does not.
      seconds: Duration of the run, compiling included.
    """

    prompt: str
    answer: str
    layers: float
    num_layers: int
    difference: str | None
    seconds: float


def run_trial() -> Trial:
    """Sweeps and serves; returns the result.

    Raises:
      CalmBeamError: If the demo model or its data cannot be read.
      ValueError: If there is too little memory.
      RuntimeError: If a device fails.
    """
    began = time.monotonic()
    checkpoint = load_checkpoint(embedded.MODEL)
    assert checkpoint.vocabulary_path is not None
    vocabulary = open_vocabulary(checkpoint.vocabulary_path)
    examples = itertools.islice(read_examples(str(embedded.CALIBRATION_SET)), _PROMPTS)
    prompts = [
        encode_prompt(
            example,
            vocabulary,
            settings=_SETTINGS,
            vocab_size=checkpoint.config.vocab_size,
            on_long="error",
        )
        for example in examples
    ]
    sweep = Decoder(
        checkpoint,
        sweep_branches(_SETTINGS.rule, _THRESHOLDS, max_decode_length=_SETTINGS.max_decode_length),
        max_input_length=_SETTINGS.max_input_length,
        batch_size=_PROMPTS,
    )
    by_sweep = dict(sweep.decode([prompt.ids for prompt in prompts]))
    place = next(number for number, prompt in enumerate(prompts) if prompt.example.input == embedded.PROMPT)
    decoder = single_prompt_decoder(
        checkpoint,
        Branch.at(_SETTINGS.rule, _THRESHOLDS[0], max_decode_length=_SETTINGS.max_decode_length),
        max_input_length=_SETTINGS.max_input_length,
    )
    ((_, served),) = decoder.decode([prompts[place].ids])
    tokens = served.tokens[: served.length]
    return Trial(
        prompt=embedded.PROMPT,
        answer=output_text(tokens.tolist(), vocabulary),
        layers=float(served.exit_layers[: served.length].mean()),
        num_layers=checkpoint.config.num_decoder_layers,
        difference=difference(by_sweep[place], served, lane=1),
        seconds=time.monotonic() - began,
    )


def difference(by_sweep: PromptResult, served: BranchResult, *, lane: int) -> str | None:
    """Returns a description of how a served output differs from a branch of the sweep; None if they are equal."""
    if not (by_sweep.is_finite and served.is_finite):
        return "logits are not finite numbers"
    for name in ("tokens", "exit_layers"):
        expected, found = getattr(by_sweep, name)[lane], getattr(served, name)
        steps = np.flatnonzero(expected != found)
        if steps.size:
            step = int(steps[0])
            return f"{name} differ from step {step + 1} on: {expected[step]} swept, {found[step]} served"
    return None
