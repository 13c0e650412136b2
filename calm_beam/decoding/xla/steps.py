"""The steps of the XLA engine on the device: one function each, of fixed shapes, compiled once per shape.

Rows are packed: a step gets one row for each group, of any prompts, padded to whole tiles (see `tiles`). It gets them
as one array of int32, since each array takes time to transfer to a device. Padding rows come last and have indices,
such as branches, beyond the last valid one: reads there return arbitrary values, writes are dropped.

States are in one buffer, (layers + 1, slots * branches, width), of the model's type: row `branch` of entry i is the
output of layer i for the group whose first branch that is; entry 0 is the embedding. Each layer has a store of keys and
one of values, (nodes, heads of keys * head_dim); a row attends to the nodes of its path.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.decoding.compilation import compiled
from calm_beam.exits.certified_head import Certificate, CertifiedHead, certify
from calm_beam.exits.decision import decide_by_each
from calm_beam.exits.measures import Need, measure_named
from calm_beam.model import architecture_of, packed_layer_of
from calm_beam.model.interface import EarlyExitModel, KeysValues, Numbers, Position
from calm_beam.model.numerics import widened
from calm_beam.model.partitioning import divided, whole

from .tiles import GroupedSources, apart, is_host, made_by_part, made_of_tiles, over_path, over_tiles

# A NumPy array on the host, a JAX array within a step.
Column = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToldRows:
    """Rows of a step; fields are int32 of shape (rows,), except the last one in some subclasses."""

    # Whether the last field has several numbers for every row, shape (rows, several).
    _ends_in_several: ClassVar[bool] = False

    def joined(self) -> np.ndarray:
        """Returns all fields as one array, (rows, columns)."""
        return np.column_stack(list(vars(self).values()))

    @classmethod
    def of(cls, joined: jax.Array) -> Self:
        """Returns the rows of an array that `joined` returned."""
        single = cls.num_columns()
        columns: list[Any] = list(jnp.unstack(joined[:, :single], axis=1))
        if cls._ends_in_several:
            columns.append(joined[:, single:])
        return cls(**dict(zip((field.name for field in dataclasses.fields(cls)), columns, strict=True)))

    @classmethod
    def num_columns(cls, several: int = 0) -> int:
        """Returns how many columns there are where the last field has `several`."""
        return len(dataclasses.fields(cls)) - cls._ends_in_several + several


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddedRows(ToldRows):
    """Tokens to embed.

    Attributes:
      branches: Branch of each row.
      tokens: Newest token of each.
    """

    branches: Column
    tokens: Column


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PlacedRows(ToldRows):
    """Rows with the positions of their newest tokens.

    Attributes:
      branches: Branch of the state that is read, or written.
      steps: See `Position`.
      prompt_lengths: See `Position`.
    """

    branches: Column
    steps: Column
    prompt_lengths: Column

    @property
    def position(self) -> Position:
        """Positions of the newest tokens."""
        return Position(self.steps, self.prompt_lengths)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRows(_PlacedRows):
    """Rows of a layer, ordered by prompt; `branches` are those of the outputs.

    Attributes:
      below: Branch of the layer's input in the entry below.
      nodes: Nodes where this layer writes keys and values.
      groups: See `GroupedSources`; groups, ranks and places are numbered separately for the rows of each tile.
      ranks: See `GroupedSources`.
      places: See `GroupedSources`; one group for each row.
      paths: shape (rows, steps of an output). The nodes that each row attends to, its own included.
    """

    below: Column
    nodes: Column
    groups: Column
    ranks: Column
    places: Column
    paths: Column
    _ends_in_several = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedRows(ToldRows):
    """States whose logits are computed.

    Attributes:
      branches: Branch of each state.
      layers: Layer of each state.
    """

    branches: Column
    layers: Column


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkippedRows(_PlacedRows):
    """States from which skipped layers are filled; `branches` are those of the states.

    Attributes:
      layers: Layer of each state.
      nodes: shape (rows, layers - 1). Nodes of layers 2 to L; beyond the store where a layer was not skipped.
    """

    layers: Column
    nodes: Column
    _ends_in_several = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopiedRows(ToldRows):
    """Keys and values that skipped layers copy.

    Attributes:
      layers: The layer to copy from.
      source_nodes: The node of that layer.
      nodes: See `SkippedRows`.
    """

    layers: Column
    source_nodes: Column
    nodes: Column
    _ends_in_several = True


Parameters = Any

# Positions that are prefilled at a time, or those of one prompt if it has more. On a host, that is enough rows for its
# matrix products; a wide model gains more from more rows than they delay a prompt that arrives alone.
_TOGETHER, _TOGETHER_IF_WIDE, _WIDE, _TOGETHER_ON_DEVICE = 128, 256, 512, 1024


@functools.partial(compiled, static_argnums=0, donate_argnames=("keys_values", "source_mask"))
def admit(
    model: EarlyExitModel,
    parameters: Parameters,
    *,
    keys_values: list[KeysValues],
    source_mask: jax.Array,
    source_tokens: jax.Array,
    lengths: jax.Array,
    places: jax.Array,
    prefix: Sequence[KeysValues] = (),
) -> tuple[list[KeysValues], jax.Array]:
    """Returns the sources' keys and values and their mask, with those of new prompts at `places`.

    Args:
      model: The network.
      parameters: The model's parameters.
      keys_values: Of every layer, each (places, heads of keys, source, head_dim).
      source_mask: shape (places, source).
      source_tokens: shape (rows, width), no wider than source. 0-padded.
      lengths: shape (rows,). Tokens of each prompt.
      places: shape (rows,).
      prefix: Keys and values of the common prefix of all prompts, as `prefill_prefix` returns them, or nothing.
    """
    new, new_mask = _prefilled(model, parameters, source_tokens, lengths, prefix)
    # Zeros follow the prompt, since an earlier prompt may have left NaN there: it is masked, but 0 * NaN is NaN.
    behind = 0, source_mask.shape[1] - source_tokens.shape[1]
    keys_values = [
        tuple(
            divided(
                old.at[places].set(jnp.pad(values, ((0, 0), (0, 0), behind, (0, 0))), mode="drop"),
                1,
                of=model.config.num_kv_heads,
            )
            for old, values in zip(pair, news, strict=True)
        )
        for pair, news in zip(keys_values, new, strict=True)
    ]
    return keys_values, whole(source_mask.at[places].set(jnp.pad(new_mask, ((0, 0), behind)), mode="drop"))


def _prefilled(
    model: EarlyExitModel,
    parameters: Parameters,
    source_tokens: jax.Array,
    lengths: jax.Array,
    prefix: Sequence[KeysValues],
) -> tuple[list[KeysValues], jax.Array]:
    """Returns keys and values of prompts for every layer, and their mask.

    Prefill is batch-invariant: the number of prompts at a time depends only on their width and the model's. The number
    of parts is not known to the compiler, so that it makes one loop of them.

    Args:
      model: The network.
      parameters: The model's parameters.
      source_tokens: shape (rows, width).
      lengths: shape (rows,). 0 for padding, which comes last.
      prefix: See `admit`.
    """
    count, width = source_tokens.shape
    on_host = _TOGETHER if model.config.emb_dim < _WIDE else _TOGETHER_IF_WIDE
    most = on_host if is_host() else _TOGETHER_ON_DEVICE
    together = max(1, most // width)
    padding = -count % together
    tokens, counts = (
        jnp.pad(values, ((0, padding), *((0, 0),) * (values.ndim - 1))) for values in (source_tokens, lengths)
    )

    def some(first: Numbers) -> Any:
        part = [jax.lax.dynamic_slice_in_dim(values, first, together) for values in (tokens, counts)]
        return model.apply(parameters, *apart(part), prefix, method="prefill")

    parts = -(-jnp.sum(lengths > 0) // together)
    found = made_by_part(some, size=count + padding, part=together, parts=parts, axis=0)
    keys_values, mask = jax.tree.map(lambda values: values[:count], found)
    return keys_values, mask


@functools.partial(compiled, static_argnums=0)
def prefill_prefix(model: EarlyExitModel, parameters: Parameters, tokens: jax.Array) -> list[KeysValues]:
    """Returns every layer's keys and values of the common prefix of prompts, (positions,), for `admit`."""
    keys_values, _ = model.apply(parameters, tokens[None], jnp.full(1, len(tokens)), method="prefill")
    return [tuple(divided(values, 1, of=model.config.num_kv_heads) for values in pair) for pair in keys_values]


@functools.partial(compiled, static_argnums=0, donate_argnames="states")
def embed(model: EarlyExitModel, parameters: Parameters, *, states: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the states with the embeddings of tokens as the input of layer 1; `rows` is of `EmbeddedRows`, joined."""
    told = EmbeddedRows.of(rows)
    embedded = apart(model.apply(parameters, told.tokens, method="embed"))
    return whole(states.at[0, told.branches].set(embedded, mode="drop"))


@functools.partial(compiled, static_argnums=(0, 1), donate_argnames=("states", "cache"))
def run_layer(
    model: EarlyExitModel,
    measures: tuple[str, ...],
    *,
    parameters: Parameters,
    states: jax.Array,
    cache: KeysValues,
    keys_values: KeysValues,
    source_mask: jax.Array,
    terms: Any,
    layer: jax.Array,
    rows: jax.Array,
) -> tuple[jax.Array, KeysValues, jax.Array]:
    """Runs a decoder layer for one token of every row.

    Args:
      model: The network.
      measures: Names of the confidence measures of states.
      parameters: Parameters of this layer, and of the exit classifier if that is one of the measures.
      states: The buffer of states.
      cache: This layer's store of keys and values.
      keys_values: This layer's keys and values of the sources, each (places, heads of keys, source, head_dim).
      source_mask: shape (places, source).
      terms: This layer's entry of the network's `path_terms`.
      layer: int32 scalar, from 1.
      rows: The rows that run it: `LayerRows`, joined.

    Returns:
      The buffer, the store, and float32 confidences, (measures, rows).
    """
    apply = functools.partial(packed_layer_of(model).apply, {"params": parameters["layer"]})

    def of_tile(made: tuple[Any, ...], joined: jax.Array, first: Numbers) -> tuple[Any, ...]:
        states, cache, confidences = made
        some = LayerRows.of(joined)
        inputs = _looked_up(states, layer - 1, some.below)
        kept = apply(inputs, position=some.position, terms=terms, method="self_keys_values")
        cache = _written(model, cache, kept, some.nodes)
        output = apply(
            inputs,
            position=some.position,
            terms=terms,
            path=over_path(cache, some.paths, some.steps, kv_heads=model.config.num_kv_heads),
            sources=GroupedSources(
                keys_values=keys_values,
                mask=source_mask,
                groups=some.groups,
                ranks=some.ranks,
                places=some.places,
            ),
            method="in_rows",
        )
        output = apart(output)
        states = whole(states.at[layer, some.branches].set(output, mode="drop"))
        if measures:
            of_rows = jnp.stack([_confidence(model, name, parameters, output, inputs, layer) for name in measures])
            confidences = jax.lax.dynamic_update_slice_in_dim(confidences, apart(of_rows), first, axis=1)
        return states, cache, confidences

    nothing = jnp.zeros((len(measures), len(rows)), jnp.float32)
    count = _count(states, LayerRows.of(rows))
    states, cache, confidences = over_tiles(of_tile, (states, tuple(cache), nothing), rows, count=count)
    return states, cache, confidences


def _looked_up(states: jax.Array, layers: Numbers, branches: jax.Array) -> jax.Array:
    """Returns states, given by layer and branch."""
    found: jax.Array = apart(states.at[layers, branches].get(mode="clip"))
    return found


def _count(states: jax.Array, rows: LayerRows | AskedRows | SkippedRows) -> jax.Array:
    """Returns how many rows are not padding."""
    return jnp.sum(rows.branches < states.shape[1])


def _confidence(
    model: EarlyExitModel, name: str, parameters: Parameters, output: jax.Array, inputs: jax.Array, layer: jax.Array
) -> jax.Array:
    measure = measure_named(name)
    # Compile each measure apart, so that other measures cannot change its bits.
    output, inputs = apart((output, inputs))
    if measure.needs is Need.STATES:
        confidence: jax.Array = measure.confidence(widened(output), widened(inputs), layer)
        return confidence
    made: jax.Array = measure.confidence(model.apply(parameters["classifier"], output, method="exit_score"))
    return made


@functools.partial(compiled, static_argnums=0)
def measure_states(measure: str, output: jax.Array, inputs: jax.Array, layer: jax.Array) -> jax.Array:
    """Returns the confidences of rows, (rows,), by a layer's output and its inputs, each (rows, width)."""
    confidence: jax.Array = measure_named(measure).confidence(output, inputs, layer)
    return confidence


@functools.partial(compiled, static_argnums=(0, 1), static_argnames="head_layer")
def decide_rows(
    model: EarlyExitModel,
    measures: tuple[str, ...],
    *,
    head_layer: int,
    parameters: Parameters,
    states: jax.Array,
    rows: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns a head's tokens, confidences and their finiteness for states, of shape (entries, branches, width).

    The program is that of the head of `head_layer`; the parameters may be those of another layer. `rows` are
    `AskedRows`, joined. Confidences are of shape (measures, rows), the others (rows,).
    """
    weights, vocab_axis = model.apply(parameters, head_layer, method="head_weights")

    def of_tile(some: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return decide_by_each(
            _head_inputs(model, parameters, states, some, head_layer),
            weights,
            vocab_axis=vocab_axis,
            measures=[measure_named(measure) for measure in measures],
            precision=model.precision,
            cap=architecture_of(model.config).logits_cap(model.config),
        )

    made: tuple[jax.Array, jax.Array, jax.Array] = made_of_tiles(
        of_tile, rows, count=_count(states, AskedRows.of(rows))
    )
    return made


@functools.partial(compiled, static_argnums=(0, 1), static_argnames=("head_layer", "is_thorough"))
def certify_rows(
    model: EarlyExitModel,
    measure: str,
    *,
    head_layer: int,
    parameters: Parameters,
    head: CertifiedHead,
    is_thorough: bool,
    states: jax.Array,
    rows: jax.Array,
) -> Certificate:
    """Returns what a certified head proves about states; see `decide_rows`.

    A thorough call has few rows, which are not divided into tiles.
    """

    def of_rows(some: jax.Array) -> Certificate:
        inputs = _head_inputs(model, parameters, states, some, head_layer)
        return certify(inputs, head, measure=measure_named(measure), is_thorough=is_thorough)

    if is_thorough:
        return of_rows(rows)
    made: Certificate = made_of_tiles(of_rows, rows, count=_count(states, AskedRows.of(rows)))
    return made


@functools.partial(compiled, static_argnums=0, donate_argnames="cache")
def fill_skipped(
    model: EarlyExitModel,
    parameters: list[Parameters],
    *,
    terms: list[Any],
    cache: list[KeysValues],
    states: jax.Array,
    rows: jax.Array,
) -> list[KeysValues]:
    """Returns the stores with skipped layers filled from propagated states, all layers in one step.

    Args:
      model: The network.
      parameters: Parameters of layers 2 to L.
      terms: Entries of layers 2 to L of the network's `path_terms`.
      cache: Stores of layers 2 to L.
      states: The buffer of states.
      rows: `SkippedRows`, joined.
    """
    layer_module = packed_layer_of(model)

    def of_tile(cache: list[KeysValues], joined: jax.Array, _: Numbers) -> list[KeysValues]:
        some = SkippedRows.of(joined)
        kept = _looked_up(states, some.layers, some.branches)

        def of_layer(index: int, pair: KeysValues) -> KeysValues:
            made = layer_module.apply(
                {"params": parameters[index]},
                kept,
                position=some.position,
                terms=terms[index],
                method="self_keys_values",
            )
            return _written(model, pair, made, some.nodes[:, index])

        return [of_layer(index, pair) for index, pair in enumerate(cache)]

    stores = [tuple(pair) for pair in cache]
    made: list[KeysValues] = over_tiles(of_tile, stores, rows, count=_count(states, SkippedRows.of(rows)))
    return made


@functools.partial(compiled, static_argnums=0, donate_argnames="cache")
def copy_skipped(model: EarlyExitModel, cache: list[KeysValues], *, rows: jax.Array) -> list[KeysValues]:
    """Returns the stores with an exit layer's keys and values copied to skipped layers (`projected`).

    Args:
      model: The network.
      cache: Stores of layers 1 to L.
      rows: `CopiedRows`, joined.
    """
    told = CopiedRows.of(rows)
    copied = []
    for part in range(2):
        chosen = cache[0][part][told.source_nodes]
        for layer, pair in enumerate(cache[1:], start=2):
            chosen = jnp.where((told.layers == layer)[:, None], pair[part][told.source_nodes], chosen)
        copied.append(chosen)
    above = [
        tuple(
            divided(old.at[told.nodes[:, index]].set(new, mode="drop"), 1, of=model.config.num_kv_heads)
            for old, new in zip(pair, copied, strict=True)
        )
        for index, pair in enumerate(cache[1:])
    ]
    return [cache[0], *above]


def _head_inputs(
    model: EarlyExitModel, parameters: Parameters, states: jax.Array, rows: jax.Array, head_layer: int
) -> jax.Array:
    asked = AskedRows.of(rows)
    found = _looked_up(states, asked.layers, asked.branches)
    inputs: jax.Array = model.apply(parameters, found, head_layer, method="head_inputs")
    return inputs


def _written(model: EarlyExitModel, cache: KeysValues, new: KeysValues, nodes: jax.Array) -> KeysValues:
    """Returns a store with new keys and values, each (heads, rows, head_dim), at the node of each row."""
    return tuple(
        divided(
            old.at[nodes].set(apart(jnp.swapaxes(values, 0, 1).reshape(len(nodes), -1)), mode="drop"),
            1,
            of=model.config.num_kv_heads,
        )
        for old, values in zip(cache, new, strict=True)
    )
