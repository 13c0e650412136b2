"""The engine in a manifest, and earlier manifests without one."""

import dataclasses
from typing import Any

import pytest

from calm_beam.manifest import EngineRecord, Manifest, ManifestError, engine_difference
from tests.calm_beam.manifest.builders import build_confirmed_manifest, build_manifest

_NATIVE = EngineRecord(name="native", instructions="avx2", head="uint8", prefill="native")
_XLA = EngineRecord(name="xla", instructions="cpu avx2", head="exact")


def _with_engine(engine: EngineRecord | None) -> Manifest:
    return build_manifest(decode=dataclasses.replace(build_manifest().decode, engine=engine))


def test_a_manifest_says_which_engine_was_calibrated() -> None:
    """The calibrated engine reads back from JSON, and is part of the digest."""
    manifest = _with_engine(_NATIVE)
    assert manifest.engine == _NATIVE
    content: Any = manifest.to_dict()
    assert content["decode"]["engine"] == {
        "name": "native",
        "instructions": "avx2",
        "head": "uint8",
        "prefill": "native",
    }
    assert Manifest.from_dict(manifest.to_dict()) == manifest
    assert manifest.digest != build_manifest().digest


def test_earlier_manifests_stay_as_they_are() -> None:
    """Manifests without an engine have no such field, and read as not recorded."""
    content: Any = build_manifest().to_dict()
    assert "engine" not in content["decode"]
    assert Manifest.from_dict(content).engine is None


def test_the_engine_that_confirmed_counts() -> None:
    """The engine of confirmed thresholds is that of the holdout's examples."""
    manifest = build_confirmed_manifest()
    assert manifest.confirmation is not None
    assert manifest.engine is None
    confirmed = dataclasses.replace(manifest, confirmation=dataclasses.replace(manifest.confirmation, engine=_XLA))
    assert confirmed.engine == _XLA
    assert Manifest.from_dict(confirmed.to_dict()) == confirmed


def test_instructions_may_be_unknown() -> None:
    """Unknown instructions, as on other machines, do not distinguish engines."""
    unknown = EngineRecord(name="xla", head="exact")
    assert unknown.to_dict() == {"name": "xla", "head": "exact"}
    assert not unknown.is_unlike(_XLA)
    assert unknown.is_unlike(_NATIVE)
    assert _XLA.is_unlike(dataclasses.replace(_XLA, instructions="cpu avx512f"))
    assert _XLA.is_unlike(dataclasses.replace(_XLA, head="int8"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "cuda"}, 'name must be one of native, xla, xla_loop, got "cuda"'),
        ({"head": "auto"}, 'head must be one of exact, int8, bfloat16, uint8, got "auto"'),
        ({"instructions": ""}, "instructions must be a non-empty string"),
    ],
)
def test_other_names_are_refused(changes: dict[str, str], message: str) -> None:
    """An unknown name is refused with the known ones."""
    with pytest.raises(ManifestError) as error:
        dataclasses.replace(_XLA, **changes)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (_XLA, ()),
        (
            _NATIVE,
            (
                "the engine is native (avx2), head uint8 there, xla (cpu avx2), head exact here; --engine=native takes "
                "the other, on a machine that has it",
            ),
        ),
        (
            dataclasses.replace(_XLA, head="int8"),
            (
                "the engine is xla (cpu avx2), head int8 there, xla (cpu avx2), head exact here; an earlier version of "
                "calm-beam decoded there, in a way that is gone",
            ),
        ),
        (
            dataclasses.replace(_XLA, head="uint8"),
            (
                "the engine is xla (cpu avx2), head uint8 there, xla (cpu avx2), head exact here; --exit_head=int8 "
                "takes the other",
            ),
        ),
        (
            None,
            (
                "the engine is one that was not recorded there, xla (cpu avx2), head exact here; an earlier version of "
                "calm-beam decoded there",
            ),
        ),
    ],
)
def test_engines_of_two_jobs_in_words(theirs: EngineRecord | None, said: tuple[str, ...]) -> None:
    """Two engines are named with how to select the other; for one engine, there is no text."""
    assert engine_difference(_XLA, theirs) == said
