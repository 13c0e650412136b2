"""Prompts in a pipeline are answered as `Generator` answers them one by one."""

import pathlib
from typing import Any

import pytest
from apache_beam.ml.inference.base import PredictionResult

from calm_beam.manifest import read_manifest
from calm_beam.serving import Generator
from calm_beam.transforms import EarlyExitModelHandler, NamedPrompt
from tests.transforms.served import PROMPTS, Served, by_example, run


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A model, with a manifest of one entry."""
    return Served(tmp_path_factory.mktemp("served"))


def assert_answered(results: list[PredictionResult], generator: Generator) -> None:
    """Every result has the tokens and exit layers that the generator gives by itself."""
    assert results
    for result in results:
        prompt = result.example.prompt if isinstance(result.example, NamedPrompt) else result.example
        expected = generator.generate(prompt)
        assert (result.inference.text, result.inference.tokens) == (expected.text, expected.tokens)
        assert result.inference.exit_layers == expected.exit_layers
        assert result.inference.confidences == pytest.approx(expected.confidences, abs=1e-4)
        assert result.inference.entry == expected.entry


@pytest.mark.parametrize("options", [{}, {"max_batch_size": 3, "min_batch_size": 1}, {"batch_size": 2}], ids=str)
def test_answers_are_those_of_the_generator(served: Served, options: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """Whatever the batches, every prompt is answered once, and names manifest and entry."""
    handler = EarlyExitModelHandler(served.manifest, served.model, **options)
    results, counters = run(PROMPTS, handler, tmp_path / "results")
    assert {example: len(found) for example, found in by_example(results).items()} == {
        prompt: PROMPTS.count(prompt) for prompt in PROMPTS
    }
    assert_answered(results, served.generator())
    digest = read_manifest(served.manifest).digest
    assert {result.model_id for result in results} == {f"{digest}#0"}
    assert counters["num_inferences"] == counters["decoded-prompts"] == len(PROMPTS)
    assert counters["generated-tokens"] == sum(len(result.inference.tokens) for result in results)
