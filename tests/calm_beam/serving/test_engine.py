"""Serving by an engine other than the calibrated one is reported, counted, or refused."""

import dataclasses
import logging
import re
from typing import Any

import pytest

from benchmarks.process import CompileTime
from calm_beam.decoding.engine_choice import Machine
from calm_beam.manifest import EngineRecord, Manifest, ManifestError
from calm_beam.model import native_decoder
from calm_beam.model.native import library
from calm_beam.serving import Generator
from calm_beam.serving import generator as generator_module
from calm_beam.serving.agreement import check_exact, other_engine_in_words
from tests.builders import build_checkpoint
from tests.calm_beam.serving.builders import build_served_manifest
from tests.instruction_sets import TUNED, forced
from tests.pipelines import CONFIG

_CHECKPOINT = build_checkpoint(CONFIG)
_PROMPT = (5, 9, 12, 1)
_ELSEWHERE = EngineRecord(name="native", instructions="avx1024", head="uint8", prefill="native")


def _here() -> Machine:
    return Machine.here()


def _xla(head: str = "exact") -> EngineRecord:
    return EngineRecord(name="xla", instructions=_here().xla_instructions(), head=head)


def _manifest(engine: EngineRecord | None) -> Manifest:
    manifest = build_served_manifest(_CHECKPOINT)
    return dataclasses.replace(manifest, decode=dataclasses.replace(manifest.decode, engine=engine))


def _generator(calibrated: EngineRecord | None, **options: Any) -> Generator:
    return Generator.from_manifest(_manifest(calibrated), _CHECKPOINT, batch_size=1, **options)


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records if record.name == generator_module.__name__]
    return [message for message in messages if not message.startswith("calm-beam: compiling")]


def test_the_calibrated_engine_serves_where_it_can(caplog: pytest.LogCaptureFixture) -> None:
    """The calibrated engine serves if possible, silently; XLA's loop for single prompts is reported once."""
    native = [EngineRecord(name="native", instructions=name, head="exact", prefill="native") for name in TUNED[:1]]
    for engine in (_xla(), *native):
        caplog.clear()
        generator = _generator(engine)
        assert generator.engine.batch == engine
        assert generator.other_engine_in_words() == ""
        generator.generate_batch([_PROMPT])
        assert _said(caplog) == []
        generator.generate(_PROMPT)
        generator.generate(_PROMPT)
        said = _said(caplog)
        assert len(said) == (engine.name == "xla")
        for sentence in said:
            assert "pass exact_engine=True (--exact_engine)" in sentence
            assert library.VARIABLE not in sentence
        caplog.clear()
        _generator(engine, exact_engine=True).generate(_PROMPT)
        assert _said(caplog) == []


def test_another_engine_is_said_once_with_the_bound(caplog: pytest.LogCaptureFixture) -> None:
    """A manifest of native code, served by XLA, gives one message with both engines and q at the first batch."""
    with forced("none"):
        generator = _generator(_ELSEWHERE)
        assert generator.engine.batch == _xla()
        with caplog.at_level(logging.WARNING):
            generator.generate_batch([_PROMPT])
            generator.generate_batch([_PROMPT])
    (sentence,) = _said(caplog)
    assert sentence == generator.other_engine_in_words()
    for words in (_xla().in_words(), _ELSEWHERE.in_words(), "plus q", "0 of 1,000 prompts differ it may be 0.3%"):
        assert words in sentence


def test_the_engine_that_is_asked_for_serves() -> None:
    """A requested engine serves, although another was calibrated."""
    assert _generator(_ELSEWHERE, engine="xla").engine.batch == _xla()
    assert _generator(_ELSEWHERE, engine="xla", exit_head="exact").engine.batch == _xla()


def test_a_head_that_is_gone_is_served_by_the_exact_one(caplog: pytest.LogCaptureFixture) -> None:
    """If the calibrated head no longer exists, the nearest engine serves, and is reported as another one."""
    calibrated = _xla("bfloat16")
    generator = _generator(calibrated)
    assert generator.engine.batch == _xla()
    with caplog.at_level(logging.WARNING):
        generator.generate_batch([_PROMPT])
    (sentence,) = _said(caplog)
    assert sentence.startswith(f"{_xla().in_words()} serves, but {calibrated.in_words()} was calibrated")
    with pytest.raises(ManifestError, match="exact_engine is asked for, but"):
        _generator(calibrated, exact_engine=True)


@pytest.mark.parametrize("calibrated", [_ELSEWHERE, None])
def test_any_other_engine_is_refused_on_request(calibrated: EngineRecord | None) -> None:
    """On request another engine, or one that the manifest does not name, is refused with both engines and advice."""
    with pytest.raises(ManifestError, match="exact_engine is asked for, but") as error:
        _generator(calibrated, exact_engine=True)
    if calibrated is None:
        assert "the manifest does not say which engine was calibrated" in str(error.value)
    else:
        assert calibrated.in_words() in str(error.value)
        assert "--engine" in str(error.value)


@pytest.mark.parametrize("kind", ["gpu NVIDIA L4", "gpu NVIDIA H100 80GB HBM3 x 4", "tpu TPU v5 lite"])
def test_an_accelerator_that_nobody_has_tested_is_not_taken_for_batch_invariant(kind: str) -> None:
    """An untested accelerator of the calibrated kind is not assumed batch-invariant: it is reported or refused."""
    on_gpu = EngineRecord(name="xla", instructions=kind, head="exact")
    manifest = _manifest(on_gpu)
    sentence = other_engine_in_words(manifest, manifest.calibrations[0], served=on_gpu)
    assert sentence.startswith(
        f"{on_gpu.in_words()} serves, as was calibrated, but it may round a prompt differently in a batch than in the"
    )
    assert "plus q" in sentence
    with pytest.raises(ManifestError, match=re.escape(f"exact_engine is asked for, but {on_gpu.in_words()} would")):
        check_exact(on_gpu, on_gpu)


@pytest.mark.parametrize("kind", ["cpu avx512f", "gpu NVIDIA H100 80GB HBM3"])
def test_a_device_that_was_seen_to_be_batch_invariant_is_the_calibrated_engine(kind: str) -> None:
    """A device tested as batch-invariant is the calibrated engine: nothing is reported or refused."""
    engine = EngineRecord(name="xla", instructions=kind, head="exact")
    manifest = _manifest(engine)
    check_exact(engine, engine)
    assert other_engine_in_words(manifest, manifest.calibrations[0], served=engine) == ""


@pytest.mark.skipif(len(TUNED) < 2, reason="this machine has no two instruction sets")
def test_native_code_that_this_processor_has_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """If another instruction set was calibrated that this processor has, a message says how to select it."""
    best, other = TUNED[:2]
    calibrated = EngineRecord(name="native", instructions=other, head="exact", prefill="native")
    with forced(best):
        with pytest.raises(ManifestError, match=f"Set {library.VARIABLE}={other}, which this processor has, or"):
            _generator(calibrated, exact_engine=True)
        assert f"Set {library.VARIABLE}={other}" in _generator(calibrated).other_engine_in_words()
    with forced(other):
        _generator(calibrated, exact_engine=True).generate_batch([_PROMPT])
        assert _said(caplog) == []


def test_old_manifests_are_served_as_before(caplog: pytest.LogCaptureFixture) -> None:
    """Manifests without an engine are served by the best one of this machine, without a message."""
    generator = _generator(None)
    assert generator.engine.batch.name == ("native" if library.is_available() else "xla")
    generator.generate_batch([_PROMPT])
    assert _said(caplog) == []
    assert generator.other_engine_in_words() == ""


def test_single_prompts_may_have_to_be_decoded_by_the_calibrated_engine(caplog: pytest.LogCaptureFixture) -> None:
    """If no other engine may serve, a single prompt is a batch of one, without a message."""
    exact, free = _generator(_xla(), exact_engine=True), _generator(_xla())
    assert exact.decodes_as_batches
    assert not free.decodes_as_batches
    exact.warm_up()
    with CompileTime() as compiling:
        answer = exact.generate(_PROMPT)
    assert compiling.seconds() == 0
    assert [answer] == exact.generate_batch([_PROMPT])
    assert exact.full_model().decodes_as_batches
    assert _said(caplog) == []


@pytest.mark.skipif(not TUNED, reason="this machine has no native code")
def test_native_code_decodes_single_prompts_as_it_decodes_batches(caplog: pytest.LogCaptureFixture) -> None:
    """A single prompt has the answer of a batch, to the bit, by the same engine; nothing is compiled for it."""
    generator = _generator(EngineRecord(name="native", instructions=TUNED[0], head="exact", prefill="native"))
    assert generator.engine.single == generator.engine.batch
    (in_batch,) = generator.generate_batch([_PROMPT])
    generator.warm_up()
    with CompileTime() as compiling:
        assert generator.generate(_PROMPT) == in_batch
    assert compiling.seconds() == 0
    assert _said(caplog) == []


@pytest.mark.skipif(not TUNED, reason="this machine has no native code")
def test_native_code_decodes_large_models_by_one_decoder(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a layer's weights fit in no cache, the decoder of batches also decodes single prompts, by itself."""
    monkeypatch.setattr(native_decoder, "CACHED_WEIGHTS", 0)
    generator = _generator(EngineRecord(name="native", instructions=TUNED[0], head="exact", prefill="native"))
    assert generator.decodes_as_batches
    assert generator.engine.single == generator.engine.batch
    assert [generator.generate(_PROMPT)] == generator.generate_batch([_PROMPT])
    assert _said(caplog) == []
