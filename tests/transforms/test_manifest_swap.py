"""A running pipeline accepts a new manifest of its model, and otherwise keeps the one it has."""

import pathlib
import re

import apache_beam as beam
import pytest
from apache_beam.ml.inference.base import (
    KeyedModelHandler,
    KeyModelMapping,
    KeyModelPathMapping,
    ModelMetadata,
    RunInference,
)
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
from apache_beam.runners.direct.direct_runner import BundleBasedDirectRunner
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing import test_stream
from apache_beam.transforms import window
from apache_beam.transforms.window import TimestampedValue

from calm_beam.manifest import read_manifest
from calm_beam.transforms import EarlyExitModelHandler
from tests.calm_beam.serving.builders import build_entry
from tests.pipelines import write_model
from tests.transforms.served import PROMPTS, Collect, Served, collected, counts
from tests.transforms.test_early_exit import assert_answered


def _manifests(folder: pathlib.Path) -> tuple[Served, str, str]:
    """Returns a model with its first manifest, another one of it, and one of another model."""
    served = Served(folder)
    other_model = str(write_model(folder / "other", seed=1))
    good = served.add_manifest("good.json", build_entry(0.9))
    wrong = served.add_manifest("wrong.json", build_entry(0.5), model=other_model)
    return served, good, wrong


def test_each_window_has_its_manifest(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """A side input names another manifest, then a wrong one, then the first again; the wrong one is never served."""
    served, good, wrong = _manifests(tmp_path / "served")
    handler = EarlyExitModelHandler(served.manifest, served.model)
    (tmp_path / "results").mkdir()
    pipeline = beam.Pipeline(runner=FnApiRunner())
    paths = (served.manifest, good, wrong, served.manifest)
    metadata = (
        pipeline
        | "Paths" >> beam.Create([TimestampedValue(path, 10 * number) for number, path in enumerate(paths)])
        | "Metadata" >> beam.Map(lambda path: ModelMetadata(model_id=path, model_name=pathlib.Path(path).stem))
        | "PathWindows" >> beam.WindowInto(window.FixedWindows(10))
    )
    _ = (
        pipeline
        | "Prompts" >> beam.Create([TimestampedValue(prompt, 10 * number) for number in range(4) for prompt in PROMPTS])
        | "PromptWindows" >> beam.WindowInto(window.FixedWindows(10))
        | RunInference(handler, model_metadata_pcoll=metadata)
        | beam.Map(lambda result, start=beam.DoFn.WindowParam: (int(start.start), result))
        | beam.ParDo(Collect(str(tmp_path / "results")))
    )
    result = pipeline.run()
    result.wait_until_finish()
    found = collected(tmp_path / "results")
    assert len(found) == 4 * len(PROMPTS)
    accepted = {served.manifest, good}
    for start, path in zip((0, 10, 20, 30), paths, strict=True):
        results = [each for number, each in found if number == start]
        digests = {each.model_id.split("#")[0] for each in results}
        # Windows come in any order, so either of the good ones may stay.
        if path == wrong:
            assert digests <= {read_manifest(each).digest for each in accepted}
        else:
            assert digests == {read_manifest(path).digest}
            assert_answered(results, served.generator(path))
    assert counts(result)["refused-manifests"] >= 1
    assert re.search(r"manifest \S*wrong.json is not taken, \S*(manifest|good).json stays: .*fingerprint", caplog.text)


def test_a_handler_keeps_what_it_took(tmp_path: pathlib.Path) -> None:
    """After a wrong manifest, or none, the last accepted one answers, not the first; a file may come later."""
    served, good, wrong = _manifests(tmp_path / "served")
    handler = EarlyExitModelHandler(served.manifest, served.model)
    model = handler.load_model()

    def digest() -> str:
        (result,) = handler.run_inference(PROMPTS[:1], model)
        return str(result.model_id).split("#")[0]

    first, second = (read_manifest(path).digest for path in (served.manifest, good))
    late = str(tmp_path / "served" / "late.json")
    for path, expected in ((None, first), (good, second), (wrong, second), ("", second), (late, second)):
        handler.update_model_path(path)
        assert digest() == expected
    served.add_manifest("late.json", build_entry(0.05))
    assert digest() == read_manifest(late).digest
    no_entry = served.add_manifest("none.json", build_entry(0.5, delta=0.3), build_entry(0.5, delta=0.2))
    handler.update_model_path(no_entry)
    assert digest() == read_manifest(late).digest


def test_keys_change_their_manifests(tmp_path: pathlib.Path) -> None:
    """With a handler for each key, the manifests of some keys change, and a wrong one changes nothing."""
    served, good, wrong = _manifests(tmp_path / "served")
    third = served.add_manifest("third.json", build_entry(0.05))
    handler = KeyedModelHandler(
        [
            KeyModelMapping(["en"], EarlyExitModelHandler(served.manifest, served.model)),
            KeyModelMapping(["fr"], EarlyExitModelHandler(third, served.model)),
        ]
    )
    (tmp_path / "results").mkdir()
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        paths = pipeline | "Paths" >> beam.Create(
            [[KeyModelPathMapping(["en"], good, "new"), KeyModelPathMapping(["fr"], wrong, "wrong")]]
        )
        _ = (
            pipeline
            | beam.Create([(key, prompt) for key in ("en", "fr") for prompt in PROMPTS])
            | RunInference(handler, model_metadata_pcoll=paths)
            | beam.ParDo(Collect(str(tmp_path / "results")))
        )
    results = collected(tmp_path / "results")
    assert len(results) == 2 * len(PROMPTS)
    # Beam gives new paths to a handler of keys after its first batch.
    for key, paths in (("en", {served.manifest, good}), ("fr", {third})):
        found = set()
        for path in paths:
            digest = read_manifest(path).digest
            answered = [each for name, each in results if name == key and each.model_id == f"{digest}#0"]
            assert_answered(answered, served.generator(path))
            found |= {id(each) for each in answered}
        assert len(found) == len(PROMPTS)


def test_a_stream_takes_what_comes(tmp_path: pathlib.Path) -> None:
    """While prompts arrive, another manifest is accepted and a wrong one is not; each prompt is answered once."""
    served, good, wrong = _manifests(tmp_path / "served")
    paths = (served.manifest, wrong, good, wrong)
    stream = test_stream.TestStream(output_tags=["paths", "prompts"])
    for number, path in enumerate(paths):
        start = 10 * number
        stream = stream.add_elements([TimestampedValue(path, start)], tag="paths")
        prompts = [TimestampedValue((number, prompt), start + 1) for prompt in PROMPTS]
        stream = stream.add_elements(prompts[:20], tag="prompts").add_elements(prompts[20:], tag="prompts")
        for tag in ("paths", "prompts"):
            stream = stream.advance_watermark_to(start + 10, tag=tag)
    for tag in ("paths", "prompts"):
        stream = stream.advance_watermark_to_infinity(tag=tag)
    results = tmp_path / "results"
    results.mkdir()
    options = PipelineOptions([])
    options.view_as(StandardOptions).streaming = True
    handler = KeyedModelHandler(EarlyExitModelHandler(served.manifest, served.model))
    with beam.Pipeline(runner=BundleBasedDirectRunner(), options=options) as pipeline:
        sources = pipeline | stream
        metadata = (
            sources["paths"]
            | beam.Map(lambda path: ModelMetadata(model_id=path, model_name=pathlib.Path(path).stem))
            | "PathWindows" >> beam.WindowInto(window.FixedWindows(10))
        )
        _ = (
            sources["prompts"]
            | beam.WindowInto(window.FixedWindows(10))
            | RunInference(handler, model_metadata_pcoll=metadata)
            | beam.ParDo(Collect(str(results)))
        )
    found = collected(results)
    assert len(found) == len(paths) * len(PROMPTS)
    for number, path in enumerate((served.manifest, served.manifest, good, good)):
        answered = [result for key, result in found if key == number]
        assert {each.model_id for each in answered} == {f"{read_manifest(path).digest}#0"}
        assert_answered(answered, served.generator(path))
