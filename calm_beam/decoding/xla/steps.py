"""The steps of the shared sweep that run on the device: one function each, of fixed shapes, compiled once per shape.

Rows are packed: what a step gets is as many rows as there are groups, whoever's they are, padded to the next of a few
sizes. Padding rows have numbers beyond the last: reads there give anything, writes are dropped.

States live in one buffer, (layers + 1, slots * lanes, width), of the model's type: row `lane` of entry i is the output
of layer i for the group whose first lane it is; entry 0 is the embedding. Each layer has a store of keys and one of
values, (nodes, heads of keys * head_dim), of which a row attends to what its path names.

A layer is two steps, since what is gathered for both wants rows put together differently: by the length of their paths,
and by prompt. What the first makes of a row is *pending* then, in arrays (slots * lanes, ...), row `lane` as above.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from calm_beam.decoding.compilation import compiled
from calm_beam.exits.certified_head import Certificate, certify
from calm_beam.exits.decision import decide_by_each
from calm_beam.exits.measures import Need, measure_named
from calm_beam.exits.parts import in_parts
from calm_beam.exits.quantised_head import CertifiedHead
from calm_beam.model import packed_layer_of
from calm_beam.model.interface import EarlyExitModel, KeysValues, Numbers, Pending, Position
from calm_beam.model.numerics import widened
from calm_beam.model.partitioning import divided, whole

Parameters = Any

# Positions of prompts that a host goes through at a time, if not those of one prompt: rows enough for its products,
# which those of a wide model use better than they delay a prompt that comes alone.
_TOGETHER, _TOGETHER_IF_WIDE, _WIDE = 128, 256, 512
# Most bytes of keys, and of values, that attention gathers at a time: on a host, what is read again at once stays near
# the processor; on an accelerator, few large steps are faster.
_HOST_GATHERED_BYTES, _DEVICE_GATHERED_BYTES = 1 << 20, 1 << 26


@functools.partial(compiled, static_argnums=0)
def prefill(
    model: EarlyExitModel,
    parameters: Parameters,
    *,
    source_tokens: jax.Array,
    lengths: jax.Array,
    prefix: Sequence[KeysValues] = (),
) -> tuple[list[KeysValues], jax.Array]:
    """Returns keys and values of prompts for every layer, and their mask; arguments as of `admit`."""
    return _gone_through(model, parameters, source_tokens, lengths, prefix)


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
      parameters: Of the model.
      keys_values: Of every layer, each (places, heads of keys, source, head_dim).
      source_mask: shape (places, source).
      source_tokens: shape (rows, width), no wider than source. 0-padded.
      lengths: shape (rows,). Tokens of each prompt.
      places: shape (rows,).
      prefix: Keys and values of the tokens that all prompts begin with, as `go_through` returns them, or nothing.
    """
    new, new_mask = _gone_through(model, parameters, source_tokens, lengths, prefix)
    # Zeros behind, since an earlier prompt may have left NaN there: it is masked, but 0 * NaN is NaN.
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


def _gone_through(
    model: EarlyExitModel,
    parameters: Parameters,
    source_tokens: jax.Array,
    lengths: jax.Array,
    prefix: Sequence[KeysValues],
) -> tuple[list[KeysValues], jax.Array]:
    """Returns keys and values of prompts for every layer, and their mask.

    On a host, always so many at a time as their width and the model's say: the numbers of a prompt are then the same
    to the bit whatever stands beside it. How often that is done is not known to the compiler: it makes one loop of it.

    Args:
      model: The network.
      parameters: Of the model.
      source_tokens: shape (rows, width).
      lengths: shape (rows,). 0 for padding, which comes last.
      prefix: As in `admit`.
    """
    if jax.default_backend() != "cpu":
        made: tuple[list[KeysValues], jax.Array] = model.apply(
            parameters, source_tokens, lengths, prefix, method="prefill"
        )
        return made
    count, width = source_tokens.shape
    most = _TOGETHER if model.config.emb_dim < _WIDE else _TOGETHER_IF_WIDE
    together = max(1, most // width)
    padding = -count % together
    tokens_of, lengths_of = (
        jnp.pad(values, ((0, padding), *((0, 0),) * (values.ndim - 1))).reshape(-1, together, *values.shape[1:])
        for values in (source_tokens, lengths)
    )

    def some(part: Numbers) -> Any:
        return model.apply(parameters, tokens_of[part], lengths_of[part], prefix, method="prefill")

    parts = len(tokens_of)
    nothing = jax.tree.map(lambda made: jnp.zeros((parts, *made.shape), made.dtype), jax.eval_shape(some, 0))
    found = jax.lax.fori_loop(
        0,
        -(-jnp.sum(lengths > 0) // together),
        lambda part, made: jax.tree.map(lambda old, new: old.at[part].set(new), made, some(part)),
        nothing,
    )
    keys_values, mask = jax.tree.map(lambda values: values.reshape(-1, *values.shape[2:])[:count], found)
    return keys_values, mask


@functools.partial(compiled, static_argnums=0)
def go_through(model: EarlyExitModel, parameters: Parameters, tokens: jax.Array) -> list[KeysValues]:
    """Returns every layer's keys and values of what prompts begin with, (positions,), for `admit`."""
    keys_values, _ = model.apply(parameters, tokens[None], jnp.full(1, len(tokens)), method="prefill")
    return [tuple(divided(values, 1, of=model.config.num_kv_heads) for values in pair) for pair in keys_values]


@functools.partial(compiled, static_argnums=0, donate_argnames="states")
def embed(
    model: EarlyExitModel, parameters: Parameters, *, states: jax.Array, tokens: jax.Array, lanes: jax.Array
) -> jax.Array:
    """Returns the states with the embeddings of tokens, (rows,), as the input of layer 1."""
    return whole(states.at[0, lanes].set(model.apply(parameters, tokens, method="embed"), mode="drop"))


@functools.partial(compiled, static_argnums=0, donate_argnames=("pending", "cache"))
def attend_to_output(
    model: EarlyExitModel,
    parameters: Parameters,
    *,
    states: jax.Array,
    pending: Pending,
    cache: KeysValues,
    terms: Any,
    layer: jax.Array,
    below: jax.Array,
    lanes: jax.Array,
    nodes: jax.Array,
    paths: jax.Array,
    position: Position,
) -> tuple[Pending, KeysValues]:
    """Runs the attention of one decoder layer to what was generated, for one token of every row.

    Args:
      model: The network.
      parameters: Of this layer.
      states: The buffer of states.
      pending: The buffers of what is pending.
      cache: This layer's store of keys and values.
      terms: Of this layer, one of the network's `path_terms`.
      layer: int32 scalar, from 1.
      below: shape (rows,). Where the input of each row stands in the entry below.
      lanes: shape (rows,). Where its output goes.
      nodes: shape (rows,). Where the keys and values made here go.
      paths: shape (rows, length). The nodes that it attends to, its own included.
      position: Of each row, (rows,). Its step is below `length`; nodes of later ones are masked.

    Returns:
      What is pending, with that of the rows, and the store.
    """
    hidden = states.at[layer - 1, below].get(mode="clip")
    apply = functools.partial(packed_layer_of(model).apply, {"params": parameters})
    cache = _written(model, cache, apply(hidden, position=position, method="self_keys_values"), nodes)
    made = apply(
        hidden,
        position=position,
        terms=terms,
        length=paths.shape[1],
        over_path=_Gathered(model, cache, paths=paths),
        method="attend_over_path",
    )
    return {name: whole(old.at[lanes].set(made[name], mode="drop")) for name, old in pending.items()}, cache


@functools.partial(
    compiled, static_argnums=(0, 1), static_argnames=("num_ranks", "is_gathered"), donate_argnames="states"
)
def finish_layer(
    model: EarlyExitModel,
    measures: tuple[str, ...],
    *,
    num_ranks: int,
    is_gathered: bool,
    parameters: Parameters,
    states: jax.Array,
    pending: Pending,
    keys_values: KeysValues,
    source_mask: jax.Array,
    terms: Any,
    layer: jax.Array,
    below: jax.Array,
    lanes: jax.Array,
    places: jax.Array,
    ranks: jax.Array,
    position: Position,
) -> tuple[jax.Array, list[jax.Array]]:
    """Runs the rest of a decoder layer, attention to the source and feed-forward, for one token of every row.

    The rows of a prompt are the queries of one attention over its source, which is made for all sources; unless each
    row's source is gathered.

    Args:
      model: The network.
      measures: Names of confidence measures that are made of states.
      num_ranks: Most rows of one prompt, unless sources are gathered.
      is_gathered: Whether they are, which takes any number of rows of one prompt.
      parameters: Of this layer, and of the exit classifier if that is one of the measures.
      states: The buffer of states.
      pending: The buffers of what is pending, with what `attend_to_output` made of the rows.
      keys_values: This layer's, of the sources, each (places, heads of keys, source, head_dim).
      source_mask: shape (places, source).
      terms: As in `attend_to_output`.
      layer: int32 scalar, from 1.
      below: shape (rows,). Where the layer's input stands in the entry below.
      lanes: shape (rows,). Where what is pending stands, and the output goes.
      places: shape (rows,). Where each row's source stands.
      ranks: shape (rows,). Below `num_ranks`, different for the rows of a place unless sources are gathered.
      position: Of each row, (rows,).

    Returns:
      The buffer, and float32 confidences, (rows,), by each measure.
    """
    of_rows = {name: values.at[lanes].get(mode="clip") for name, values in pending.items()}
    if is_gathered:
        keys_values = tuple(values.at[places].get(mode="clip") for values in keys_values)
        source_mask = source_mask.at[places].get(mode="clip")
        places, ranks, num_ranks = jnp.arange(len(lanes)), jnp.zeros_like(ranks), 1
    output = packed_layer_of(model).apply(
        {"params": parameters["layer"]},
        of_rows,
        keys_values,
        source_mask=source_mask,
        position=position,
        terms=terms,
        over_source=_Placed(len(source_mask), num_ranks, places=places, ranks=ranks),
        method="attend_to_source_and_feed_forward",
    )
    states = whole(states.at[layer, lanes].set(output, mode="drop"))
    confidences: list[jax.Array] = []
    for measure in map(measure_named, measures):
        if measure.needs is Need.STATES:
            # Read after the write: nothing else would make XLA read first, and it would copy the whole buffer before.
            inputs = states.at[layer - 1, below].get(mode="clip")
            confidences.append(measure.confidence(widened(output), widened(inputs), layer))
        else:
            score = model.apply(parameters["classifier"], output, method="exit_score")
            confidences.append(measure.confidence(score))
    return states, confidences


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
    layers: jax.Array,
    lanes: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns token, confidences and finiteness of what a head makes of states, given by layer and lane.

    The head is that after `head_layer`, with the parameters of whichever layer it is asked for. Confidences are of
    shape (measures, rows), the others (rows,).
    """
    inputs = _head_inputs(model, parameters, states.at[layers, lanes].get(mode="clip"), head_layer)
    weights, vocab_axis = model.apply(parameters, head_layer, method="head_weights")
    return decide_by_each(
        inputs,
        weights,
        vocab_axis=vocab_axis,
        measures=[measure_named(measure) for measure in measures],
        arithmetic=model.arithmetic,
    )


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
    layers: jax.Array,
    lanes: jax.Array,
) -> Certificate:
    """Returns what a certified head proves of states, given by layer and lane, (rows,); see `decide_rows`."""
    inputs = _head_inputs(model, parameters, states.at[layers, lanes].get(mode="clip"), head_layer)
    return certify(inputs, head, measure=measure_named(measure), is_thorough=is_thorough)


@functools.partial(compiled, static_argnums=0, donate_argnames="cache")
def fill_skipped(
    model: EarlyExitModel,
    parameters: list[Parameters],
    *,
    cache: list[KeysValues],
    states: jax.Array,
    layers: jax.Array,
    lanes: jax.Array,
    nodes: jax.Array,
    position: Position,
) -> list[KeysValues]:
    """Returns the stores with what skipped layers make of propagated states, all layers in one step.

    Args:
      model: The network.
      parameters: Of layers 2 to L.
      cache: Of layers 2 to L.
      states: The buffer of states.
      layers: shape (rows,). Entry of each propagated state.
      lanes: shape (rows,). Its place there.
      nodes: shape (layers - 1, rows). Where its keys and values go; beyond the store where the layer was not skipped.
      position: Of each row, (rows,).
    """
    layer_module = packed_layer_of(model)
    kept = states.at[layers, lanes].get(mode="clip")
    return [
        _written(
            model,
            pair,
            layer_module.apply({"params": of_layer}, kept, position=position, method="self_keys_values"),
            nodes[index],
        )
        for index, (of_layer, pair) in enumerate(zip(parameters, cache, strict=True))
    ]


@functools.partial(compiled, static_argnums=0, donate_argnames="cache")
def copy_skipped(
    model: EarlyExitModel,
    cache: list[KeysValues],
    *,
    source_layers: jax.Array,
    source_nodes: jax.Array,
    nodes: jax.Array,
) -> list[KeysValues]:
    """Returns the stores with what skipped layers copy of an exit layer's keys and values (`projected`).

    Args:
      model: The network.
      cache: Of layers 1 to L.
      source_layers: shape (rows,). Exit layer of each.
      source_nodes: shape (rows,). Its node there.
      nodes: shape (layers - 1, rows), for layers 2 to L, as in `fill_skipped`.
    """
    copied = []
    for part in range(2):
        chosen = cache[0][part][source_nodes]
        for layer, pair in enumerate(cache[1:], start=2):
            chosen = jnp.where((source_layers == layer)[:, None], pair[part][source_nodes], chosen)
        copied.append(chosen)
    above = [
        tuple(
            divided(old.at[nodes[index]].set(new, mode="drop"), 1, of=model.config.num_kv_heads)
            for old, new in zip(pair, copied, strict=True)
        )
        for index, pair in enumerate(cache[1:])
    ]
    return [cache[0], *above]


def _head_inputs(model: EarlyExitModel, parameters: Parameters, states: jax.Array, head_layer: int) -> jax.Array:
    inputs: jax.Array = model.apply(parameters, states, head_layer, method="head_inputs")
    return inputs


@dataclasses.dataclass(frozen=True)
class _Gathered:
    """The paths of rows, gathered from a layer's store."""

    model: EarlyExitModel
    store: KeysValues
    _: dataclasses.KW_ONLY
    paths: jax.Array

    def __call__(self, attend: Callable[..., Any], *by_row: Numbers) -> Any:
        def attend_some(rows: tuple[Numbers, ...]) -> Any:
            paths, *by_row = rows
            gathered = (_split_heads(self.model, values.at[paths].get(mode="clip")) for values in self.store)
            return attend(*gathered, *by_row)

        keys, _ = self.store
        size = keys.dtype.itemsize * self.paths.shape[1] * keys.shape[-1]
        return in_parts(attend_some, (self.paths, *by_row), most=max(1, _gathered_bytes() // size))


@dataclasses.dataclass(frozen=True)
class _Placed:
    """Rows as queries of one attention for all sources."""

    num_places: int
    num_ranks: int
    _: dataclasses.KW_ONLY
    places: jax.Array
    ranks: jax.Array

    def place(self, rows: jax.Array) -> jax.Array:
        spread = jnp.zeros((self.num_places, self.num_ranks, rows.shape[-1]), rows.dtype)
        return spread.at[self.places, self.ranks].set(rows, mode="drop")

    def pick(self, placed: jax.Array) -> jax.Array:
        return placed.at[self.places, self.ranks].get(mode="clip")


def _gathered_bytes() -> int:
    return _HOST_GATHERED_BYTES if jax.default_backend() == "cpu" else _DEVICE_GATHERED_BYTES


def _split_heads(model: EarlyExitModel, values: jax.Array) -> jax.Array:
    return values.reshape(*values.shape[:-1], model.config.num_kv_heads, model.config.head_dim)


def _written(model: EarlyExitModel, cache: KeysValues, new: KeysValues, nodes: jax.Array) -> KeysValues:
    """Returns a store with new keys and values, each (heads, rows, head_dim), at the node of each row."""
    return tuple(
        divided(
            old.at[nodes].set(jnp.swapaxes(values, 0, 1).reshape(len(nodes), -1), mode="drop"),
            1,
            of=model.config.num_kv_heads,
        )
        for old, values in zip(cache, new, strict=True)
    )
