"""What learns from outputs that are given, or judges by them: training, the exit classifier, suitability."""

from collections.abc import Iterator
from typing import Any

import jax

from calm_beam.evaluation import sensitivity, suitability
from calm_beam.model import ModelConfig, network_of
from calm_beam.model.interface import Taught
from calm_beam.precision import FLOAT32, Precision
from calm_beam.training import step, train_classifier, validation
from calm_beam.training.config import AdafactorConfig, MuonConfig, OptimizerConfig
from calm_beam.training.step import make_optimizer

from .placement import Placement
from .program import Program

_BATCH, _SOURCE, _TARGET, _STEPS = 8, 64, 32, 100


def learning(config: ModelConfig, precision: Precision, placement: Placement) -> Iterator[Program]:
    """Yields a training step and its optimisers, and what validation, the classifier and suitability compute."""
    model = network_of(config, precision=precision)
    batch = Taught(
        placement.array(_BATCH, _SOURCE + _TARGET),
        placement.array(_BATCH),
        placement.array(_BATCH, _TARGET),
        placement.array(_BATCH),
    )
    # Learned from are float32 weights, whatever the model computes in.
    learned = placement.parameters(FLOAT32)
    depth = config.num_decoder_layers
    yield Program(
        name=f"loss and gradients, {_BATCH} x {_TARGET}",
        placement=placement,
        function=step.loss_and_gradients,
        arguments=(model, learned),
        options={
            "batch": batch,
            "layers": placement.array(depth),
            "weights": placement.array(depth, dtype="float32"),
            "key": placement.array(dtype=jax.random.key(0).dtype),
            "label_smoothing": 0.1,
            "z_loss": 1e-4,
        },
    )
    for optimizer in (MuonConfig(), AdafactorConfig()):
        yield from _updates(optimizer, learned, placement)
    yield Program(
        name="validation",
        placement=placement,
        function=validation._cross_entropy_sums,
        arguments=(model, learned, batch),
    )
    held = placement.parameters(precision)
    yield Program(
        name="states and labels of the classifier",
        placement=placement,
        function=train_classifier._teacher_forced,
        arguments=(model, held, batch),
    )
    classifier = {name: array for name, array in held.items() if "/meta_cls/" in name}
    states = placement.array(depth - 1, _BATCH, _TARGET, config.emb_dim, dtype="float32")
    yield Program(
        name="scores of the classifier",
        placement=placement,
        function=train_classifier._exit_scores,
        arguments=(model, classifier, states),
    )
    if placement.parts == 1:
        yield Program(
            name="suitability",
            placement=placement,
            function=suitability._of_layers,
            arguments=(model, {"params": placement.tree(precision)}, batch),
        )
        yield Program(
            name="tokens that replace others",
            placement=placement,
            function=sensitivity._predicted,
            arguments=(model, 2, {"params": placement.tree(precision)}, batch),
        )


def _updates(optimizer: OptimizerConfig, learned: dict[str, Any], placement: Placement) -> Iterator[Program]:
    name = type(optimizer).__name__.removesuffix("Config")
    shapes = jax.eval_shape(make_optimizer(optimizer, steps=_STEPS).init, learned)
    state = jax.tree.map(lambda each: placement.spread(*each.shape, dtype=each.dtype), shapes)
    yield Program(
        name=f"{name}, beginning",
        placement=placement,
        function=step.initial_optimizer_state,
        arguments=(optimizer, _STEPS),
        options={"parameters": learned},
    )
    yield Program(name=f"{name}, state read", placement=placement, function=step.spread_state, arguments=(state,))
    yield Program(
        name=f"{name}, update",
        placement=placement,
        function=step.update,
        arguments=(optimizer, _STEPS),
        options={"division": placement.division, "parameters": learned, "state": state, "gradients": learned},
        donated=("parameters", "state"),
    )
