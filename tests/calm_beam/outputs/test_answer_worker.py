"""A worker gives each prompt of a shard an answer or a reason, independently of the others."""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

import pytest

from calm_beam.decoding.branches import PromptResult, Request
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.isolation import DecodeError
from calm_beam.inputs import DataFiles, read_examples
from calm_beam.manifest import ManifestError, read_manifest
from calm_beam.outputs.prepared import prepare_answers
from calm_beam.outputs.request import AnswerAssignment, AnswerRequest
from calm_beam.outputs.worker import LoadedGenerator, load_model
from tests.answers import write_served_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny model with a vocabulary, its manifest, and ten texts."""
    return write_served_folder(tmp_path_factory.mktemp("served"), prompts=10)


def _assignment(folder: pathlib.Path) -> AnswerAssignment:
    request = AnswerRequest(
        manifest=read_manifest(folder / "manifest.json"),
        model=str(folder / "model"),
        batch_size=4,
        exit_head="exact",
        on_error="list",
    )
    return prepare_answers(request, DataFiles.found(str(folder / "rows.jsonl"))).assignment(str(folder / "answers"))


def _crashing(culprit: int) -> object:
    """Returns a `decode` that crashes for every prompt with one token id more than any other has."""
    decode = Decoder.decode

    def crash(decoder: Decoder, prompts: Sequence[Request]) -> Iterator[tuple[int, PromptResult]]:
        if any(culprit in prompt.ids for prompt in prompts):
            raise RuntimeError("the kernel failed")
        return decode(decoder, prompts)

    return crash


def test_a_crash_takes_no_other_prompt_along(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in the same batch as one that crashes are answered; that one is listed, or ends the run."""
    assignment = _assignment(folder)
    loaded = load_model(assignment)
    assert isinstance(loaded, LoadedGenerator)
    examples = list(read_examples(str(folder / "rows.jsonl")))
    expected = {example.id: loaded.generator.generate(example.input or "") for example in examples}
    ids = {example.id: loaded.generator.request(example.input or "", name="x").ids for example in examples}
    # For the fourth prompt alone.
    culprit = next(iter(set(ids["row-003"]) - {each for name in ids if name != "row-003" for each in ids[name]}))
    monkeypatch.setattr(Decoder, "decode", _crashing(culprit))
    outcomes = {outcome.example.id: outcome for (outcome,) in loaded.outcomes(examples)}
    assert outcomes.keys() == expected.keys()
    for name, outcome in outcomes.items():
        if name == "row-003":
            assert outcome.answer is None
            assert not outcome.is_refused
            assert (outcome.failure or "").endswith("line 4 (row-003): RuntimeError: the kernel failed.")
        else:
            assert outcome.answer is not None
            found, wanted = outcome.answer, expected[name]
            assert (found.tokens, found.exit_layers) == (wanted.tokens, wanted.exit_layers)
    strict = dataclasses.replace(loaded, assignment=dataclasses.replace(assignment, on_error="fail"))
    with pytest.raises(DecodeError, match=r"row-003\): RuntimeError: the kernel failed\. Check the checkpoint\."):
        list(strict.outcomes(examples))


def test_a_model_that_changed_is_not_served(folder: pathlib.Path) -> None:
    """A worker compares the model that it loads with the manifest, as the launching machine did."""
    assignment = _assignment(folder)
    model = dataclasses.replace(assignment.manifest.model, fingerprint="sha256:" + "0" * 64)
    changed = dataclasses.replace(assignment, manifest=dataclasses.replace(assignment.manifest, model=model))
    with pytest.raises(ManifestError, match="the manifest is about a model with fingerprint sha256:000"):
        load_model(changed)
