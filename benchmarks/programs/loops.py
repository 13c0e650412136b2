"""The whole loop over tokens of the decoder that serves single prompts."""

import functools
import re
from collections.abc import Iterator

from calm_beam.decoding import early_exit
from calm_beam.exits.rule import ExitRule
from calm_beam.model import ModelConfig, architecture_of, network_of, parameter_shapes
from calm_beam.model.heads import has_own_exits, kernel_layers
from calm_beam.precision import Precision

from .placement import Placement
from .program import Program

_STEPS, _SOURCE = 32, 64


def served(
    config: ModelConfig,
    precision: Precision,
    placement: Placement,
    *,
    rule: ExitRule,
    certain_exit: int | None = None,
    rows: int = 1,
    source: int = _SOURCE,
    steps: int = _STEPS,
) -> Program:
    """Returns the loop that serves single prompts.

    Args:
      config: Of the model.
      precision: In which it computes.
      placement: Where.
      rule: How exits are decided.
      certain_exit: The layer at which every token leaves; None if that depends on the token.
      rows: Prompts.
      source: Tokens of each.
      steps: Most tokens of an output.
    """
    layers = [certain_exit] if certain_exit else rule.exit_layers(config.num_decoder_layers)
    said = [f"exit at layer {certain_exit}" if certain_exit else rule.confidence]
    said += [rule.state_propagation] if rule.state_propagation != "from_exit" else []
    said += [f"exits at every {rule.exit_interval} layers"] if rule.exit_interval > 1 else []
    # With separate heads, exited rows run another head, in one more conditional.
    asks_head = rule.measure().needs.asks_head
    is_plain = asks_head or not has_own_exits(config)
    return Program(
        name=f"served loop, {rows} x {source}, {', '.join(said)}",
        placement=placement,
        function=early_exit._decode,
        arguments=(
            network_of(config, precision=precision),
            rule,
            certain_exit,
            {"params": placement.tree(precision)},
            # Certified heads are native code's, for CPUs.
            [None for _ in kernel_layers(config)],
            placement.array(steps, dtype="float32"),
            early_exit.PaddedPrompts(placement.array(rows, source), placement.array(rows), placement.array(rows)),
        ),
        conditionals=len(layers) - 1 if is_plain else None,
        sums=_sums(config, heads=len(layers) if asks_head else 1, depth=certain_exit) if is_plain else None,
    )


def _sums(config: ModelConfig, *, heads: int, depth: int | None) -> int:
    """Returns how often devices exchange numbers in the program: as written, not as often as the loop goes round.

    One for the embedding of prompts and one for that of a token; two for an encoder layer, or for a prompt's way
    through a decoder layer; three for a decoder layer with an encoder, two for one without; one for every head, and
    one at the end where none is asked before.
    """
    layers = depth or config.num_decoder_layers
    if architecture_of(config).encoder_width(config):
        encoder = [name for name in parameter_shapes(config) if re.fullmatch(r"encoder/layers_\d+/mlp/wo/kernel", name)]
        return 2 + 2 * len(encoder) + 3 * layers + heads
    # A prompt goes through the layers that may run, and of the last of these, keys and values alone are wanted.
    return 2 + 2 * (layers - 1) + 2 * layers + heads


def loops(config: ModelConfig, precision: Precision, placement: Placement) -> Iterator[Program]:
    """Yields the loops that serve, by kinds of what they ask."""
    of = functools.partial(served, config, precision, placement)
    yield of(rule=ExitRule())
    yield of(rule=ExitRule(confidence="state"))
    yield of(rule=ExitRule(confidence="classifier", state_propagation="from_first_exit"))
    yield of(rule=ExitRule(confidence="patience", patience=2, state_propagation="projected"), rows=2)
    yield of(rule=ExitRule(confidence="static"), certain_exit=2)
