"""A pipeline monitors its own promise by losses of sampled prompts, measured as a probe does."""

import dataclasses
import json
import pathlib
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.ml.inference.base import RunInference
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
from apache_beam.runners.direct.direct_runner import BundleBasedDirectRunner
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing import test_stream
from apache_beam.transforms import window
from apache_beam.transforms.window import TimestampedValue

from calm_beam.risk.monitor import SampledLoss, WatchedRisk
from calm_beam.serving import LossProbe, OutputError, PromptError, Unanswered
from calm_beam.transforms import EarlyExitModelHandler, MonitorRisk, NamedPrompt, SampledLosses
from tests.calm_beam.serving.builders import build_entry
from tests.pipelines import BROKEN_ID
from tests.transforms.served import PROMPTS, Collect, Served, collected, run

_NAMED = [NamedPrompt(prompt=prompt, id=f"request {number}") for number, prompt in enumerate(PROMPTS)]
_SAMPLING: dict[str, Any] = {"probe_share": 0.5, "probe_salt": "a secret"}


def _expected(served: Served, folder: pathlib.Path, **sampling: Any) -> list[dict[str, Any]]:
    """Returns the rows that a probe writes for the same requests."""
    generator = served.generator()
    probe = LossProbe(generator, folder / "losses.jsonl", **sampling)
    for named in _NAMED:
        if probe.is_sampled(str(named.id)):
            probe.observe(str(named.id), named.prompt, answer=generator.generate(named.prompt))
    return [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]


def test_losses_are_those_of_a_probe(tmp_path: pathlib.Path) -> None:
    """The probe's requests are sampled, with the probe's losses; answers are those without a probe."""
    served = Served(tmp_path / "served")
    handler = EarlyExitModelHandler(served.manifest, served.model, **_SAMPLING)
    plain, _ = run(_NAMED, EarlyExitModelHandler(served.manifest, served.model), tmp_path / "plain")
    results, counters = run(_NAMED, handler, tmp_path / "results")
    losses = {each.inference.loss.id: each.inference.loss for each in results if hasattr(each.inference, "loss")}
    rows = _expected(served, tmp_path, share=0.5, salt="a secret")
    assert 5 < len(rows) < 35
    assert {name: loss.to_row() for name, loss in losses.items()} == {row["id"]: row for row in rows}
    assert max(loss.value for loss in losses.values()) > 0
    assert counters["measured-losses"] == len(rows)
    assert {each.example.id: each.inference.tokens for each in results} == {
        each.example.id: each.inference.tokens for each in plain
    }


def test_a_lost_output_has_loss_1(tmp_path: pathlib.Path) -> None:
    """A sampled prompt without an output counts with loss 1 and its reason; a refused one does not count."""
    served = Served(tmp_path / "served", is_broken=True)
    handler = EarlyExitModelHandler(served.manifest, served.model, probe_share=1, probe_salt="")
    prompts = [NamedPrompt(prompt=(7, BROKEN_ID, 1), id="broken"), NamedPrompt(prompt=(99,), id="refused"), *_NAMED[:3]]
    results, _ = run(prompts, handler, tmp_path / "results")
    found = {each.example.id: each.inference for each in results}
    assert all(isinstance(found[name], Unanswered) for name in ("broken", "refused"))
    assert isinstance(found["refused"].error, PromptError)
    assert found["refused"].loss is None
    assert isinstance(found["broken"].error, OutputError)
    assert (found["broken"].loss.value, found["broken"].loss.failure[:12]) == (1, "OutputError:")


def test_groups_have_losses_of_their_own(tmp_path: pathlib.Path) -> None:
    """Each loss names its group's entry; none is measured without a promise, or if nothing exits."""
    served = Served(tmp_path / "served")
    served.manifest = served.add_grouped_manifest("groups.json", {None: 0.2, "de": None, "en": 0.9, "fr": 0.05})
    handler = EarlyExitModelHandler(served.manifest, served.model, probe_share=1, probe_salt="")
    groups = (None, "de", "en", "fr", "xx")
    prompts = [
        NamedPrompt(prompt=named.prompt, id=f"{group} {named.id}", group=group)
        for named in _NAMED[:8]
        for group in groups
    ]
    results, _ = run(prompts, handler, tmp_path / "results")
    watched: dict[Any, set[Any]] = {}
    for each in results:
        loss = getattr(each.inference, "loss", None)
        promise = None if loss is None else (loss.promise.group, loss.promise.calibration)
        watched.setdefault(each.example.group, set()).add(promise)
    assert watched == {None: {(None, 0)}, "de": {None}, "en": {("en", 2)}, "fr": {("fr", 3)}, "xx": {None}}


def test_samples_need_ids(tmp_path: pathlib.Path) -> None:
    """Sampling without ids is refused: frequent prompts would be measured always or never."""
    served = Served(tmp_path / "served")
    handler = EarlyExitModelHandler(served.manifest, served.model, **_SAMPLING)
    with pytest.raises(Exception, match="prompts are sampled by their ids, and one has none"):
        run([*_NAMED, PROMPTS[0]], handler, tmp_path / "results")


def test_a_pipeline_watches_itself(tmp_path: pathlib.Path) -> None:
    """After the handler, the monitor raises its alarm for a promise that does not hold."""
    served = Served(tmp_path / "served", build_entry(0.05, delta=0.02))
    handler = EarlyExitModelHandler(served.manifest, served.model, probe_share=1, probe_salt="")
    folders = [tmp_path / name for name in ("states", "alarms")]
    for folder in folders:
        folder.mkdir()
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        watched = pipeline | beam.Create(_NAMED) | RunInference(handler) | SampledLosses() | MonitorRisk()
        _ = watched.states | "States" >> beam.ParDo(Collect(str(folders[0])))
        _ = watched.alarms | "Alarms" >> beam.ParDo(Collect(str(folders[1])))
    rows = _expected(served, tmp_path, share=1, salt="")
    (state,) = collected(folders[0])
    losses = [SampledLoss.from_row(row, [state.promise]) for row in rows]
    assert state == WatchedRisk.after(losses, before=None, alpha=0.05)
    assert collected(folders[1]) == [state]


@pytest.mark.parametrize("seconds", [None, 1])
def test_a_stream_is_answered_and_watched(seconds: int | None, tmp_path: pathlib.Path) -> None:
    """Prompts delivered as by a subscription are answered once each, and monitored window by window."""
    served = Served(tmp_path / "served", build_entry(0.05, delta=0.02))
    handler = EarlyExitModelHandler(
        served.manifest, served.model, probe_share=1, probe_salt="", max_batch_duration_secs=seconds
    )
    stream = test_stream.TestStream()
    for number in range(4):
        named = _NAMED[10 * number : 10 * number + 10]
        stream = stream.add_elements([TimestampedValue(each, 60 * number + 7) for each in named[::-1]])
        stream = stream.advance_watermark_to(60 * number + 60).advance_processing_time(2)
    stream = stream.advance_watermark_to_infinity()
    options = PipelineOptions([])
    options.view_as(StandardOptions).streaming = True
    folders = {name: tmp_path / name for name in ("answers", "states", "alarms", "missing_alarms")}
    for folder in folders.values():
        folder.mkdir()
    with beam.Pipeline(runner=BundleBasedDirectRunner(), options=options) as pipeline:
        answers = pipeline | stream | beam.WindowInto(window.FixedWindows(60)) | RunInference(handler)
        watched = answers | SampledLosses() | MonitorRisk()
        for name, output in {"answers": answers, **watched._asdict()}.items():
            _ = output | f"Collect{name}" >> beam.ParDo(Collect(str(folders[name])))
    rows = _expected(served, tmp_path, share=1, salt="")
    found = collected(folders["answers"])
    assert sorted(each.example.id for each in found) == sorted(str(named.id) for named in _NAMED)
    states = sorted(collected(folders["states"]), key=lambda state: state.end)
    promise, before = states[0].promise, None
    for number, state in enumerate(states):
        losses = [SampledLoss.from_row(row, [promise]) for row in rows[10 * number : 10 * number + 10]]
        assert state == WatchedRisk.after(losses, before=before, alpha=0.05, end=60.0 * number + 60)
        before = state.monitor
    assert len(states) == 4
    assert collected(folders["alarms"]) == [state for state in states if state.is_new_alarm]
    assert dataclasses.replace(states[-1].monitor).n == len(_NAMED)
