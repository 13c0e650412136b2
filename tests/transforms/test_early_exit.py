"""Prompts in a pipeline are answered as `Generator` answers them one by one."""

import gzip
import itertools
import json
import pathlib
from typing import Any

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.ml.inference.base import KeyedModelHandler, KeyModelMapping, PredictionResult, RunInference
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from benchmarks.serving_parity import difference
from calm_beam.checkpoints import load_checkpoint
from calm_beam.exits.measures import MeasureError
from calm_beam.inputs.demo.embedded import CALIBRATION_SET, MODEL
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary
from calm_beam.manifest import ManifestError, read_manifest, write_manifest
from calm_beam.outputs import Output
from calm_beam.serving import Answer, Generator, OutputError, PromptError, Unanswered
from calm_beam.serving.answer import exit_tests
from calm_beam.transforms import EarlyExitModelHandler, NamedPrompt, require_answer
from tests.calm_beam.serving.builders import build_entry, build_served_manifest
from tests.pipelines import BROKEN_ID, write_model
from tests.transforms.served import PROMPTS, Collect, Served, by_example, collected, run


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
    """In any batches, every prompt is answered once, with the names of manifest and entry."""
    handler = EarlyExitModelHandler(served.manifest, served.model, **options)
    results, counters = run(PROMPTS, handler, tmp_path / "results")
    assert {example: len(found) for example, found in by_example(results).items()} == {
        prompt: PROMPTS.count(prompt) for prompt in PROMPTS
    }
    assert_answered(results, served.generator())
    digest = read_manifest(served.manifest).digest
    assert {result.model_id for result in results} == {f"{digest}#0"}
    assert counters["num_inferences"] == counters["decoded-prompts"] == len(PROMPTS)
    answers = [result.inference for result in results]
    assert counters["generated-tokens"] == sum(len(answer.tokens) for answer in answers)
    # The promise, as it is served.
    assert counters["served-layers"] == sum(sum(answer.exit_layers) for answer in answers)
    assert counters["full-model-layers"] == counters["generated-tokens"] * answers[0].num_layers
    assert counters["exit-tests"] == sum(exit_tests(answer, read_manifest(served.manifest)) for answer in answers) > 0


_BROKEN = {
    (): "is empty, or holds padding (0) only",
    (5, 99): "token ids must be integers from 0 to 63, got 99",
    "a text": "is text, but the manifest is about prompts of token ids",
}


def test_a_prompt_without_an_answer_takes_no_other_along(tmp_path: pathlib.Path) -> None:
    """Refused prompts, and one whose output is not finite, are among the answers with their reasons."""
    served = Served(tmp_path / "served", is_broken=True)
    handler = EarlyExitModelHandler(served.manifest, served.model, min_batch_size=50, max_batch_size=50)
    good = [prompt for prompt in PROMPTS if BROKEN_ID not in prompt]
    lost = (7, BROKEN_ID, 1)
    results, counters = run([*good, *_BROKEN, lost], handler, tmp_path / "results")
    assert len(results) == len(good) + 4
    answers = [result for result in results if isinstance(result.inference, Answer)]
    assert len(answers) == len(good)
    assert_answered(answers, served.generator())
    failed = {result.example: result.inference for result in results if isinstance(result.inference, Unanswered)}
    assert failed.keys() == {*_BROKEN, lost}
    for example, message in _BROKEN.items():
        assert isinstance(failed[example].error, PromptError)
        assert message in str(failed[example].error)
    assert isinstance(failed[lost].error, OutputError)
    assert str(failed[lost].error).startswith("prompt (7, 63, 1)")
    assert counters["unanswered-prompts"] == 4


def test_dead_letters(served: Served, tmp_path: pathlib.Path) -> None:
    """With `require_answer`, a broken prompt ends the run, or becomes a single dead letter with its reason."""
    handler = EarlyExitModelHandler(served.manifest, served.model).with_postprocess_fn(require_answer)
    with pytest.raises(Exception, match=r"prompt \(5, 99\): token ids must be integers from 0 to 63, got 99"):
        run([*PROMPTS, (5, 99)], handler, tmp_path / "fails")
    folders = [tmp_path / name for name in ("answers", "failed", "batches")]
    for folder in folders:
        folder.mkdir()
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        answers, letters = (
            pipeline | beam.Create([*PROMPTS, *_BROKEN]) | RunInference(handler).with_exception_handling()
        )
        _ = answers | "Answers" >> beam.ParDo(Collect(str(folders[0])))
        _ = letters.failed_postprocessing[0] | "Failed" >> beam.ParDo(Collect(str(folders[1])))
        _ = letters.failed_inferences | "Batches" >> beam.ParDo(Collect(str(folders[2])))
    results, failed, batches = map(collected, folders)
    assert len(results) == len(PROMPTS)
    assert_answered(results, served.generator())
    assert batches == []
    reasons = {result.example: reason for result, (_, reason, _) in failed}
    assert reasons.keys() == _BROKEN.keys()
    assert all(message in reasons[example] for example, message in _BROKEN.items())


def test_keys_stay_with_their_prompts(served: Served, tmp_path: pathlib.Path) -> None:
    """With Beam's handler of keys, each answer has the key of its prompt, as has a broken prompt."""
    handler = KeyedModelHandler(EarlyExitModelHandler(served.manifest, served.model))
    elements = [*enumerate(PROMPTS), (99, (5, 99))]
    results, _ = run(elements, handler, tmp_path / "results")
    found = dict(results)
    assert {key: result.example for key, result in found.items()} == dict(elements)
    assert isinstance(found.pop(99).inference, Unanswered)
    assert_answered(list(found.values()), served.generator())
    with pytest.raises(Exception, match=r"prompt \(5, 99\): token ids must be integers"):
        run(elements, handler.with_postprocess_fn(require_answer), tmp_path / "fails")


def test_a_manifest_for_each_key(tmp_path: pathlib.Path) -> None:
    """Two manifests of one model answer their own keys each, and the model is loaded once."""
    served = Served(tmp_path / "served")
    other = served.add_manifest("other.json", build_entry(0.9))
    handlers = [EarlyExitModelHandler(manifest, served.model) for manifest in (served.manifest, other)]
    handler = KeyedModelHandler([KeyModelMapping(["en", "de"], handlers[0]), KeyModelMapping(["fr"], handlers[1])])
    elements = [(key, prompt) for prompt in PROMPTS for key in ("en", "de", "fr")]
    results, counters = run(elements, handler, tmp_path / "results")
    assert len(results) == len(elements)
    for keys, manifest in ((("en", "de"), served.manifest), (("fr",), other)):
        answered = [result for key, result in results if key in keys]
        assert len(answered) == len(keys) * len(PROMPTS)
        assert_answered(answered, served.generator(manifest))
    assert len({result.model_id for _, result in results}) == 2
    assert counters["model-load-msec"] == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_keys_in_processes_share_the_model(tmp_path: pathlib.Path) -> None:
    """Two worker processes with a manifest for each key share one model."""
    served = Served(tmp_path / "served")
    other = served.add_manifest("other.json", build_entry(0.9))
    paths = {"en": served.manifest, "fr": other}
    options = ("--direct_num_workers=2", "--direct_running_mode=multi_processing")
    elements = [(key, prompt) for key in paths for prompt in PROMPTS * 3]
    handler = KeyedModelHandler(
        [KeyModelMapping([key], EarlyExitModelHandler(path, served.model)) for key, path in paths.items()]
    )
    results, counters = run(elements, handler, tmp_path / "keys", options=options)
    assert len(results) == len(elements)
    for key, path in paths.items():
        assert_answered([result for name, result in results if name == key], served.generator(path))
    assert counters["model-load-msec"] == 1


def test_groups_of_one_manifest(tmp_path: pathlib.Path) -> None:
    """A prompt that names its group is answered by the group's entry; for an unknown group, by the safest entry."""
    served = Served(tmp_path / "served")
    served.manifest = served.add_grouped_manifest("groups.json", {None: 0.2, "en": 0.9, "fr": 0.05})
    handler = EarlyExitModelHandler(served.manifest, served.model)
    groups = (None, "en", "fr", "xx")
    elements = [NamedPrompt(prompt=prompt, group=group) for prompt in PROMPTS[:10] for group in groups]
    results, _ = run(elements, handler, tmp_path / "results")
    generator = served.generator()
    for result in results:
        expected = generator.generate(result.example.prompt, group=result.example.group)
        assert (result.inference.tokens, result.inference.exit_layers) == (expected.tokens, expected.exit_layers)
        assert result.inference.entry == expected.entry
        place = generator.manifest.calibrations.index(expected.entry)
        assert result.model_id == f"{generator.manifest.digest}#{place}"
    assert len({result.model_id for result in results}) == 3


def test_a_group_under_a_manifest_without_groups_is_refused(served: Served, tmp_path: pathlib.Path) -> None:
    """A prompt with a group under a manifest without groups has no answer and says why; others have answers."""
    elements = [NamedPrompt(prompt=PROMPTS[0], group="en"), NamedPrompt(prompt=PROMPTS[0])]
    results, counters = run(elements, EarlyExitModelHandler(served.manifest, served.model), tmp_path / "results")
    by_group = {result.example.group: result.inference for result in results}
    assert isinstance(by_group["en"], Unanswered)
    assert "names group 'en', and the manifest was calibrated without --group_key." in str(by_group["en"].error)
    assert by_group[None].tokens == served.generator().generate(PROMPTS[0]).tokens
    assert counters["unanswered-prompts"] == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_shared", [True, False])
def test_processes_of_a_machine_share_the_model(is_shared: bool, tmp_path: pathlib.Path) -> None:
    """Two worker processes give the answers of one, whether they share a model or load one each."""
    served = Served(tmp_path / "served")
    handler = EarlyExitModelHandler(
        served.manifest, served.model, share_model_across_processes=is_shared, max_batch_size=5
    )
    elements = [NamedPrompt(prompt=prompt, id=str(number)) for number, prompt in enumerate(PROMPTS * 5)]
    options = ("--direct_num_workers=2", "--direct_running_mode=multi_processing")
    results, counters = run(elements, handler, tmp_path / "results", options=options)
    assert sorted(result.example.id for result in results) == sorted(str(element.id) for element in elements)
    assert_answered(results, served.generator())
    assert counters["model-load-msec"] == (1 if is_shared else 2)


def _settings(served: Served, **changes: Any) -> EarlyExitModelHandler:
    return EarlyExitModelHandler(**{"manifest": served.manifest, "model": served.model, **changes})


def test_what_cannot_be_served_is_refused_before_workers_start(served: Served) -> None:
    """Manifests, entries and numbers that no worker could use are refused when the handler is made."""
    never = served.add_manifest("never.json", build_entry(None))
    risk = served.add_manifest("risk.json", build_entry(0.2, consistency="risk", loss="relu"))
    own = served.add_manifest("own.json", build_entry(0.2), decode={"confidence": "module:measure"})
    oracle = served.add_manifest("oracle.json", build_entry(0.2), decode={"state_propagation": "full_cache"})
    probe = {"probe_share": 0.5, "probe_salt": "a"}
    for changes, error, message in (
        ({"manifest": "absent.json"}, OSError, "absent.json"),
        ({"manifest": read_manifest(served.manifest)}, TypeError, "manifest must be the path of a manifest"),
        ({"deltas": 0.3}, TypeError, r"^EarlyExitModelHandler\(\) has no argument 'deltas'\. Did you mean delta\?$"),
        ({"delta": 0.3}, ManifestError, "delta"),
        ({"group": "en"}, ManifestError, "there is no group"),
        ({"manifest": own}, MeasureError, "module:measure"),
        ({"manifest": oracle}, ManifestError, "cannot be served"),
        ({"batch_size": 0}, ValueError, "batch_size: expected a whole number of at least 1, got 0"),
        ({"min_batch_size": 9, "max_batch_size": 8}, ValueError, "must be at most max_batch_size, 8; got 9"),
        ({"min_batch_size": 10_001}, ValueError, "at most max_batch_size, 10000 where it is left out; got 10001"),
        ({"min_batch_size": 0}, ValueError, "min_batch_size must be a whole number of at least 1, got 0"),
        ({"max_batch_size": 0}, ValueError, "max_batch_size must be a whole number of at least 1, got 0"),
        ({"max_batch_size": -3}, ValueError, "max_batch_size must be a whole number of at least 1, got -3"),
        ({"max_batch_size": 2.5}, ValueError, "max_batch_size must be a whole number of at least 1, got 2.5"),
        ({"min_batch_size": True}, ValueError, "min_batch_size must be a whole number of at least 1, got True"),
        ({"max_batch_size": "8"}, ValueError, "max_batch_size must be a whole number of at least 1, got '8'"),
        ({"max_batch_duration_secs": -1}, ValueError, "max_batch_duration_secs must be a number of at least 0, got -1"),
        ({"max_batch_duration_secs": float("nan")}, ValueError, "must be a number of at least 0, got nan"),
        ({"max_batch_duration_secs": float("inf")}, ValueError, "must be a number of at least 0, got inf"),
        ({"max_batch_duration_secs": "1"}, ValueError, "must be a number of at least 0, got '1'"),
        ({"group": "en"}, ManifestError, 'there is no group "en": the manifest was calibrated without --group_key'),
        ({"exit_head": "int4"}, ValueError, "exit_head: invalid choice: 'int4'"),
        ({"model_copies": 0}, ValueError, "model_copies must be at least 1, got 0"),
        ({"model_copies": 2, "share_model_across_processes": False}, ValueError, "each has its own"),
        ({"probe_share": 0.5}, ValueError, "probe_share and probe_salt belong together"),
        ({**probe, "probe_share": 2}, ValueError, r"share must be in \(0, 1\], got 2"),
        ({**probe, "manifest": never}, ManifestError, "the entry says never exit: there is no risk to watch"),
        ({**probe, "manifest": risk}, ManifestError, "whose losses need references"),
    ):
        with pytest.raises(error, match=message):
            _settings(served, **changes)
    with pytest.raises(ValueError, match=r"inference_args must be left out, got \['temperature'\]"):
        beam.Pipeline() | beam.Create(PROMPTS) | RunInference(_settings(served), inference_args={"temperature": 1})


def test_copies_are_for_different_processes(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process always uses the same copy, and so does every handler of the model."""
    tags = []
    for number in (6, 7, 8):
        monkeypatch.setattr("os.getpid", lambda number=number: number)
        handlers = [_settings(served, model_copies=copies) for copies in (2, 1)]
        tags.append([handler.load_model()._tag for handler in handlers])
    assert tags[0] == tags[2] != tags[1]
    assert {one for _, one in tags} == {tags[0][0]}
    assert _settings(served, share_model_across_processes=False).load_model()._tag is None


def test_another_model_answers_nothing(served: Served, tmp_path: pathlib.Path) -> None:
    """If workers find another model than the calibrated one, the run ends, as `Generator` would."""
    other = str(write_model(tmp_path / "other", seed=1))
    with pytest.raises(Exception, match="Thresholds hold for no other model"):
        run(PROMPTS, _settings(served, model=other), tmp_path / "results")


def test_batches_are_made_by_width(served: Served) -> None:
    """Long prompts weigh more, a KV cache bound limits the weight, and a given number of prompts is used as it is."""
    chosen = _settings(served, max_cache_tokens=640).batch_elements_kwargs()
    assert chosen["max_batch_size"] == 160
    size = chosen["element_size_fn"]
    assert [size(prompt) for prompt in ("a", "a" * 999, [5] * 32, (1, 2), NamedPrompt(prompt=[5] * 33))] == [1] * 5
    wide = served.add_manifest("wide.json", build_entry(0.2), decode={"max_input_length": 128})
    size = _settings(served, manifest=wide).batch_elements_kwargs()["element_size_fn"]
    prompts = ("a", "a" * 400, "a" * 9999, [5] * 33, [5] * 999, ("key", [5] * 65), 7)
    assert [size(prompt) for prompt in prompts] == [1, 4, 4, 2, 4, 3, 1]
    assert _settings(served, max_batch_size=3).batch_elements_kwargs() == {"max_batch_size": 3}
    assert _settings(served).get_num_bytes(["four", (1, 2), NamedPrompt(prompt="ä")]) == 4 + 8 + 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_embedded_model_answers_as_one_by_one(tmp_path: pathlib.Path) -> None:
    """A trained model on texts gives the answers of single prompts in a pipeline, but for near ties."""
    checkpoint = load_checkpoint(str(MODEL))
    vocabulary = Vocabulary(MODEL / "sentencepiece.model", extra_ids=0)
    entry = build_entry(0.6, threshold_by_position=(float(np.float32(0.6)),) * 32)
    decode = {"max_input_length": 64, "max_decode_length": 32}
    path = tmp_path / "manifest.json"
    write_manifest(build_served_manifest(checkpoint, [entry], vocabulary=vocabulary, decode=decode), path)
    with gzip.open(CALIBRATION_SET, "rt", encoding="utf-8") as file:
        prompts = [json.loads(line)["input"] for line in itertools.islice(file, 150)]
    results, _ = run(prompts, EarlyExitModelHandler(path, MODEL), tmp_path / "results")
    found = {result.example: result.inference for result in results}
    assert sorted(result.example for result in results) == sorted(prompts)
    generator = Generator.from_manifest(path, MODEL)
    differences = []
    for prompt in prompts:
        one = generator.generate(prompt)
        stored = Output(text=one.text, tokens=one.tokens, exit_layers=one.exit_layers, confidences=one.confidences)
        differs = difference(prompt, stored, served=found[prompt], thresholds=entry.threshold_by_position)
        if differs is not None:
            differences.append(differs)
    assert all(differs.is_near_tie for differs in differences)
    assert len(differences) <= 3
    assert sum(answer.layers_saved for answer in found.values()) > 0
