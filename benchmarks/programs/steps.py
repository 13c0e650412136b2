"""The steps of batches, as `XlaEngine` has them run."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from calm_beam.decoding import weights
from calm_beam.decoding.xla import steps as device_steps
from calm_beam.decoding.xla.steps import AskedRows, CopiedRows, EmbeddedRows, LayerRows, SkippedRows, ToldRows
from calm_beam.model import ArrayType, ModelConfig, architecture_of, network_of
from calm_beam.model.heads import head_parameters
from calm_beam.precision import Precision

from .placement import Placement
from .program import Program

# Steps of an output, tokens of a source.
_STEPS, _SOURCE = 64, 64
# Prompts that are prefilled together.
_PROMPTS = 16
# Tokens that all prompts begin with, of those of a prompt that shares them.
_PREFIX, _LONG_SOURCE = 32, 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a batch.

    Attributes:
      rows: Of a call, in whole tiles.
      places: Prompts.
      num_branches: Branches of each.
      nodes: Of a store.
    """

    rows: int
    places: int
    num_branches: int
    nodes: int


_OF_A_SWEEP = Sizes(rows=512, places=128, num_branches=4, nodes=1024)
# One prompt with one output: whatever could be left out for it is.
_SMALLEST = Sizes(rows=256, places=1, num_branches=1, nodes=_STEPS)


class Steps:
    """The steps of one model."""

    def __init__(
        self, config: ModelConfig, precision: Precision, placement: Placement, *, sizes: Sizes = _OF_A_SWEEP
    ) -> None:
        """Describes their arguments."""
        self._config, self._precision, self._at, self._sizes = config, precision, placement, sizes
        self._model = network_of(config, precision=precision)
        self._layers = config.num_decoder_layers
        self._tree = placement.tree(precision)
        slots = sizes.places * sizes.num_branches
        self._states = placement.array(self._layers + 1, slots, config.emb_dim, dtype=precision.dtype)

    def all(self) -> Iterator[Program]:
        """Yields every step; with those that rows of any number go through, the same for one prompt."""
        smallest = Steps(self._config, self._precision, self._at, sizes=_SMALLEST)
        alike = {each.name: each for each in smallest._every()}
        for program in self._every():
            is_alike = program.function in (
                device_steps.run_layer,
                device_steps.decide_rows,
                device_steps.fill_skipped,
            )
            yield dataclasses.replace(program, smallest=alike[program.name] if is_alike else None)

    def _every(self) -> Iterator[Program]:
        yield from self._admissions()
        yield self._embedding()
        for measure in ("softmax", "state", "classifier"):
            yield self._decoder_layer(measure)
        yield from self._heads()
        yield from self._skipping()
        yield from self._making()

    def _keys_values(self, *before: int, positions: int) -> tuple[Any, Any]:
        config = self._config
        shape = (*before, config.num_kv_heads, positions, config.head_dim)
        pair = self._at.array(*shape, dtype=self._precision.dtype, axis=len(before), of=config.num_kv_heads)
        return pair, pair

    def _store(self) -> tuple[Any, Any]:
        config = self._config
        shape = (self._sizes.nodes, config.num_kv_heads * config.head_dim)
        store = self._at.array(*shape, dtype=self._precision.dtype, axis=1, of=config.num_kv_heads)
        return store, store

    def _told(self, kind: type[ToldRows], several: int = 0) -> Any:
        return self._at.array(self._sizes.rows, kind.num_columns(several))

    def _terms(self) -> Any:
        shapes = jax.eval_shape(
            lambda tree: self._model.apply({"params": tree}, _STEPS, method="path_terms"), self._tree
        )
        return jax.tree.map(lambda each: self._at.array(*each.shape, dtype=each.dtype), shapes)[0]

    def admit(self, *, rows: int = _PROMPTS, source: int = _SOURCE, prefix: int = 0) -> Program:
        """Returns what goes through prompts and puts what they leave into slots.

        Args:
          rows: Prompts.
          source: Tokens of each.
          prefix: Tokens of which all know what they leave; 0 if none are shared.
        """
        kept = [self._keys_values(rows, positions=source)] * self._layers
        shared = {"prefix": [self._keys_values(1, positions=prefix)] * self._layers} if prefix else {}
        return Program(
            name=f"admit, {rows} x {source}" + (f", {prefix} shared" if prefix else ""),
            placement=self._at,
            function=device_steps.admit,
            arguments=(self._model, {"params": self._tree}),
            options={
                "keys_values": kept,
                "source_mask": self._at.array(rows, source, dtype="bool"),
                "source_tokens": self._at.array(rows, source),
                "lengths": self._at.array(rows),
                "places": self._at.array(rows),
                **shared,
            },
            donated=("keys_values", "source_mask"),
        )

    def _admissions(self) -> Iterator[Program]:
        yield self.admit()
        if architecture_of(self._config).shares_prefixes:
            yield self.admit(source=_LONG_SOURCE, prefix=_PREFIX)
            yield Program(
                name=f"shared prefix, {_PREFIX}",
                placement=self._at,
                function=device_steps.prefill_prefix,
                arguments=(self._model, {"params": self._tree}, self._at.array(_PREFIX)),
            )

    def _embedding(self) -> Program:
        return Program(
            name="embeddings",
            placement=self._at,
            function=device_steps.embed,
            arguments=(self._model, {"params": {"token_embedder": self._tree["token_embedder"]}}),
            options={"states": self._states, "rows": self._told(EmbeddedRows)},
            donated=("states",),
            # Each device looks up what it has of the vocabulary.
            sums=1,
        )

    def _layer(self, index: int = 0) -> Any:
        return self._tree["decoder"][f"layers_{index}"]

    def _decoder_layer(self, measure: str) -> Program:
        parameters = {"layer": self._layer()}
        if measure == "classifier":
            parameters["classifier"] = {"params": {"decoder": {"meta_cls": self._tree["decoder"]["meta_cls"]}}}
        is_encoder = bool(architecture_of(self._config).encoder_width(self._config))
        return Program(
            name=f"decoder layer, {measure}",
            placement=self._at,
            function=device_steps.run_layer,
            # The head decides about logits, by a program of its own.
            arguments=(self._model, (measure,) if measure in ("state", "classifier") else ()),
            options={
                "parameters": parameters,
                "states": self._states,
                "cache": self._store(),
                "keys_values": self._keys_values(self._sizes.places, positions=_SOURCE),
                "source_mask": self._at.array(self._sizes.places, _SOURCE, dtype="bool"),
                "terms": self._terms(),
                "layer": self._at.array(),
                "rows": self._told(LayerRows, _STEPS),
            },
            donated=("states", "cache"),
            # Without an encoder, prompt and output are one attention.
            sums=3 if is_encoder else 2,
        )

    def _heads(self) -> Iterator[Program]:
        states = self._at.array(self._sizes.rows, self._config.emb_dim, dtype="float32")
        yield Program(
            name="confidence of states",
            placement=self._at,
            function=device_steps.measure_states,
            arguments=("state", *[states] * 2, self._at.array()),
            sums=0,
        )
        applied_as, parameters = head_parameters(self._tree, self._config, 1)
        for measures in (("softmax",), ("entropy",), ("softmax", "softmax_max", "entropy")):
            yield Program(
                name=f"decisions, {' and '.join(measures)}",
                placement=self._at,
                function=device_steps.decide_rows,
                arguments=(self._model, measures),
                options={
                    "head_layer": applied_as,
                    "parameters": {"params": parameters},
                    "states": self._states,
                    "rows": self._told(AskedRows),
                },
                sums=1,
            )

    def _skipping(self) -> Iterator[Program]:
        above = self._layers - 1
        yield Program(
            name="propagation of states",
            placement=self._at,
            function=device_steps.fill_skipped,
            arguments=(self._model, [self._layer(index) for index in range(1, self._layers)]),
            options={
                "terms": [self._terms()] * above,
                "cache": [self._store()] * above,
                "states": self._states,
                "rows": self._told(SkippedRows, above),
            },
            donated=("cache",),
            sums=0,
        )
        yield Program(
            name="propagation of keys and values",
            placement=self._at,
            function=device_steps.copy_skipped,
            arguments=(self._model,),
            options={
                "cache": [self._store()] * self._layers,
                "rows": self._told(CopiedRows, above),
            },
            donated=("cache",),
            sums=0,
        )

    def _making(self) -> Iterator[Program]:
        yield Program(
            name="terms of paths",
            placement=self._at,
            function=weights._path_terms,
            arguments=(self._model, _STEPS, {"params": self._tree}),
        )
        store = ArrayType((self._sizes.nodes, self._config.num_kv_heads * self._config.head_dim), self._precision.dtype)
        yield Program(
            name="room for keys and values",
            placement=self._at,
            function=weights.zeros,
            arguments=((store,) * 2,),
            options={"axis": 1, "of": self._config.num_kv_heads},
            sums=0,
        )
