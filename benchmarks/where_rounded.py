"""Which step of the device rounds a row by where it stands, and beside what.

    python -m benchmarks.where_rounded --checkpoint=model/
    python -m benchmarks.where_rounded --checkpoint=model/ --as_accelerator

Every step is run with one row alone, and with the same row at other places: further down in its tile, in another tile,
as one of four rows of a prompt, among buffers of other sizes. All other numbers are drawn anew each time. What differs
from the row alone, in any bit, is counted; on processors nothing does. Where `benchmarks.across_devices` finds that
batches have other bits than the sweep, this says which step to look at.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.checkpoints import load_checkpoint
from calm_beam.decoding.padding import padded
from calm_beam.decoding.xla import attended, steps, tiles
from calm_beam.decoding.xla.rows import AskedRows, LayerRows
from calm_beam.model import network_of
from calm_beam.model.heads import head_parameters

from .machine import describe_machine

_STEPS, _STEP, _WIDTH, _LENGTH = 48, 7, 32, 20
# Lanes, prompts, the row's place among the lanes, and how many of its prompt stand side by side.
_LAYER_CASES = (
    ("other numbers beside it", 2, 2, 0, 1),
    ("seventh of 7", 7, 7, 6, 1),
    ("201st of 256", 256, 100, 200, 1),
    ("281st of 300, another tile", 300, 100, 280, 1),
    ("first of 2,100", 2100, 100, 0, 1),
    ("four of its prompt", 8, 2, 4, 4),
)
_HEAD_CASES = (("seventh of 7", 7, 6), ("201st of 256", 256, 200), ("281st of 300", 300, 280), ("of 2,100", 2100, 2050))
_PROMPT_CASES = (("fourth of 4", 4, 3, 8), ("21st of 24", 24, 20, 97), ("71st of 80", 80, 70, 97))


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a line for every step and place."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--as_accelerator", action="store_true", help="the programs of an accelerator, wherever it is")
    flags = parser.parse_args(argv)
    if flags.as_accelerator:
        for module in (tiles, attended, steps):
            vars(module)["is_host"] = lambda: False
    print(describe_machine(), flush=True)
    moved = _Steps(flags.checkpoint)
    for measures in ((), ("state",)):
        for title, found, expected in moved.layers(measures):
            print(f"a layer{', measured' if measures else ''}, {title}: {_differing(found, expected)}", flush=True)
    for title, found, expected in moved.heads():
        print(f"the head, {title}: {_differing(found, expected)}", flush=True)
    for title, found, expected in moved.prompts():
        print(f"a prompt, {title}: {_differing(found, expected)}", flush=True)


def _differing(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> str:
    """Returns how many numbers differ, of how many; `found` may have several rows, each to be the expected one."""
    pairs = [np.broadcast_arrays(one, other) for one, other in zip(found, expected, strict=True)]
    return f"{sum(int((one != other).sum()) for one, other in pairs)} of {sum(one.size for one, _ in pairs):,} differ"


_Case = tuple[str, list[np.ndarray], list[np.ndarray]]


class _Steps:
    """The steps of a model, with a row that is the same wherever it is put."""

    def __init__(self, checkpoint: str) -> None:
        """Loads the model, and draws what belongs to the row."""
        loaded = load_checkpoint(checkpoint)
        self._config, self._tree = loaded.config, jax.device_put(loaded.parameters())
        self._model = network_of(self._config)
        self._drawn = np.random.default_rng(0)
        config = self._config
        self._inner = config.num_kv_heads * config.head_dim
        self._positions = attended.source_positions(_WIDTH)
        self._state, self._path, self._source = (
            self._numbers(config.emb_dim),
            self._numbers(2, _STEPS, self._inner),
            self._numbers(2, config.num_kv_heads, self._positions, config.head_dim),
        )

    def _numbers(self, *shape: int) -> np.ndarray:
        return self._drawn.standard_normal(shape).astype(np.float32)

    def layers(self, measures: tuple[str, ...]) -> Iterator[_Case]:
        """Yields the outputs, keys, values and confidences of a decoder layer, and those of the row alone."""
        alone = self._layer(measures, lanes=1, prompts=1, at=0, together=1)
        for title, lanes, prompts, at, together in _LAYER_CASES:
            yield title, self._layer(measures, lanes=lanes, prompts=prompts, at=at, together=together), alone

    def _layer(
        self, measures: tuple[str, ...], *, lanes: int, prompts: int, at: int, together: int
    ) -> list[np.ndarray]:
        size, nodes = tiles.whole_tiles(lanes), lanes * _STEPS
        states = self._numbers(self._config.num_decoder_layers + 1, lanes, self._config.emb_dim)
        stores = self._numbers(2, nodes, self._inner)
        sources = self._numbers(2, prompts, *self._source.shape[1:])
        paths = np.arange(nodes).reshape(lanes, _STEPS)
        prompt_of = np.arange(lanes) // together % prompts
        rows = slice(at, at + together)
        states[1, rows] = self._state
        stores[:, paths[rows]] = self._path[:, None]
        sources[:, prompt_of[at]] = self._source
        lane = np.arange(lanes)
        told = LayerRows(
            lanes=padded(lane, size, fill=lanes),
            below=padded(lane, size),
            nodes=padded(paths[:, _STEP], size, fill=nodes),
            steps=padded(np.full(lanes, _STEP), size),
            prompt_lengths=padded(np.full(lanes, _LENGTH), size, fill=1),
            paths=padded(paths, size),
            **attended.grouped(prompt_of, size),
        )
        terms = self._model.apply({"params": self._tree}, _STEPS, method="path_terms")
        made, store, confidences = steps.run_layer(
            self._model,
            measures,
            parameters={"layer": self._tree["decoder"]["layers_1"]},
            states=jnp.array(states),
            cache=tuple(map(jnp.array, stores)),
            keys_values=tuple(map(jnp.array, sources)),
            source_mask=jnp.array(np.broadcast_to(np.arange(self._positions) < _LENGTH, (prompts, self._positions))),
            terms=terms[min(1, len(terms) - 1)],
            layer=jnp.int32(2),
            rows=told.joined(),
        )
        kept = [np.asarray(values)[paths[rows, _STEP]] for values in store]
        return [np.asarray(made)[2, rows], *kept, np.asarray(confidences)[:, rows].T]

    def heads(self) -> Iterator[_Case]:
        """Yields token and softmax confidence of a state, and those of it alone."""
        alone = self._head(1, 0)
        for title, lanes, at in _HEAD_CASES:
            yield title, self._head(lanes, at), alone

    def _head(self, lanes: int, at: int) -> list[np.ndarray]:
        states = self._numbers(2, lanes, self._config.emb_dim)
        states[1, at] = self._state
        size = tiles.whole_tiles(lanes)
        asked = AskedRows(lanes=padded(np.arange(lanes), size, fill=lanes), layers=padded(np.ones(lanes), size))
        layer, parameters = head_parameters(self._tree, self._config, 1)
        tokens, confidences, _ = steps.decide_rows(
            self._model,
            ("softmax",),
            head_layer=layer,
            parameters={"params": parameters},
            states=jnp.array(states),
            rows=asked.joined(),
        )
        return [np.asarray(tokens)[at], np.asarray(confidences)[:, at]]

    def prompts(self) -> Iterator[_Case]:
        """Yields keys and values that a prompt leaves to every layer, and those that it leaves alone."""
        alone = self._prompt(1, 0, 1)
        for title, count, at, places in _PROMPT_CASES:
            yield title, self._prompt(count, at, places), alone

    def _prompt(self, count: int, at: int, places: int) -> list[np.ndarray]:
        config: Any = self._config
        tokens = self._drawn.integers(2, config.vocab_size, (count, _LENGTH), dtype=np.int32)
        tokens[at] = np.arange(2, 2 + _LENGTH)
        shape = (places, config.num_kv_heads, self._positions, config.head_dim)
        made, _ = steps.admit(
            self._model,
            {"params": self._tree},
            keys_values=[(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(config.num_decoder_layers)],
            source_mask=jnp.zeros((places, self._positions), bool),
            source_tokens=tokens,
            lengths=np.full(count, _LENGTH, np.int32),
            places=np.arange(count, dtype=np.int32),
        )
        return [np.asarray(values)[at] for pair in made for values in pair]


if __name__ == "__main__":
    main()
