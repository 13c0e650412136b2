"""Every check of compiled programs fails on a copy that is broken on purpose."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.programs import LARGE_MODELS, MODELS, Placement, Program, programs
from benchmarks.programs.loops import served
from calm_beam.decoding.xla import steps as device_steps
from calm_beam.decoding.xla import tiles
from calm_beam.evaluation.device_forecast import StepParts
from calm_beam.exits.decision import decide
from calm_beam.exits.measures import MEASURES
from calm_beam.exits.rule import ExitRule
from calm_beam.model import partitioning
from calm_beam.model.t5 import network
from calm_beam.precision import FLOAT32, Precision
from tools.accelerators import described
from tools.accelerators.checks import faults
from tools.accelerators.compiled import compiled

pytestmark = [pytest.mark.compilers, pytest.mark.timeout(600)]

_BFLOAT16 = Precision(dtype="bfloat16")
# No broken copy needs more.
_CONFIG: Any = dataclasses.replace(MODELS["T5"], num_decoder_layers=2)  # type: ignore[type-var]


def _program(name: str, *, precision: Precision = _BFLOAT16, device: str = "v5e", count: int = 1) -> Program:
    every = programs(_CONFIG, precision, devices=described.devices(device, count))
    return next(program for program in every if program.name == name)


def _served(confidence: str = "state", *, device: str = "v5e", count: int = 1) -> Program:
    placement = Placement(described.devices(device, count), _CONFIG)
    return served(_CONFIG, _BFLOAT16, placement, rule=ExitRule(confidence=confidence), source=32, steps=8)


def _found(program: Program, *, precision: Precision = _BFLOAT16, device: str = "v5e") -> list[str]:
    made = compiled(program, platform=described.platform_of(device), with_assembly=True)
    return faults(made, precision)


def test_a_buffer_that_is_copied_is_noticed() -> None:
    """A copied buffer is noticed: embeddings are put into states that are not donated."""
    program = _program("embeddings")
    assert _found(program) == []
    copying = jax.jit(vars(device_steps.embed)["__wrapped__"], static_argnums=0)
    (fault,) = _found(dataclasses.replace(program, function=copying))
    assert fault == f"buffers are copied: {program.donated_bytes:,} bytes are given away, and 0 written in place"


@pytest.mark.parametrize("name", ["decoder layer, state", "propagation of states"])
def test_rows_that_are_computed_in_another_way_beside_others_are_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that depend on their batch are noticed: on a GPU, reads from buffers are compiled with the products."""

    def found() -> list[str]:
        program = _program(name, device="H100")
        assert program.smallest
        made, smallest = (compiled(each, platform="gpu") for each in (program, program.smallest))
        return faults(made, _BFLOAT16, smallest=smallest)

    assert found() == []
    for module in (tiles, device_steps):
        monkeypatch.setattr(module, "apart", lambda values: values)
    assert found()[0].startswith("a row is computed differently in a batch: ")


@pytest.mark.parametrize("device", ["v5e", "H100"])
def test_products_that_are_rounded_are_noticed(device: str) -> None:
    """Rounded products are noticed: by default a float32 decoder layer uses bfloat16 on TPUs and TF32 on GPUs."""
    name = "decoder layer, state"
    default = Precision(matmul_precision="default")
    assert _found(_program(name, precision=FLOAT32, device=device), precision=FLOAT32, device=device) == []
    found = _found(_program(name, precision=default, device=device), precision=FLOAT32, device=device)
    assert any("products of float32 numbers may be rounded" in fault for fault in found)


def test_layers_that_are_not_passed_by_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are not skipped are noticed: the served loop computes both branches and selects one."""

    def both(is_first: jax.Array, first: Callable[..., Any], second: Callable[..., Any], *given: Any) -> Any:
        return jax.tree.map(lambda one, other: jnp.where(is_first, one, other), first(*given), second(*given))

    assert _found(_served()) == []
    monkeypatch.setattr(jax.lax, "cond", both)
    assert _found(_served()) == ["conditionals: expected 1, found 0"]


def test_statistics_that_are_exchanged_one_by_one_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics exchanged one by one are noticed: five arrays are gathered instead of one."""

    def one_by_one(made: Any) -> Any:
        return jax.tree.map(lambda values: jax.lax.all_gather(values, partitioning.PARTS), made)

    name = "decisions, softmax"
    assert _found(_program(name, count=4)) == []
    monkeypatch.setattr(partitioning, "_gathered", one_by_one)
    assert _found(_program(name, count=4))[0].startswith("exchanges between devices: expected 1, found ")


def test_a_table_that_is_brought_to_every_device_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table sent to every device is noticed: the served loop on four GPUs with XLA's default embedding look-up."""
    assert _found(_served(device="H100", count=4), device="H100") == []
    monkeypatch.setattr(network, "looked_up", functools.partial(jnp.take, axis=0))
    assert _found(_served(device="H100", count=4), device="H100") == [
        "brought whole to every device: arrays of [2560,512]"
    ]


def test_the_compilers_bytes_of_a_head_are_those_of_the_forecast() -> None:
    """Deciding on one row reads as many bytes as `device_forecast` counts for one head call, within a twentieth."""
    config = LARGE_MODELS["T5-large"]
    placement = Placement(described.devices("v5e", 1), config)
    run = functools.partial(decide, vocab_axis=1, measure=MEASURES["softmax"], precision=_BFLOAT16)
    states, weights = (
        placement.array(*shape, dtype="bfloat16")
        for shape in ((1, config.emb_dim), (config.emb_dim, config.vocab_size))
    )
    program = Program(name="head", placement=placement, function=jax.jit(run), arguments=(states, weights))
    made = compiled(program, platform="tpu")
    head = StepParts.of(config, _BFLOAT16, positions=1).head
    assert made.cost["bytes accessed"] == pytest.approx(head.bytes, rel=0.05)


@pytest.mark.parametrize("rows", [16, 256])
def test_logits_stay_on_the_chip(rows: int) -> None:
    """A TPU keeps no logits in its memory, for few rows or many; a GPU keeps at most 32 MiB at a time."""
    config = LARGE_MODELS["Llama 3.2 1B"]
    run = functools.partial(decide, vocab_axis=0, measure=MEASURES["softmax"], precision=_BFLOAT16)
    for device, most in (("v5e", 1 << 20), ("H100", 34 << 20)):
        placement = Placement(described.devices(device, 1), config)
        states, weights = (
            placement.array(*shape, dtype="bfloat16")
            for shape in ((rows, config.emb_dim), (config.vocab_size, config.emb_dim))
        )
        program = Program(name="head", placement=placement, function=jax.jit(run), arguments=(states, weights))
        assert compiled(program, platform=described.platform_of(device)).memory.temp_size_in_bytes < most
