"""The memory that a sweep holds, and its behaviour if that is too much."""

import dataclasses
import functools
import logging
import math
import platform
import re
import subprocess
import sys
import tracemalloc
import types
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

import jax
import numpy as np
import pytest

from calm_beam.decoding import cpu as native_sources
from calm_beam.decoding import decoder, memory
from calm_beam.decoding.branches import Branch, PromptResult, sweep_branches
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.device_groups import DeviceGroup
from calm_beam.decoding.memory import Budget, choose_budget, keep_freed_memory
from calm_beam.decoding.xla import engine as xla_sources
from calm_beam.decoding.xla import steps as device_steps
from calm_beam.errors import UsageError
from calm_beam.exits.rule import ExitRule
from calm_beam.model import parameter_shapes
from calm_beam.model.interface import EarlyExitModel
from calm_beam.model.native import library
from calm_beam.model.sharding import Division
from calm_beam.precision import FLOAT32, Precision
from tests.builders import build_checkpoint, build_config
from tests.calm_beam.decoding.decoders import LAYER_ENDS, PREFILLS, first_device
from tests.sampling import sampled

_STEPS, _THRESHOLDS = 8, (0.7, 0.4, 0.1)
_BRANCHES = sweep_branches(ExitRule(), _THRESHOLDS, max_decode_length=_STEPS)
_CHECKPOINT = build_checkpoint()


def _prompts(count: int) -> list[tuple[int, ...]]:
    generator = np.random.default_rng(5)
    return [tuple(generator.integers(2, 64, generator.integers(2, 12)).tolist()) for _ in range(count)]


def _sweep(*, slots: int, tokens: int, branches: Sequence[Branch] = _BRANCHES, max_input_length: int = 32) -> Decoder:
    return Decoder(_CHECKPOINT, branches, max_input_length=max_input_length, batch_size=slots, max_cache_tokens=tokens)


def _assert_same(found: dict[int, PromptResult], expected: dict[int, PromptResult]) -> None:
    assert found.keys() == expected.keys()
    for index, result in expected.items():
        np.testing.assert_array_equal(found[index].tokens, result.tokens)
        np.testing.assert_array_equal(found[index].exit_layers, result.exit_layers)
        np.testing.assert_allclose(found[index].confidences, result.confidences, atol=1e-5)


@pytest.fixture(scope="module")
def expected() -> dict[int, PromptResult]:
    """Outputs of twelve prompts without a memory limit."""
    return dict(_sweep(slots=12, tokens=100_000).decode(_prompts(12)))


@pytest.mark.slow
def test_prompts_give_way_where_the_budget_is_short() -> None:
    """A short budget gives the same outputs with some work repeated; one with room for a prompt decodes one by one."""
    branches = sweep_branches(ExitRule(), np.linspace(0.9, 0.05, 16).tolist(), max_decode_length=24)
    roomy = _sweep(slots=12, tokens=100_000, branches=branches)
    expected = dict(roomy.decode(_prompts(12)))
    short = _sweep(slots=12, tokens=1000, branches=branches)
    _assert_same(dict(short.decode(_prompts(12))), expected)
    assert short.work.layer_rows > roomy.work.layer_rows
    one = _sweep(slots=12, tokens=32 + 24 * len(branches), branches=branches)
    _assert_same(dict(one.decode(_prompts(12))), expected)
    assert short.work.prompts == one.work.prompts == roomy.work.prompts == 12


@pytest.mark.parametrize(
    ("tokens", "thresholds", "widths"),
    sampled(
        [
            (3000, 3, [32, 64, 128, 256]),
            # The least accepted budget: one place, of the widest.
            (256 + 4 * _STEPS, 3, [256]),
            (256 + 41 * _STEPS, 40, [256]),
            # Room for some widths: the narrowest prompts are padded further.
            (1200, 3, [128, 256]),
            # Outputs take most of it.
            (1190, 99, [128, 256]),
        ],
        keep=(0, 1, 3),
    ),
)
def test_sources_and_outputs_together_stay_within_the_budget(
    tokens: int, thresholds: int, widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions of all widths and of every layer's store never exceed the budget, and all prompts end."""
    sources: dict[int, int] = {}
    held: set[int] = set()

    def watched_sources(make: Callable[..., Any]) -> Callable[..., Any]:
        def run(*model: Any, width: int, places: int, **options: Any) -> Any:
            sources[width] = places * width
            return make(*model, width=width, places=places, **options)

        return run

    def watched(step: Callable[..., Any], store: str) -> Callable[..., Any]:
        def run(*arguments: Any, **rows: Any) -> Any:
            # Those of prompts are the sources, or only for the time of a prefill.
            held.update([] if "rows_are" in rows else [rows[store][0].shape[0]])
            return step(*arguments, **rows)

        return run

    for module, name in ((xla_sources, "Sources"), (native_sources, "SourcesOfWidth")):
        monkeypatch.setattr(module, name, watched_sources(getattr(module, name)))
    for module, name, store in ((device_steps, "run_layer", "cache"), (library, "entries_of", "store")):
        monkeypatch.setattr(module, name, watched(getattr(module, name), store))
    lengths = [5] * 30 + [40] * 15 + [100] * 7 + [200] * 3
    branches = sweep_branches(ExitRule(), np.linspace(0.9, 0.1, thresholds).tolist(), max_decode_length=_STEPS)
    sweep = _sweep(slots=55, tokens=tokens, branches=branches, max_input_length=256)
    assert len(dict(sweep.decode([[7] * length for length in lengths]))) == len(lengths)
    assert sorted(sources) == widths
    assert sum(sources.values()) + max(held) <= tokens


@pytest.mark.parametrize(
    "error", [jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes."), MemoryError()]
)
def test_a_full_device_halves_the_budget(
    error: Exception,
    expected: dict[int, PromptResult],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If the device runs out of memory, unfinished prompts are decoded again with half the budget, with a message."""
    calls = 0

    def full_at_first(step: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object, **rows: object) -> object:
            nonlocal calls
            calls += 1
            if calls in (20, 50):
                raise error
            return step(*arguments, **rows)

        return run

    for module, name in LAYER_ENDS:
        monkeypatch.setattr(module, name, full_at_first(getattr(module, name)))
    with caplog.at_level(logging.WARNING):
        results = list(_sweep(slots=12, tokens=1000).decode(_prompts(12)))
    assert len(results) == 12
    _assert_same(dict(results), expected)
    assert [record.args for record in caplog.records] == [(6, 500), (3, 250)]


def test_other_errors_of_the_device_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors other than lack of memory are raised."""

    def broken(*arguments: object, **rows: object) -> object:
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    for module, name in LAYER_ENDS:
        monkeypatch.setattr(module, name, broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        list(_sweep(slots=2, tokens=1000).decode(_prompts(2)))


def test_the_budget_is_of_free_memory() -> None:
    """The default budget fits into the machine; a requested number of prompts or tokens is used."""
    group = first_device()
    config = build_config()
    sizes: dict[str, Any] = {"num_branches": 4, "steps": 8, "source": 32, "precision": FLOAT32}
    chosen = choose_budget(config, group, **sizes, batch_size=None, max_cache_tokens=None)
    position = config.num_decoder_layers * 2 * config.num_heads * config.head_dim * 4
    assert 64 <= chosen.tokens * position < 2**36
    assert chosen.slots == 256
    asked = choose_budget(config, group, **sizes, batch_size=3, max_cache_tokens=64)
    assert asked == Budget(slots=3, tokens=64)
    halves = choose_budget(
        config, group, **{**sizes, "precision": Precision(dtype="bfloat16")}, batch_size=None, max_cache_tokens=None
    )
    assert 1.5 < halves.tokens / chosen.tokens < 2.5
    assert Budget(slots=3, tokens=65).halved() == Budget(slots=1, tokens=32)
    assert Budget(slots=1, tokens=1).halved() == Budget(slots=1, tokens=1)


def test_a_budget_without_room_for_one_prompt_is_refused() -> None:
    """The message says how much one prompt can need."""
    with pytest.raises(ValueError, match=r"max_cache_tokens must be at least 64, got 63: one prompt of 32 tokens"):
        Decoder(
            _CHECKPOINT,
            sweep_branches(ExitRule(), _THRESHOLDS, max_decode_length=8),
            max_input_length=32,
            max_cache_tokens=63,
        )


def test_devices_of_another_platform_are_refused() -> None:
    """Devices of a platform other than JAX's default are refused, since programs are compiled for that one."""

    class Gpu:
        platform = "gpu"

        def __str__(self) -> str:
            return "gpu:0"

    devices: Any = [Gpu()]
    with pytest.raises(ValueError, match=r"device gpu:0 is not a cpu device: set JAX_PLATFORMS"):
        Decoder(_CHECKPOINT, sweep_branches(ExitRule(), _THRESHOLDS, max_decode_length=8), devices=devices)


def test_memory_can_be_kept_twice() -> None:
    """The C library can be asked twice to keep freed memory."""
    keep_freed_memory()
    keep_freed_memory()
    assert np.zeros(10_000_000).sum() == 0


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_given_back() -> None:
    """Freed memory between used blocks is kept until the end of a sweep, and then returned to the system."""
    code = """
import os, numpy as np
from calm_beam.decoding.memory import keep_freed_memory, return_freed_memory
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
keep_freed_memory()
blocks = [np.ones(1 << 20) for _ in range(40)]
held = resident()
del blocks[::2]
kept = resident()
return_freed_memory()
print(held - kept, kept - resident())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    at_once, at_the_end = map(float, done.stdout.split())
    assert abs(at_once) < 20
    assert at_the_end > 140


def test_every_sweep_gives_back_and_few_sizes_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps of nine to twelve prompts use equal buffers; each returns freed memory, also when it is left early."""
    source_sizes, returns = set(), []

    def watched(prefill: Callable[..., Any]) -> Callable[..., Any]:
        def run(model: EarlyExitModel, parameters: object, **prompts: Any) -> Any:
            mask, tokens = prompts.get("source_mask"), prompts["source_tokens"]
            source_sizes.add((None if mask is None else mask.shape, tokens.shape))
            return prefill(model, parameters, **prompts)

        return run

    for module, name in PREFILLS:
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    monkeypatch.setattr(decoder, "return_freed_memory", lambda: returns.append(1))
    sweep = _sweep(slots=12, tokens=100_000)
    for count in (9, 10, 11, 12):
        assert len(dict(sweep.decode(_prompts(count)))) == count
    left = sweep.decode(_prompts(12))
    assert isinstance(left, Generator)
    next(left)
    assert len(returns) == 4
    left.close()
    assert len(returns) == 5
    assert len(source_sizes) == 1


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths and numbers that do not fit any memory are refused before decoding, with the flag to lower."""
    monkeypatch.setattr(memory, "available_bytes", lambda: 1 << 30)
    sizes: dict[str, Any] = {"num_branches": 6, "steps": 64, "source": 512}
    memory.check_memory(build_config(), memory.Demand(**sizes))
    for changes, flag in (
        ({"steps": 100_000}, "Lower --max_decode_length"),
        ({"source": 1_000_000}, "Lower --max_input_length"),
        ({"max_cache_tokens": 10**9}, "Lower --max_cache_tokens"),
        ({"rows": 10**6}, "Lower --batch_size"),
    ):
        with pytest.raises(ValueError, match=rf"decoding needs [\d,.]+ GiB .* 1.0 GiB are free. {flag}"):
            memory.check_memory(build_config(), memory.Demand(**{**sizes, **changes}))


def test_certified_heads_are_needed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that fits only without them is refused with the flag to leave them out; `auto` gives small heads none."""
    sizes: dict[str, Any] = {"num_branches": 2, "steps": 8, "source": 16}
    config = build_config(vocab_size=20_000, emb_dim=256)
    exact, auto = (memory.least_need(config, memory.Demand(**sizes, exit_head=form)) for form in ("exact", "auto"))
    assert auto.total - exact.total == auto.heads > 2 * 20_000 * 256
    assert memory.least_need(build_config(), memory.Demand(**sizes, exit_head="auto")).heads == 0
    monkeypatch.setattr(memory, "available_bytes", lambda: auto.total - 1)
    memory.check_memory(config, memory.Demand(**sizes))
    with pytest.raises(ValueError, match=r"certified heads [\d,.]+ MiB, .* are free\. Take --exit_head=exact, or use"):
        memory.check_memory(config, memory.Demand(**sizes, exit_head="auto"))
    said = memory.memory_in_words(config, memory.Demand(**sizes, exit_head="auto"))
    assert re.match(r"[\d,.]+ MiB of weights, and up to [\d,.]+ MiB of certified heads, [\d,.]+ MiB left", said)


def test_what_is_needed_is_a_lower_bound_that_grows() -> None:
    """More branches, tokens or rows never need less, and a small model with short texts needs a few megabytes."""
    small = memory.least_need(build_config(), memory.Demand(num_branches=2, steps=8, source=16))
    assert small.total < 1 << 23
    sizes: dict[str, Any] = {"num_branches": 2, "steps": 8, "source": 16}
    for changes in ({"num_branches": 3}, {"steps": 9}, {"source": 17}, {"rows": 2}):
        larger = memory.least_need(build_config(), memory.Demand(**{**sizes, **changes}))
        assert larger.total > small.total
    halved = memory.least_need(build_config(), memory.Demand(**sizes, precision=Precision(dtype="bfloat16")))
    assert 2 * halved.weights == small.weights
    assert small.outputs / 2 < halved.outputs < small.outputs
    assert small.source / 2 < halved.source < small.source
    exits = build_config(exit_norms=True, exit_heads=True)
    own = memory.least_need(exits, memory.Demand(**sizes)).weights - small.weights
    assert own == 4 * (exits.num_decoder_layers - 1) * exits.emb_dim * (1 + exits.vocab_size)


class _Device:
    platform = "gpu"

    def __init__(self, free: int) -> None:
        self._free = free

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": self._free + 1000, "bytes_in_use": 1000}

    def __str__(self) -> str:
        return "gpu 0"


def test_a_device_without_room_for_the_weights_is_refused() -> None:
    """A device's part of the model is compared with its free memory, and refused if it does not fit."""
    config = build_config(num_heads=8)
    needed = 4 * sum(math.prod(shape) for shape in parameter_shapes(config).values())
    for parts, free, fits in (
        (1, needed, True),
        (1, needed - 1, False),
        (8, needed // 2, True),
        (8, needed // 9, False),
    ):
        devices: Any = [_Device(free) for _ in range(parts)]
        group = types.SimpleNamespace(devices=devices, division=Division.of(config, parts))
        if fits:
            memory.check_devices(config, cast(DeviceGroup, group))
        else:
            with pytest.raises(ValueError, match=rf"weights take .* on gpu 0.*\(--model_parallelism, now {parts}\)"):
                memory.check_devices(config, cast(DeviceGroup, group))


def test_the_budget_of_an_accelerator_is_of_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """If each device holds some heads' keys and values, there is room for as many times the positions."""
    config = build_config(num_heads=8)
    sizes: dict[str, Any] = {"num_branches": 1, "steps": 8, "source": 32, "precision": FLOAT32}
    budgets = [
        choose_budget(
            config,
            cast(
                DeviceGroup,
                types.SimpleNamespace(devices=[_Device(10**7)] * parts, division=Division.of(config, parts)),
            ),
            **sizes,
            batch_size=None,
            max_cache_tokens=None,
        )
        for parts in (1, 8)
    ]
    assert budgets[1].tokens // budgets[0].tokens in (7, 8)


def test_memory_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and room are printed on the decoding machine; elsewhere and on accelerators, memory per position."""
    monkeypatch.setattr(memory, "available_bytes", lambda: 1 << 31)
    monkeypatch.setattr(memory, "has_accelerators", lambda: False)
    config = build_config(num_heads=8, emb_dim=512, mlp_dim=4096)
    demand = memory.Demand(num_branches=3, steps=8, source=16)
    asked = dataclasses.replace(demand, max_cache_tokens=5000)
    said = functools.partial(memory.memory_in_words, config)
    weights = 4 * sum(math.prod(shape) for shape in parameter_shapes(config).values())
    room = int(((1 << 31) - weights) * 0.2 / 2 / (4 * 2 * 64 * 4))
    assert (
        said(demand) == f"0.1 GiB of weights, 1.9 GiB left: room for {room:,} tokens of prompts and outputs at a time"
    )
    assert "; room for 5,000 tokens, as asked, takes 9.8 MiB" in said(asked)
    elsewhere = said(demand, model_parallelism=8, runs_here=False)
    assert elsewhere.startswith("0.1 GiB of weights, ")
    assert "MiB on each of 8 devices; each token of a prompt or an output takes 2.0 KiB" in elsewhere
    uneven = memory.memory_in_words(dataclasses.replace(config, vocab_size=63), demand, model_parallelism=2)
    assert "on each of 2 devices (each has the vocabulary whole, which cannot be shared evenly)" in uneven
    monkeypatch.setattr(memory, "has_accelerators", lambda: True)
    assert "; each token of a prompt or an output takes" in said(demand)
    # Which holds the model, and whose own devices are asked when it is loaded.
    memory.check_memory(config, memory.Demand(num_branches=1, steps=10**6, source=10**6))
    with pytest.raises(UsageError, match="8 attention heads cannot be divided by 3"):
        said(demand, model_parallelism=3)


@pytest.mark.skipif(not library.is_available(), reason="this machine has no native code")
def test_stores_of_native_code_grow_layer_by_layer() -> None:
    """Growing stores hold the keys and values of one layer twice, at most."""
    sweep = _sweep(slots=64, tokens=100_000, branches=[Branch.at(ExitRule(), 0.5, max_decode_length=_STEPS)])
    engine = sweep.open_batch()._engine
    tracemalloc.start()
    try:
        engine.grow(5000)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        engine.grow(1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held > 1 << 20
    assert peak < 1.5 * held
