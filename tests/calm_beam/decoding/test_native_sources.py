"""Sources of native code, against those of XLA."""

from typing import Any

import numpy as np
import pytest

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding import cpu as native_sources
from calm_beam.decoding.cpu import NativeSources
from calm_beam.decoding.engine import Slots
from calm_beam.decoding.kv_cache import SingleBranches
from calm_beam.decoding.weights import Weights
from calm_beam.decoding.xla.engine import sources_by_width
from calm_beam.exits.rule import ExitRule
from calm_beam.manifest import EngineRecord
from calm_beam.model import network_of
from calm_beam.model.native_decoder import NativeDecoder
from tests.builders import build_checkpoint, build_config, checkpoint_of
from tests.calm_beam.model.llama.builders import build_llama_arrays, build_llama_config

from .decoders import first_device

pytestmark = pytest.mark.usefixtures("instruction_set")

_LLAMA = build_llama_config(vocab_size=64, num_decoder_layers=3, max_positions=256)
_WINDOWED = build_llama_config(
    vocab_size=64,
    num_decoder_layers=3,
    max_positions=256,
    sliding_window=9,
    windowed_layers=(1,),
    attention_bias=True,
    query_key_norms=True,
)
_MODELS = {
    "t5": build_checkpoint(build_config(num_encoder_layers=2, num_decoder_layers=3)),
    "plain t5": build_checkpoint(
        build_config(num_encoder_layers=2, num_decoder_layers=3, gated_mlp=False, activation="relu")
    ),
    "umt5": build_checkpoint(build_config(num_encoder_layers=2, num_decoder_layers=3, relative_bias_per_layer=True)),
    "llama": checkpoint_of(_LLAMA, build_llama_arrays(_LLAMA, 1)),
    "windowed llama": checkpoint_of(_WINDOWED, build_llama_arrays(_WINDOWED, 1)),
}
_STEPS, _SLOTS = 4, 5


def _made(checkpoint: Checkpoint, prefixes: dict[int, list[int]]) -> tuple[Any, Weights, Slots]:
    model = network_of(checkpoint.config)
    engine = EngineRecord(name="native", head="exact", prefill="native")
    weights = Weights(checkpoint, model, first_device(), steps=_STEPS, measures=[ExitRule().measure()], engine=engine)
    slots = Slots(
        SingleBranches(slots=_SLOTS, steps=_STEPS, capacity=_SLOTS * _STEPS),
        num_branches=1,
        steps=_STEPS,
        sources={32: 4, 160: 3},
        prefixes=prefixes,
        widths=np.array([32, 160, 32, 32, 160], np.int32),
        places=np.array([3, 0, 1, 0, 2], np.int32),
        lengths=np.ones(_SLOTS, np.int32),
    )
    return model, weights, slots


def _native(checkpoint: Checkpoint, weights: Weights, slots: Slots) -> NativeSources:
    assert isinstance(weights.native, NativeDecoder)
    return NativeSources(checkpoint.config, weights.native, slots)


def _of_widths(monkeypatch: pytest.MonkeyPatch) -> dict[int, native_sources.SourcesOfWidth]:
    """Returns the sources by width, once they are made."""
    kept: dict[int, native_sources.SourcesOfWidth] = {}
    make = native_sources.SourcesOfWidth

    def watched(*arguments: Any, width: int, places: int, **options: Any) -> Any:
        made = make(*arguments, width=width, places=places, **options)
        # A prefix has one place.
        kept.update({width: made} if places > 1 else {})
        return made

    monkeypatch.setattr(native_sources, "SourcesOfWidth", watched)
    return kept


@pytest.mark.parametrize(
    ("kind", "prefixes"),
    [*((kind, {}) for kind in _MODELS), ("llama", {160: [7] * 32}), ("windowed llama", {160: [7] * 20})],
)
def test_they_are_those_of_xla(kind: str, prefixes: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of two widths, also where one takes the place of another, and where T5's have padding inside."""
    model, weights, slots = _made(_MODELS[kind], prefixes)
    theirs = sources_by_width(model, weights, slots)
    kept = _of_widths(monkeypatch)
    ours = _native(_MODELS[kind], weights, slots)
    generator = np.random.default_rng(2)
    for width, encoded, lengths, places in (
        (32, 32, [30, 17], [3, 1]),
        # The first prompt again, with a shorter one, and a row of padding.
        (32, 16, [9, 16, 0], [3, 2, 4]),
        # More tokens than a panel has, and further apart than any distance with a bucket of its own.
        (160, 160, [150, 40], [0, 2]),
        (32, 32, [31, 1], [0, 2]),
    ):
        tokens = generator.integers(2, 60, (len(lengths), encoded)).astype(np.int32)
        for row, length in zip(tokens, lengths, strict=True):
            row[length:] = 0
            row[5:7] = 0
            row[: len(prefixes.get(width, ()))] = prefixes.get(width, [])
        given: dict[str, Any] = {"lengths": np.array(lengths, np.int32), "places": np.array(places, np.int32)}
        theirs[width].admit(model, weights, tokens, **given)
        ours.prefill(width, source_tokens=tokens, **given)
    ours.see()
    assert ours.of_slot.tolist() == [0, 1, 0, 0, 1]
    for width, sources in theirs.items():
        is_seen = np.asarray(sources.mask)[:, :width]
        np.testing.assert_array_equal(kept[width].mask, is_seen)
        for ours_of_layer, theirs_of_layer in zip(kept[width].keys_values, sources.keys_values, strict=True):
            for mine, other in zip(ours_of_layer, theirs_of_layer, strict=True):
                # [places, heads, positions, size] -> [places, positions, heads * size]
                expected = np.swapaxes(np.asarray(other)[:, :, :width], 1, 2).reshape(mine.shape)
                np.testing.assert_allclose(mine[is_seen], expected[is_seen], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_a_prompt_has_the_same_bits_in_any_company(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt by itself, at another place and width, with others, and in small parts: the same keys and values."""
    _, weights, slots = _made(_MODELS[kind], {})
    generator = np.random.default_rng(5)
    tokens = generator.integers(2, 60, (3, 32)).astype(np.int32)
    made = []
    for most, width, rows, places in (
        (1024, 32, [0], [2]),
        (1024, 160, [1, 0, 2], [0, 1, 2]),
        (16, 160, [2, 0], [1, 0]),
    ):
        monkeypatch.setattr(native_sources, "_MOST_POSITIONS", most)
        with monkeypatch.context() as patch:
            kept = _of_widths(patch)
            ours = _native(_MODELS[kind], weights, slots)
        lengths = np.full(len(rows), 32, np.int32)
        ours.prefill(width, source_tokens=tokens[rows], lengths=lengths, places=np.array(places, np.int32))
        place = places[rows.index(0)]
        made.append([values[place, :32].copy() for pair in kept[width].keys_values for values in pair])
    for others in made[1:]:
        for first, other in zip(made[0], others, strict=True):
            np.testing.assert_array_equal(first, other)


def test_native_code_reads_them_where_they_stand() -> None:
    """Each layer has an array with the sources of every width in the order of their indices."""
    _, weights, slots = _made(_MODELS["t5"], {})
    seen = _native(_MODELS["t5"], weights, slots).as_seen()
    assert len(seen) == 3
    assert [[sources.most for sources in of_layer] for of_layer in seen] == [[32, 160]] * 3
