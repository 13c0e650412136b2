"""Examples of a shard become generations, even if some of them are invalid."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest

from calm_beam.decoding.branches import PromptResult, Request
from calm_beam.decoding.decoder import Decoder
from calm_beam.inputs.examples import DataError
from calm_beam.outputs import Generation
from calm_beam.outputs.worker import LoadedModel
from tests.calm_beam.calibration.builders import build_example, build_generation
from tests.pipelines import SETTINGS, build_assignment


class _Echo:
    """Answers every prompt with its first id and eos, at the last of four layers."""

    def decode(self, prompts: Sequence[Request]) -> Iterator[tuple[int, PromptResult]]:
        """Yields results in the order of the prompts."""
        lanes = 1 + len(SETTINGS.thresholds)
        for index, prompt in enumerate(prompts):
            tokens = np.tile(np.array([prompt.ids[0], 1], np.int32), (lanes, 1))
            ones = np.ones(tokens.shape, np.float32)
            layers, lengths = np.full_like(tokens, 4), np.full(lanes, 2)
            yield (
                index,
                PromptResult(tokens=tokens, exit_layers=layers, confidences=ones, lengths=lengths, is_finite=True),
            )


_FIT, _UNFIT = (
    build_example(id=name, input=None, input_ids=ids, references=(), reference_ids=((3,),))
    for name, ids in (("fit", (5, 6, 1)), ("unfit", (5, 99, 1)))
)


def _decoded(**options: Any) -> dict[str, Generation]:
    assignment = dataclasses.replace(build_assignment("/nowhere", model="model"), on_error=options.pop("on_error"))
    loaded = LoadedModel(assignment=assignment, decoder=cast(Decoder, _Echo()), vocabulary=None, vocab_size=16)
    generations = loaded.outcomes(**{"examples": [_FIT, _UNFIT], **options})
    return {generation.example.id: generation for (generation,) in generations}


def test_a_prompt_that_is_unfit_fails_the_run_or_counts_as_failed() -> None:
    """An unfit prompt ends the run or, with `worst_case`, is kept with its failure and no output, never dropped."""
    with pytest.raises(DataError, match=r"unfit.*99"):
        _decoded(on_error="fail")
    found = _decoded(on_error="worst_case")
    assert {output.tokens for output in found["fit"].outputs} == {(5, 1)}
    assert found["fit"].failure is None
    assert "99" in (found["unfit"].failure or "")
    assert found["unfit"].outputs == ()


def test_what_failed_above_is_not_decoded_below() -> None:
    """An example without outputs at the upper thresholds has none at the lower ones."""
    above = {"fit": build_generation((), example=_FIT, failure="broken")}
    assert _decoded(on_error="worst_case", examples=[_FIT], above=above) == above
