"""The choice of the engine by fixed rules, and the refusals."""

import dataclasses
import os
import time
from typing import Any

import numpy as np
import pytest

from calm_beam.decoding import engine_choice
from calm_beam.decoding.branches import Branch, sweep_branches
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.early_exit import EarlyExitDecoder
from calm_beam.decoding.engine_choice import Machine, asked_like, check_assigned, chosen_engine, slow_precision
from calm_beam.errors import UsageError
from calm_beam.exits.rule import ExitRule
from calm_beam.manifest import EngineRecord
from calm_beam.precision import FLOAT32, Precision
from calm_beam.storage import free_memory
from tests.builders import build_checkpoint, build_config, build_rule
from tests.calm_beam.model.llama.builders import build_llama_config
from tests.instruction_sets import AVAILABLE, TUNED, forced

_HERE = Machine(platform="cpu", native="avx2")
_PORTABLE = Machine(platform="cpu", native="portable")
_NOT_BUILT = Machine(platform="cpu", native=None, lacks="it is not built in, for want of a C compiler")
_GPU = Machine(platform="gpu", kind="NVIDIA L4", native=None, lacks="it is for CPUs, and JAX computes on gpu")
_LARGE = build_config(vocab_size=1 << 20)
_CAPPED = build_llama_config(vocab_size=1 << 20, logits_cap=30.0)
_BFLOAT16 = Precision(dtype="bfloat16")


@pytest.fixture(autouse=True)
def _has_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_choice, "_vectors", lambda: "avx2")


def _given(**changes: Any) -> dict[str, Any]:
    given = {"config": build_config(), "rule": ExitRule(), "precision": FLOAT32, "machine": _HERE}
    return {**given, **changes}


def _chosen(engine: str = "auto", exit_head: str = "auto", **changes: Any) -> EngineRecord:
    return chosen_engine(engine, exit_head, **_given(**changes))


def _engine(name: str, instructions: str | None, head: str) -> EngineRecord:
    prefill = "native" if name == "native" else None
    return EngineRecord(name=name, instructions=instructions, head=head, prefill=prefill)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, _engine("native", "avx2", "exact")),
        ({"config": _LARGE}, _engine("native", "avx2", "uint8")),
        ({"config": build_llama_config(residual_factor=0.5)}, _engine("xla", "cpu avx2", "exact")),
        ({"config": _LARGE, "engine": "xla"}, _engine("xla", "cpu avx2", "exact")),
        ({"engine": "native", "exit_head": "int8"}, _engine("native", "avx2", "uint8")),
        ({"config": _LARGE, "machine": _NOT_BUILT}, _engine("xla", "cpu avx2", "exact")),
        ({"config": _LARGE, "machine": _PORTABLE}, _engine("native", "portable", "exact")),
        ({"config": _LARGE, "machine": _GPU}, _engine("xla", "gpu NVIDIA L4", "exact")),
        ({"machine": _GPU, "model_parallelism": 4}, _engine("xla", "gpu NVIDIA L4 x 4", "exact")),
        ({"config": _LARGE, "precision": _BFLOAT16}, _engine("xla", "cpu avx2, head avx2", "uint8")),
        ({"config": _LARGE, "in_loop": True}, _engine("xla_loop", "cpu avx2, head avx2", "uint8")),
        ({"config": _LARGE, "in_loop": True, "engine": "xla"}, _engine("xla_loop", "cpu avx2", "exact")),
        ({"config": _LARGE, "model_parallelism": 2}, _engine("xla", "cpu avx2 x 2", "exact")),
        ({"config": _LARGE, "rule": build_rule("oracle")}, _engine("native", "avx2", "exact")),
        ({"config": _LARGE, "machine": None}, _engine("xla", None, "exact")),
        ({"config": _LARGE, "machine": None, "engine": "native"}, _engine("native", None, "uint8")),
    ],
)
def test_the_engine_goes_by_fixed_rules(changes: dict[str, Any], expected: EngineRecord) -> None:
    """Native code decodes if available for the model, else XLA; heads are certified if the code is tuned."""
    assert _chosen(**changes) == expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"machine": _NOT_BUILT}, "it is not built in, for want of a C compiler"),
        ({"machine": _GPU}, "it is for CPUs, and JAX computes on gpu"),
        ({"precision": _BFLOAT16}, "it computes in float32, and the model is to compute in bfloat16"),
        ({"model_parallelism": 2}, "it is for a model on one device"),
        ({"config": build_llama_config(post_norms=True)}, "it does not compute models with post_norms=True"),
        ({"config": build_llama_config(num_experts=7)}, "it does not compute models with num_experts=7"),
        (
            {"config": build_llama_config(attention_cap=50.0, logits_cap=30.0)},
            "it does not compute models with attention_cap=50.0, logits_cap=30.0",
        ),
    ],
)
def test_native_code_that_cannot_decode_is_refused(changes: dict[str, Any], reason: str) -> None:
    """Native code that is requested and cannot decode is refused with the reason and the way out."""
    with pytest.raises(UsageError, match="engine is native, but native code cannot decode") as error:
        _chosen("native", **changes)
    assert reason in str(error.value)
    assert "Take --engine=xla" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"engine": "xla"}, "engine is xla"),
        ({"machine": _NOT_BUILT}, _NOT_BUILT.lacks),
        ({"machine": _PORTABLE}, "native code for portable has none"),
        ({"machine": _GPU}, "it is for CPUs, and JAX computes on gpu"),
        ({"model_parallelism": 2}, "model_parallelism is 2, and it is for a head that one device has whole"),
        ({"machine": None}, "other machines decode, and --engine=native does not say that they have native code"),
        ({"config": _CAPPED}, "the model caps its logits, and bounds are of logits as the head makes them"),
    ],
)
def test_a_certified_head_without_native_code_is_refused(changes: dict[str, Any], reason: str) -> None:
    """A requested certified head without native code is refused with a way out; `auto` takes the exact head."""
    with pytest.raises(UsageError) as error:
        _chosen(**{"exit_head": "int8", **changes})
    assert str(error.value).startswith(f"exit_head is int8, but {reason}. ")
    assert "take --exit_head=exact" in str(error.value)
    assert _chosen(**{"config": _LARGE, **changes}).head == "exact"


def test_other_names_are_refused() -> None:
    """Another name is refused with the list of known ones."""
    with pytest.raises(ValueError, match="engine must be one of auto, native, xla; got 'cuda'"):
        _chosen("cuda")


def test_neither_clock_nor_free_memory_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without free memory, and with a clock that runs backwards, the same engine is chosen and decodes alike."""
    checkpoint = build_checkpoint()
    made = []
    for free, ticks in ((1 << 40, 1.0), (0, -1.0)):
        clock = iter(np.arange(0, 1e6 * ticks, ticks))
        with monkeypatch.context() as patched:
            patched.setattr(free_memory, "_system_bytes", lambda free=free: free)
            patched.setattr(time, "perf_counter", lambda clock=clock: next(clock))
            decoder = Decoder(
                checkpoint,
                sweep_branches(ExitRule(), (0.5,), max_decode_length=4),
                max_input_length=16,
                exit_head="auto",
            )
        made.append(decoder.engine)
    assert made[0] == made[1]


def test_what_was_recorded_is_taken_where_it_can_be() -> None:
    """A requested engine is taken; else the recorded one, if this machine has it."""
    native, xla = _chosen(config=_LARGE), _chosen("xla", config=_LARGE)
    given = _given(config=_LARGE)
    for recorded in (native, xla, _chosen("native", "exact", config=_LARGE)):
        asked = asked_like(recorded, engine="auto", exit_head="auto", **given)
        assert chosen_engine(**asked, **given) == recorded
        assert asked_like(recorded, engine="xla", exit_head="auto", **given) == {"engine": "xla", "exit_head": "auto"}
    without = _given(config=_LARGE, machine=_NOT_BUILT)
    asked = asked_like(native, engine="auto", exit_head="auto", **without)
    assert chosen_engine(**asked, **without) == _engine("xla", "cpu avx2", "exact")
    elsewhere = _given(config=_LARGE, machine=None)
    asked = asked_like(native, engine="auto", exit_head="auto", **elsewhere)
    assert chosen_engine(**asked, **elsewhere) == dataclasses.replace(native, instructions=None)


@pytest.mark.parametrize("changes", [{"head": "int8"}, {"head": "bfloat16"}, {"prefill": None}])
@pytest.mark.parametrize("name", ["native", "xla"])
def test_of_what_is_gone_the_nearest_engine_is_taken(name: str, changes: dict[str, Any]) -> None:
    """If the recorded head does not exist here, layers keep their engine and the exact head decides.

    Native code prefills what XLA did. Both count as another engine.
    """
    given = _given(config=_LARGE)
    nearest = _chosen(name, "exact", config=_LARGE)
    recorded = dataclasses.replace(nearest, **changes)
    if recorded == nearest:
        assert not recorded.is_gone
        return
    assert recorded.is_gone
    found = chosen_engine(**asked_like(recorded, engine="auto", exit_head="auto", **given), **given)
    assert found == nearest
    assert found.is_unlike(recorded)
    # On other machines, any engine.
    without = _given(config=_LARGE, machine=_NOT_BUILT)
    found = chosen_engine(**asked_like(recorded, engine="auto", exit_head="auto", **without), **without)
    assert found == _engine("xla", "cpu avx2", "exact")


def test_a_worker_with_another_engine_refuses() -> None:
    """A worker with another engine refuses and names both; one that does not know its run's instructions continues."""
    assigned = _engine("native", "avx512_vnni", "uint8")
    check_assigned(assigned, assigned)
    check_assigned(assigned, None)
    check_assigned(_engine("xla", "cpu avx2", "exact"), _engine("xla", None, "exact"))
    with pytest.raises(UsageError) as error:
        check_assigned(_engine("xla", "cpu avx2", "exact"), assigned)
    for words in ("xla (cpu avx2), head exact", "native (avx512_vnni), head uint8", "--engine=xla"):
        assert words in str(error.value)
    with pytest.raises(UsageError):
        check_assigned(dataclasses.replace(assigned, instructions="avx2"), assigned)


def test_decoders_say_what_they_are() -> None:
    """A decoder reports native code with its instruction set, or XLA if there is none or it is requested."""
    checkpoint, rule = build_checkpoint(), ExitRule()
    branches = sweep_branches(rule, (0.5,), max_decode_length=4)

    def engines(**asked: Any) -> list[EngineRecord]:
        return [
            Decoder(checkpoint, branches, max_input_length=16, **asked).engine,
            Decoder(checkpoint, branches[1:], max_input_length=16, **asked).engine,
            EarlyExitDecoder(
                checkpoint, Branch.at(rule, 0.5, max_decode_length=4), max_input_length=16, **asked
            ).engine,
        ]

    xla, loop = (_engine(name, "cpu avx2", "exact") for name in ("xla", "xla_loop"))
    for name in AVAILABLE:
        with forced(name):
            assert engines() == [_engine("native", name, "exact")] * 2 + [loop]
            assert engines(engine="xla") == [xla, xla, loop]
            if name in TUNED:
                certified = _engine("xla_loop", f"cpu avx2, head {name}", "uint8")
                assert engines(exit_head="int8") == [_engine("native", name, "uint8")] * 2 + [certified]
            else:
                with pytest.raises(UsageError, match=f"native code for {name} has none"):
                    engines(exit_head="int8")
    with forced("none"):
        assert engines() == [xla, xla, loop]


def test_a_processor_without_bfloat16_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without bfloat16 instructions is reported before decoding, but not on a GPU or in float32."""
    monkeypatch.setattr(engine_choice, "_features", lambda: frozenset({"avx2", "fma"}))
    said = slow_precision(_BFLOAT16, _HERE)
    assert said is not None
    assert "no bfloat16 instructions" in said
    assert slow_precision(FLOAT32, _HERE) is None
    assert slow_precision(_BFLOAT16, _GPU) is None
    monkeypatch.setattr(engine_choice, "_features", lambda: frozenset({"avx512_bf16"}))
    assert slow_precision(_BFLOAT16, _HERE) is None


def test_the_platform_is_found_without_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """The platform is found by device files; if these show an accelerator, another process determines it."""
    monkeypatch.setattr(engine_choice, "has_accelerators", lambda: False)
    monkeypatch.setattr(engine_choice, "_asked_device", lambda: pytest.fail("asked"))
    assert Machine.here().platform == "cpu"
    monkeypatch.setattr(engine_choice, "has_accelerators", lambda: True)
    monkeypatch.setattr(engine_choice, "_asked_device", lambda: ("gpu", "NVIDIA L4"))
    found = Machine.here()
    assert (found.platform, found.kind, found.native) == ("gpu", "NVIDIA L4", None)
    assert found.lacks == "it is for CPUs, and JAX computes on gpu"


def test_another_process_says_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process reports JAX's device, whatever else it prints."""
    monkeypatch.setitem(os.environ, "JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(engine_choice, "_ASKS_JAX", f"print('a plugin greets'); {engine_choice._ASKS_JAX}")
    engine_choice._asked_device.cache_clear()
    assert engine_choice._asked_device() == ("cpu", "cpu")


def test_kinds_of_accelerators_are_different_engines() -> None:
    """An H100, an L4, and four L4s that share a model are three engines."""
    h100, l4 = (Machine(platform="gpu", kind=kind, native=None) for kind in ("NVIDIA H100 80GB HBM3", "NVIDIA L4"))
    engines = [_engine("xla", made_for, "exact") for made_for in (h100.xla_instructions(), l4.xla_instructions())]
    assert engines[0].is_unlike(engines[1])
    assert _engine("xla", l4.xla_instructions(4), "exact").is_unlike(engines[1])
