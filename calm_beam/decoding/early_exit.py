"""Decoding of single prompts at one threshold, in a loop on the device: a layer that no row needs is not run.

The outputs are those of the sweep's branch at that threshold, with less computation: a step runs the layers only up to
the exit of its least confident row, and from there fills the KV cache of the layers above. Each row exits at its own
layer; a row that has exited keeps its state while others go on.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.checkpoints import Checkpoint
from calm_beam.exits.certified_head import CertifiedHead, certify, heads_of_form
from calm_beam.exits.decision import decide_by_logits
from calm_beam.exits.measures import Need
from calm_beam.exits.propagations import PassedOn
from calm_beam.exits.rule import ExitRule
from calm_beam.model import architecture_of, network_of
from calm_beam.model.heads import has_own_exits, kernel_layers
from calm_beam.model.interface import EarlyExitModel, KeysValues, Numbers, Position, of_layer
from calm_beam.model.numerics import widened
from calm_beam.model.partitioning import divided
from calm_beam.precision import FLOAT32, Precision

from .branches import Branch, BranchResult, EndsOutput, is_end
from .compilation import compiled, members_by_width
from .device_groups import device_groups, placed
from .engine_choice import Machine, chosen_engine
from .settings import check_decodable


class EarlyExitDecoder:
    """Decodes prompts at one threshold, skipping the layers above the exit.

    Compiles once for every padded width; decoders of the same model and rule share the compiled code at any
    thresholds. A decoder does not change after construction, so threads may share it.

    Attributes:
      engine: The engine that computes: XLA, with a native head where `engine` allows it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        branch: Branch,
        *,
        max_input_length: int = 512,
        batch_size: int = 1,
        exit_head: str = "exact",
        engine: str = "auto",
        precision: Precision = FLOAT32,
        model_parallelism: int = 1,
        ends_output: EndsOutput | None = None,
    ) -> None:
        """Prepares a decoder.

        Args:
          checkpoint: The model.
          branch: How exits are decided, and at which threshold of every step.
          max_input_length: Most tokens of a prompt.
          batch_size: Prompts decoded together, meant for 1 to 8: a layer runs as long as one of them needs it.
          exit_head: Form of the head that decides, one of `EXIT_HEADS`. Tokens and exit layers depend on it only at
            near ties.
          engine: One of `engine_choice.ENGINE_CHOICES`. XLA always runs the layers; with `xla`, it runs the head too.
          precision: Precision in which the model computes.
          model_parallelism: Devices that share the model, the first of this process.
          ends_output: What ends an output besides end tokens, such as stop strings; None for nothing. The device does
            not know it: it decodes to the end, and the rest is cut.

        Raises:
          ValueError: If the rule needs the full model at every token or does not fit the model (no exit classifier,
            `min_exit_layer` too high), a number is below 1, or the devices cannot share the model.
        """
        rule = branch.rule
        rule.check_served()
        check_decodable(
            checkpoint.config,
            [rule],
            max_decode_length=len(branch.thresholds),
            max_input_length=max_input_length,
            batch_size=batch_size,
        )
        self._branch = branch
        self._certain_exit = _certain_exit(branch, checkpoint.config.num_decoder_layers)
        self._group, *_ = device_groups(checkpoint.config, model_parallelism=model_parallelism)
        self.engine = chosen_engine(
            engine,
            exit_head,
            config=checkpoint.config,
            rule=rule,
            precision=precision,
            machine=Machine.of(self._group.devices[0]),
            model_parallelism=self._group.division.parts,
            in_loop=True,
        )
        self._parameters = {"params": placed(checkpoint, self._group, precision).parameters(precision)}
        self._model = network_of(checkpoint.config, precision=precision)
        self._max_input_length = max_input_length
        self._rows = batch_size
        self._ends_output = ends_output
        with self._group.running():
            self._heads = heads_of_form(
                self.engine.head,
                [
                    self._model.apply(self._parameters, layer, method="head_weights")
                    for layer in kernel_layers(checkpoint.config)
                ],
            )

    def at(self, branch: Branch) -> Self:
        """Returns a decoder with the same weights and head for another branch of the same rule and length."""
        assert (branch.rule, len(branch.thresholds)) == (self._branch.rule, len(self._branch.thresholds))
        other = copy.copy(self)
        other._branch, other._certain_exit = branch, _certain_exit(branch, self._model.config.num_decoder_layers)
        return other

    def decode(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, BranchResult]]:
        """Yields the output of every prompt with its index, narrower widths first, else in the order given.

        Args:
          prompts: Token ids of each prompt, 1 to `max_input_length` of them.

        Raises:
          ValueError: If a prompt is empty or too long.
        """
        architecture = architecture_of(self._model.config)
        for width, members in members_by_width(prompts, self._max_input_length).items():
            for start in range(0, len(members), self._rows):
                together = members[start : start + self._rows]
                source_tokens = np.zeros((self._rows, width), np.int32)
                lengths, first = np.zeros(self._rows, np.int32), np.zeros(self._rows, np.int32)
                for row, index in enumerate(together):
                    source_tokens[row, : len(prompts[index])] = prompts[index]
                    lengths[row] = len(prompts[index])
                    first[row] = architecture.first_input(self._model.config, prompts[index])
                with self._group.running():
                    host = jax.device_get(
                        _decode(
                            self._model,
                            self._branch.rule,
                            self._certain_exit,
                            self._parameters,
                            self._heads,
                            self._branch.thresholds,
                            PaddedPrompts(source_tokens, lengths, first),
                        )
                    )
                for row, index in enumerate(together):
                    result = _result(host, row)
                    yield index, result if self._ends_output is None else result.ended_by(self._ends_output)


class PaddedPrompts(NamedTuple):
    """Prompts that are decoded together.

    Attributes:
      tokens: shape (rows, width), 0-padded.
      lengths: shape (rows,). Tokens of each prompt; rows with 0 tokens get no output.
      first: shape (rows,). The decoder's first inputs.
    """

    tokens: jax.Array | np.ndarray
    lengths: jax.Array | np.ndarray
    first: jax.Array | np.ndarray


class _NewToken(NamedTuple):
    """The results of a step, each of shape (rows, 1)."""

    token: jax.Array
    exit_layer: jax.Array
    confidence: jax.Array
    is_finite: jax.Array


class _Rows(NamedTuple):
    """The rows of a step between two layers.

    Attributes:
      hidden: shape (rows, 1, width). Current state of each row; the state at its exit once it has exited.
      is_open: shape (rows, 1). Whether the row goes on.
      exit_layer: shape (rows, 1).
      confidence: shape (rows, 1). Confidence at the highest layer so far at which the row was tested.
      token: int32, shape (rows, 1). Prediction at that layer, with a measure that asks the head; else None.
      is_finite: shape (rows, 1). Whether the head's results there are finite; else None.
      first: shape of `hidden`. State at the first exit layer, if skipped layers are filled from it; None below it.
      earlier: int32, shape (rows, 1, patience - 1). Predictions at the exit layers below, the nearest first, with a
        measure that compares them; else None.
      copied: Keys and values, each (rows, 1, heads, head_dim), of the highest layer that ran for the row, if skipped
        layers copy them; else None.
    """

    hidden: jax.Array
    is_open: jax.Array
    exit_layer: jax.Array
    confidence: jax.Array
    token: jax.Array | None = None
    is_finite: jax.Array | None = None
    first: jax.Array | None = None
    earlier: jax.Array | None = None
    copied: KeysValues | None = None

    def for_open(self, new: Any, old: Any) -> Any:
        """Returns the new arrays, (rows, 1, ...), for open rows, and the old ones for rows that have exited."""
        # Layers only run while some row is open: a single row is therefore open.
        if old is None or self.is_open.size == 1:
            return new
        return jax.tree.map(lambda n, o: jnp.where(self.is_open.reshape(-1, *(1,) * (n.ndim - 1)), n, o), new, old)

    def replaced(self, **changes: Any) -> "_Rows":
        """Returns the rows with some fields changed where they are open."""
        return self._replace(**{name: self.for_open(new, getattr(self, name)) for name, new in changes.items()})


def _certain_exit(branch: Branch, num_layers: int) -> int | None:
    """Returns the layer at which every token exits, if that is known in advance; else None."""
    if np.isposinf(branch.thresholds).all():
        return num_layers
    measure = branch.rule.measure()
    if measure.needs is not Need.LAYER:
        return None
    # Such a measure takes no schedule, so all steps have the threshold of the first.
    threshold, exit_layers = branch.thresholds[0], branch.rule.exit_layers(num_layers)
    reached = (layer for layer in exit_layers if np.float32(measure.confidence(layer, num_layers)) >= threshold)
    return next(reached, num_layers)


def _result(host: dict[str, np.ndarray], row: int) -> BranchResult:
    exit_layers = host["exit_layers"][row].copy()
    return BranchResult(
        tokens=host["tokens"][row].copy(),
        exit_layers=exit_layers,
        confidences=host["confidences"][row].copy(),
        length=int((exit_layers > 0).sum()),
        is_finite=bool(host["is_finite"][row, 0]),
    )


@functools.partial(compiled, static_argnums=(0, 1, 2))
def _decode(
    model: EarlyExitModel,
    rule: ExitRule,
    certain_exit: int | None,
    parameters: Any,
    heads: Sequence[CertifiedHead | None],
    thresholds: jax.Array,
    prompts: PaddedPrompts,
) -> dict[str, jax.Array]:
    """Returns the outputs of the prompts: arrays of shape (rows, steps), and `is_finite` of shape (rows, 1).

    Args:
      model: The network.
      rule: How exits are decided.
      certain_exit: The layer at which every token exits; None if that depends on the token.
      parameters: Weights.
      heads: Certified heads, one for each layer or one for all; None where exact heads decide.
      thresholds: shape (steps,).
      prompts: The prompts.
    """
    source_tokens, lengths, first = prompts
    rows, steps = source_tokens.shape[0], thresholds.shape[0]
    config = model.config
    apply = functools.partial(model.apply, parameters)
    source, source_mask = apply(source_tokens, lengths, method="prefill")
    position_biases = apply(steps, method="decoder_position_biases")
    # Layers above a certain exit are never run, and their KV cache is never read.
    depth = certain_exit or config.num_decoder_layers
    shape = rows, 1, config.num_kv_heads, steps, config.head_dim
    empty = divided(jnp.zeros(shape, model.precision.dtype), 2, of=config.num_kv_heads)

    def goes_on(state: dict[str, Any]) -> jax.Array:
        is_running: jax.Array = (state["step"] < steps) & ~jnp.all(state["finished"])
        return is_running

    def generate_token(state: dict[str, Any]) -> dict[str, Any]:
        step, finished = state["step"], state["finished"]
        position = Position(step, lengths)
        # [heads, positions] -> [1, 1, heads, 1, positions]
        self_biases = [
            jax.lax.dynamic_index_in_dim(bias, step, 1, keepdims=False)[None, None, :, None] for bias in position_biases
        ]
        way = _Step(
            rule=rule,
            num_layers=config.num_decoder_layers,
            logits_cap=architecture_of(config).logits_cap(config),
            precision=model.precision,
            certain_exit=certain_exit,
            apply=apply,
            heads=heads,
            predicts_at_exit=has_own_exits(config) and not rule.measure().needs.asks_head,
            source=source,
            source_biases=apply(source_mask, position, method="source_biases"),
            cache=state["cache"],
            position=position,
            self_biases=self_biases,
            threshold=thresholds[step],
        )
        beginning = _Rows(
            hidden=apply(state["previous"], method="embed"),
            is_open=~finished,
            exit_layer=jnp.zeros(finished.shape, jnp.int32),
            confidence=jnp.zeros(finished.shape),
        )
        new_token, kept = way.climb(beginning)

        def written(values: jax.Array, new: jax.Array) -> jax.Array:
            new = jnp.where(finished, jnp.zeros_like(new), new)
            return jax.lax.dynamic_update_slice(values, new, (0, step))

        return {
            "step": step + 1,
            "previous": new_token.token,
            "finished": finished | is_end(new_token.token, config.end_ids),
            "cache": [_put(pair, new, step) for pair, new in zip(state["cache"], kept, strict=True)],
            "tokens": written(state["tokens"], new_token.token),
            "exit_layers": written(state["exit_layers"], new_token.exit_layer),
            "confidences": written(state["confidences"], new_token.confidence),
            "is_finite": state["is_finite"] & (new_token.is_finite | finished),
        }

    end = jax.lax.while_loop(
        goes_on,
        generate_token,
        {
            "step": jnp.int32(0),
            "previous": first[:, None],
            "finished": (lengths == 0)[:, None],
            "cache": [(empty, empty)] * depth,
            "tokens": jnp.zeros((rows, steps), jnp.int32),
            "exit_layers": jnp.zeros((rows, steps), jnp.int32),
            "confidences": jnp.zeros((rows, steps)),
            "is_finite": jnp.ones((rows, 1), bool),
        },
    )
    return {name: end[name] for name in ("tokens", "exit_layers", "confidences", "is_finite")}


def _by_head(keys_values: KeysValues) -> KeysValues:
    """Returns keys and values, each (rows, 1, heads, head_dim), divided among devices by head."""
    return tuple(divided(values, 2, of=values.shape[2]) for values in keys_values)


def _put(cached: KeysValues, new: KeysValues, step: Numbers) -> KeysValues:
    """Returns a layer's cache, (rows, 1, heads, positions, head_dim), with the keys and values of a step written."""
    return tuple(
        divided(jax.lax.dynamic_update_slice(old, values[:, :, :, None], (0, 0, 0, step, 0)), 2, of=old.shape[2])
        for old, values in zip(cached, new, strict=True)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Step:
    """One step: the layers, exits and KV cache of one token of every row.

    Attributes:
      rule: How exits are decided.
      num_layers: Decoder depth L.
      precision: The model's precision.
      logits_cap: The model's cap on logits, as `decide_by_logits` takes it.
      certain_exit: The layer at which every token exits; None if that depends on the token.
      apply: Calls a method of the model.
      heads: Certified heads, one for each layer or one for all; None where exact heads decide.
      predicts_at_exit: Whether each row's token comes from the head of its exit layer as it exits, instead of from one
        call for all rows at the end.
      source: Every layer's keys and values of the source.
      source_biases: Each of shape (rows, 1, 1, source); one for every layer, or one for all.
      cache: KV cache of the earlier tokens, of the layers that may run.
      position: Number of this token, from 0, and lengths of the prompts.
      self_biases: Each of shape (1, 1, heads, 1, positions); one for every layer, or one for all.
      threshold: Exit threshold of this step.
    """

    rule: ExitRule
    num_layers: int
    precision: Precision
    logits_cap: float | None
    certain_exit: int | None
    apply: Callable[..., Any]
    heads: Sequence[CertifiedHead | None]
    predicts_at_exit: bool
    source: list[KeysValues]
    source_biases: list[jax.Array]
    cache: list[KeysValues]
    position: Position
    self_biases: list[jax.Array]
    threshold: jax.Array

    @property
    def _passed_on(self) -> PassedOn:
        return self.rule.propagation().passed_on

    def climb(self, rows: _Rows) -> tuple[_NewToken, list[KeysValues]]:
        """Returns the new tokens, and their keys and values of each layer that may run.

        The layers between two exits run inside a conditional, whose other branch fills their cache instead: each is
        compiled once. The conditional has small results only: caches are written outside, so that they need not be
        copied through it.
        """
        exits = self.rule.exit_layers(self.num_layers) if self.certain_exit is None else [self.certain_exit]
        kept: list[KeysValues] = []
        for exit_layer in exits:
            layers = range(len(kept) + 1, exit_layer + 1)
            run = functools.partial(self._run, layers, is_first=not kept, is_last=exit_layer == exits[-1])
            if kept:
                rows, made = jax.lax.cond(jnp.any(rows.is_open), run, functools.partial(self._pass_by, layers), rows)
            else:
                rows, made = run(rows)
            # Without this, devices would exchange keys and values until each has them whole.
            kept += map(_by_head, made)
            if self._passed_on is PassedOn.KEYS_VALUES:
                # Rows that had exited before get their own copy again. It is taken here, not as a result of the
                # conditional, which devices would exchange.
                rows = rows._replace(copied=kept[-1])
        return self._new_token(exits[-1], rows), kept

    def _run(self, layers: range, rows: _Rows, *, is_first: bool, is_last: bool) -> tuple[_Rows, list[KeysValues]]:
        """Returns the rows after some layers, with exits at the last of them, and the layers' keys and values.

        Args:
          layers: The layers after one exit, up to the next.
          rows: Rows of which at least one is open.
          is_first: Whether this is the first exit.
          is_last: Whether all open rows exit here.
        """
        kept = []
        for layer in layers:
            kept.append(own := self._keys_values(layer, rows))
            output = self.apply(
                rows.hidden,
                layer,
                self_keys_values=_put(self.cache[layer - 1], own, self.position.steps),
                self_bias=of_layer(self.self_biases, layer),
                source_keys_values=self.source[layer - 1],
                source_bias=of_layer(self.source_biases, layer),
                position=self.position,
                method="decoder_layer",
            )
            below, rows = rows.hidden, rows.replaced(hidden=output)
        rows = self._with_confidence(layer, rows, below)
        leaves = rows.is_open if is_last else rows.is_open & (rows.confidence >= self.threshold)
        if self.predicts_at_exit:
            rows = self._with_tokens(layer, rows, leaves=leaves)
        if is_first and self._passed_on is PassedOn.FIRST_STATE:
            rows = rows._replace(first=rows.hidden)
        return rows._replace(is_open=rows.is_open & ~leaves, copied=None), kept

    def _pass_by(self, layers: range, rows: _Rows) -> tuple[_Rows, list[KeysValues]]:
        """Returns the rows, which have all exited, and the keys and values that fill the layers they skip."""
        if self._passed_on is PassedOn.KEYS_VALUES:
            assert rows.copied is not None
            return rows._replace(copied=None), [rows.copied for _ in layers]
        states = rows.hidden if rows.first is None else rows.first
        return rows, [self._project(states, layer) for layer in layers]

    def _keys_values(self, layer: int, rows: _Rows) -> KeysValues:
        """Returns keys and values for a layer that is run: its own for open rows, propagated ones for exited rows."""
        if self._passed_on is PassedOn.FIRST_STATE and rows.first is not None:
            return self._project(rows.for_open(rows.hidden, rows.first), layer)
        # With from_exit, the state of an exited row is that of its exit layer.
        own = self._project(rows.hidden, layer)
        if self._passed_on is PassedOn.KEYS_VALUES and rows.copied is not None:
            return tuple(rows.for_open(mine, copied) for mine, copied in zip(own, rows.copied, strict=True))
        return own

    def _project(self, states: jax.Array, layer: int) -> KeysValues:
        keys_values: KeysValues = self.apply(states, layer, position=self.position, method="self_keys_values")
        return keys_values

    def _with_confidence(self, layer: int, rows: _Rows, below: jax.Array) -> _Rows:
        """Returns the rows with the confidence of the open ones at this layer."""
        measure = self.rule.measure()
        shape = rows.is_open.shape
        match measure.needs:
            case Need.LAYER:
                confidence = jnp.full(shape, measure.confidence(layer, self.num_layers), jnp.float32)
            case Need.STATES:
                confidence = measure.confidence(widened(rows.hidden), widened(below), layer)
            case Need.CLASSIFIER:
                confidence = measure.confidence(self.apply(rows.hidden, method="exit_score"))
            case Need.LOGITS:
                # At the last layer, or a certain exit, no threshold decides.
                is_compared = self.certain_exit is None and layer < self.num_layers
                token, confidence, is_finite = self._ask_head(layer, rows, self.threshold if is_compared else None)
                rows = rows.replaced(token=token, is_finite=is_finite)
            case Need.TOKENS:
                token, _, is_finite = self._ask_head(layer, rows)
                earlier = rows.earlier
                if earlier is None:
                    earlier = jnp.full((*shape, (self.rule.patience or 1) - 1), -1, jnp.int32)
                confidence = measure.confidence(token, earlier)
                # Not `replaced`: predictions of exited rows are never read.
                rows = rows.replaced(token=token, is_finite=is_finite)._replace(
                    earlier=jnp.concatenate([token[..., None], earlier], axis=-1)[..., : earlier.shape[-1]]
                )
            case _:
                raise AssertionError(f"{measure.needs} is refused at construction")
        return rows.replaced(confidence=confidence, exit_layer=jnp.full(shape, layer, jnp.int32))

    def _ask_head(
        self, layer: int, rows: _Rows, threshold: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the token that a layer's head predicts, its confidence and whether both are finite, each (rows, 1).

        Args:
          layer: The layer whose head is asked.
          rows: Rows, of which the open ones are asked.
          threshold: The confidence must be certain enough to compare with it; None if no threshold decides.
        """
        measure = self.rule.measure()
        inputs = self.apply(rows.hidden[:, 0], layer, method="head_inputs")
        weights, vocab_axis = self.apply(layer, method="head_weights")
        head = of_layer(self.heads, layer)
        exact = functools.partial(
            decide_by_logits,
            inputs,
            weights,
            vocab_axis=vocab_axis,
            measure=measure,
            precision=self.precision,
            cap=self.logits_cap,
        )
        if head is None:
            token, confidence, is_finite = exact()
            return token[:, None], confidence[:, None], is_finite[:, None]
        found = certify(inputs, head, measure=measure)
        is_open = ~found.is_certain
        if threshold is not None:
            is_open |= (found.low < threshold) & (threshold <= found.high)
        certified = found.token, found.low / 2 + found.high / 2, jnp.ones_like(is_open)
        token, confidence, is_finite = jax.lax.cond(
            jnp.any(is_open & rows.is_open[:, 0]),
            lambda: tuple(jnp.where(is_open, *pair) for pair in zip(exact(), certified, strict=True)),
            lambda: certified,
        )
        return token[:, None], confidence[:, None], is_finite[:, None]

    def _with_tokens(self, layer: int, rows: _Rows, *, leaves: jax.Array) -> _Rows:
        """Returns the rows, with the token that this layer's head predicts for those that exit here, (rows, 1)."""
        nothing = jnp.zeros(leaves.shape, jnp.int32), jnp.ones(leaves.shape, bool)
        known = nothing if rows.token is None or rows.is_finite is None else (rows.token, rows.is_finite)

        def predicted() -> tuple[jax.Array, ...]:
            token, _, is_finite = self._ask_head(layer, rows._replace(is_open=leaves))
            return tuple(jnp.where(leaves, *pair) for pair in zip((token, is_finite), known, strict=True))

        token, is_finite = jax.lax.cond(jnp.any(leaves), predicted, lambda: known)
        return rows._replace(token=token, is_finite=is_finite)

    def _new_token(self, layer: int, rows: _Rows) -> _NewToken:
        """Returns the results of the step once all rows have exited, given the highest layer that may run."""
        token, is_finite = rows.token, rows.is_finite
        if token is None or is_finite is None:
            # Ask for all rows, though they have exited: here, all layers share one head.
            token, _, is_finite = self._ask_head(layer, rows._replace(is_open=jnp.ones_like(rows.is_open)))
        return _NewToken(
            token=token,
            exit_layer=rows.exit_layer,
            confidence=rows.confidence,
            is_finite=is_finite & jnp.isfinite(rows.confidence),
        )
