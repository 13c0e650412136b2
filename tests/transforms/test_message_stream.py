"""Prompts that arrive as messages are answered once, monitored, and served under the announced manifest."""

import itertools
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.io.gcp.pubsub import PubsubMessage, ReadFromPubSub
from apache_beam.ml.inference.base import ModelMetadata, RunInference
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
from apache_beam.runners.direct.direct_runner import BundleBasedDirectRunner
from apache_beam.transforms import window
from google.cloud import pubsub

from calm_beam.manifest import read_manifest
from calm_beam.transforms import EarlyExitModelHandler, MonitorRisk, NamedPrompt, SampledLosses
from tests.calm_beam.serving.builders import build_entry
from tests.cloud.message_service import MessageService, message_service
from tests.pipelines import write_model
from tests.transforms.served import PROMPTS, Collect, Served, collected
from tests.transforms.test_early_exit import assert_answered

_PROJECT = "calm-beam-tests"
_WINDOW_SECONDS = 2


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[MessageService]:
    """Gives a service of messages, which Google's clients find."""
    with message_service() as service:
        monkeypatch.setenv("PUBSUB_EMULATOR_HOST", service.address)
        yield service


def _named(message: PubsubMessage) -> NamedPrompt:
    return NamedPrompt(prompt=tuple(json.loads(message.data)), id=message.attributes["id"])


def _metadata(message: bytes) -> ModelMetadata:
    path = message.decode()
    return ModelMetadata(model_id=path, model_name=pathlib.Path(path).stem)


def _until(is_reached: Callable[[], bool], *, meanwhile: Callable[[], Any]) -> None:
    """Waits minutes at most until a condition holds."""
    for _ in range(1000):
        if is_reached():
            return
        meanwhile()
        time.sleep(_WINDOW_SECONDS / 4)
    raise AssertionError("it did not come")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_messages_are_answered_while_manifests_change(
    service: MessageService, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """While prompts arrive, another manifest is accepted, one of another model is not, and each window is monitored."""
    served = Served(tmp_path / "served")
    good = served.add_manifest("good.json", build_entry(0.9))
    wrong = served.add_manifest("wrong.json", build_entry(0.5), model=str(write_model(tmp_path / "other", seed=1)))
    publisher, subscriber = pubsub.PublisherClient(), pubsub.SubscriberClient()
    prompts, manifests = (publisher.topic_path(_PROJECT, name) for name in ("prompts", "manifests"))
    # Our own subscriptions, since Beam would remove its own after the service has ended.
    asked, told = (subscriber.subscription_path(_PROJECT, name) for name in ("prompts", "manifests"))
    for topic, subscription in ((prompts, asked), (manifests, told)):
        publisher.create_topic(name=topic)
        subscriber.create_subscription(name=subscription, topic=topic)
    handler = EarlyExitModelHandler(served.manifest, served.model, probe_share=1, probe_salt="a secret")
    results, states = tmp_path / "results", tmp_path / "states"
    for folder in (results, states):
        folder.mkdir()

    options = PipelineOptions([])
    options.view_as(StandardOptions).streaming = True
    pipeline = beam.Pipeline(runner=BundleBasedDirectRunner(), options=options)
    announced = (
        pipeline
        | "ReadManifests" >> ReadFromPubSub(subscription=told)
        | "ManifestWindows" >> beam.WindowInto(window.FixedWindows(_WINDOW_SECONDS))
        | beam.combiners.Latest.Globally().without_defaults()
        | beam.Map(_metadata)
    )
    answers = (
        pipeline
        | "ReadPrompts" >> ReadFromPubSub(subscription=asked, with_attributes=True)
        | beam.Map(_named)
        | "PromptWindows" >> beam.WindowInto(window.FixedWindows(_WINDOW_SECONDS))
        | RunInference(handler, model_metadata_pcoll=announced)
    )
    _ = answers | "Results" >> beam.ParDo(Collect(str(results)))
    watched = answers | SampledLosses() | MonitorRisk()
    _ = watched.states | "States" >> beam.ParDo(Collect(str(states)))

    numbers = itertools.count()
    sent: dict[str, tuple[int, ...]] = {}

    def send_and_announce(path: str | None) -> None:
        name = f"message {next(numbers)}"
        sent[name] = PROMPTS[len(sent) % len(PROMPTS)]
        publisher.publish(prompts, json.dumps(sent[name]).encode(), id=name).result()
        if path is not None:
            # Repeatedly, as a watcher of a folder does: a window sees its own announcements.
            publisher.publish(manifests, path.encode()).result()

    def digests() -> set[str]:
        return {each.model_id.split("#")[0] for each in collected(results)}

    result = pipeline.run()
    try:
        first, second = (read_manifest(path).digest for path in (served.manifest, good))
        _until(lambda: digests() == {first}, meanwhile=lambda: send_and_announce(None))
        _until(lambda: digests() == {first, second}, meanwhile=lambda: send_and_announce(good))
        _until(lambda: "wrong.json is not taken" in caplog.text, meanwhile=lambda: send_and_announce(wrong))
        for _ in range(8):
            send_and_announce(wrong)
        _until(lambda: len(collected(results)) >= len(sent), meanwhile=lambda: None)
        # Prompts behind the watermark are not monitored: a few, on a busy machine.
        _until(lambda: _watched(states) > len(sent) / 2, meanwhile=lambda: None)
    finally:
        result.cancel()

    found = collected(results)
    assert sorted(each.example.id for each in found) == sorted(sent)
    assert all(each.example.prompt == sent[each.example.id] for each in found)
    assert {each.model_id for each in found} == {f"{first}#0", f"{second}#0"}
    for path, digest in ((served.manifest, first), (good, second)):
        assert_answered([each for each in found if each.model_id == f"{digest}#0"], served.generator(path))
    assert _watched(states) <= len(sent)
    last_sent = max(found, key=lambda each: int(each.example.id.split()[1]))
    assert last_sent.model_id == f"{second}#0"


def _watched(states: pathlib.Path) -> int:
    """Returns how many losses count, each in its window."""
    return sum(state.part for state in collected(states))
