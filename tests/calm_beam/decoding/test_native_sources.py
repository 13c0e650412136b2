"""Sources of native code, against those of XLA."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding import cpu as native_sources
from calm_beam.decoding.cpu import NativeSources
from calm_beam.decoding.engine import Slots
from calm_beam.decoding.kv_cache import SingleBranches
from calm_beam.decoding.weights import Weights
from calm_beam.decoding.xla import steps as device_steps
from calm_beam.decoding.xla.engine import sources_by_width
from calm_beam.exits.rule import ExitRule
from calm_beam.manifest import EngineRecord
from calm_beam.model import network_of
from tests.builders import build_checkpoint, build_config, checkpoint_of
from tests.calm_beam.model.llama.builders import build_llama_arrays, build_llama_config

from .decoders import first_device

_LLAMA = build_llama_config(vocab_size=64, num_decoder_layers=3, max_positions=128)
_MODELS = {
    "t5": build_checkpoint(build_config(num_encoder_layers=1, num_decoder_layers=3)),
    "llama": checkpoint_of(_LLAMA, build_llama_arrays(_LLAMA, 1)),
}
_STEPS, _SLOTS = 4, 5


def _made(checkpoint: Checkpoint, prefixes: dict[int, list[int]]) -> tuple[Any, Weights, Slots]:
    model = network_of(checkpoint.config)
    engine = EngineRecord(name="xla", instructions=None, head="exact")
    weights = Weights(checkpoint, model, first_device(), steps=_STEPS, measures=[ExitRule().measure()], engine=engine)
    slots = Slots(
        SingleBranches(slots=_SLOTS, steps=_STEPS, capacity=_SLOTS * _STEPS),
        num_branches=1,
        steps=_STEPS,
        sources={32: 4, 64: 3},
        prefixes=prefixes,
        widths=np.array([32, 64, 32, 32, 64], np.int32),
        places=np.array([3, 0, 1, 0, 2], np.int32),
        lengths=np.ones(_SLOTS, np.int32),
    )
    return model, weights, slots


@pytest.mark.parametrize(("kind", "prefixes"), [("t5", {}), ("llama", {}), ("llama", {64: [7] * 32})])
def test_they_are_xlas_and_waited_for_when_they_are_needed(
    kind: str, prefixes: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of two widths, some of which wait for a slot, are XLA's when they are needed.

    A place that is used again has nothing of its last prompt.
    """
    model, weights, slots = _made(_MODELS[kind], prefixes)
    theirs = sources_by_width(model, weights, slots)
    kept: dict[int, native_sources.SourcesOfWidth] = {}
    took: list[list[int]] = []
    make, take_over = native_sources.SourcesOfWidth, native_sources.SourcesOfWidth.take_over

    def watched(*arguments: Any, width: int, **options: Any) -> Any:
        kept[width] = make(*arguments, width=width, **options)
        return kept[width]

    def taken(sources: Any, coming: Any) -> None:
        took.append(coming.places.tolist())
        take_over(sources, coming)

    monkeypatch.setattr(native_sources, "SourcesOfWidth", watched)
    monkeypatch.setattr(make, "take_over", taken)
    ours = NativeSources(model, weights, slots)
    generator = np.random.default_rng(2)
    for width, encoded, lengths, places in (
        (32, 32, [30, 17], [3, 1]),
        # The first prompt again, with a shorter one.
        (32, 16, [9, 16], [3, 4]),
        (64, 64, [60, 40], [0, 2]),
        (32, 32, [31, 1], [0, 2]),
    ):
        tokens = generator.integers(2, 60, (2, encoded)).astype(np.int32)
        for row, length in zip(tokens, lengths, strict=True):
            row[length:] = 0
            row[: len(prefixes.get(width, ()))] = prefixes.get(width, [])
        given: dict[str, Any] = {
            "lengths": np.array(lengths, np.int32),
            "places": np.array(places, np.int32),
        }
        theirs[width].admit(model, weights, tokens, **given)
        ours.prefill(width, tokens, **given)
    # Only in a reused place: no step has run there, and later ones have to be stored there.
    assert took == [[3, 1]]
    ours.see(np.array([2]))
    assert len(took) == 1
    assert ours.of_slot.tolist() == [0, 1, 0, 0, 1]
    ours.see(np.array([0]))
    # The other row is padding.
    assert took[1:] == [[3]]
    ours.see(np.array([1, 2]))
    assert took[2:] == [[0, 2]]
    ours.see(np.arange(_SLOTS))
    assert took[3:] == [[0, 2]]
    for width, sources in theirs.items():
        is_seen = np.asarray(sources.mask)
        np.testing.assert_array_equal(kept[width].mask, is_seen)
        for ours_of_layer, theirs_of_layer in zip(kept[width].keys_values, sources.keys_values, strict=True):
            for mine, other in zip(ours_of_layer, theirs_of_layer, strict=True):
                seen = np.broadcast_to(is_seen[:, None, :, None], mine.shape)
                np.testing.assert_allclose(mine[seen], np.asarray(other)[seen], rtol=1e-5, atol=1e-5)


def test_native_code_reads_them_where_they_stand() -> None:
    """Each layer has an array with the sources of every width in the order of their indices."""
    model, weights, slots = _made(_MODELS["t5"], {})
    seen = NativeSources(model, weights, slots).as_seen()
    assert len(seen) == 3
    assert [[sources.most for sources in of_layer] for of_layer in seen] == [[32, 64]] * 3


def test_what_is_compiled_on_padding_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilation on padding is awaited, so that its error is raised at once, and its output is freed."""
    model, weights, slots = _made(_MODELS["t5"], {})
    ours = NativeSources(model, weights, slots)
    made: list[weakref.ref[Any]] = []
    prefill = device_steps.prefill

    def watched(*arguments: Any, **options: Any) -> Any:
        keys_values, mask = prefill(*arguments, **options)
        made.append(weakref.ref(mask))
        return keys_values, mask

    monkeypatch.setattr(device_steps, "prefill", watched)
    nobody = np.full(2, slots.sources[32], np.int32)
    ours.prefill(32, np.zeros((2, 16), np.int32), lengths=np.zeros(2, np.int32), places=nobody)
    gc.collect()
    assert [reference() for reference in made] == [None]
