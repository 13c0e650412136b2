"""One model on several devices."""

import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from calm_beam.checkpoints import StoredArray, write_native
from calm_beam.decoding.device_groups import device_groups, placed
from calm_beam.errors import UsageError
from tests.builders import build_checkpoint, build_config, write_hugging_face, write_t5x

from .decoders import first_device

_START = """
import sys

import jax
import numpy as np

from calm_beam.decoding.branches import sweep_branches
from calm_beam.decoding.compilation import use_compilation_cache
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.early_exit import EarlyExitDecoder
from calm_beam.decoding.branches import Request
from calm_beam.exits.rule import ExitRule
from tests.builders import build_checkpoint, build_config, build_prompts, build_rule, checkpoint_of

use_compilation_cache()
assert len(jax.local_devices()) > 1
prompts = build_prompts(*(2 + index % 9 for index in range(13)))
"""

_PARITY = (
    _START
    + """
from calm_beam.precision import Precision
from tests.calm_beam.model.llama.builders import build_llama_arrays, build_llama_config

def model(family):
    if family == "t5":
        return build_checkpoint(build_config(num_heads=8, exit_classifier=2))
    if family == "exits":
        return build_checkpoint(build_config(num_heads=8, exit_classifier=2, exit_norms=True, exit_heads=True))
    config = build_llama_config(
        vocab_size=64,
        emb_dim=16,
        num_heads=8,
        num_kv_heads=4,
        head_dim=8,
        mlp_dim=32,
        max_positions=1024,
        exit_classifier=2,
        **(dict(num_experts=4, experts_per_token=2) if family == "experts" else {}),
    )
    return checkpoint_of(config, build_llama_arrays(config, 1))

family, precision = sys.argv[2], Precision(dtype=sys.argv[3])
if family == "llama":
    # Their common prefix is prefilled once.
    prompts = [[*range(2, 42), *prompt] for prompt in prompts]
near = 1e-4 if precision.dtype == "float32" else 0.05

def flips(expected, found, *, branches):
    assert sorted(found) == list(range(len(prompts)))
    differing = 0
    for index, one in expected.items():
        many = found[index]
        tokens, layers, confidences = (
            getattr(one, name) if branches is None else getattr(one, name)[branches]
            for name in ("tokens", "exit_layers", "confidences")
        )
        if np.array_equal(tokens, many.tokens) and np.array_equal(layers, many.exit_layers):
            np.testing.assert_allclose(confidences, many.confidences, atol=near)
        else:
            differing += 1
    return differing

differing, compared = 0, 0
for parts in map(int, sys.argv[1].split(",")):
    for name in sys.argv[4:]:
        confidence, _, propagation = name.partition("/")
        rule = build_rule(confidence, **({"state_propagation": propagation} if propagation else {}))
        checkpoint = model(family)
        branches = sweep_branches(rule, (0.6, 0.2), max_decode_length=8)
        alone = Decoder(checkpoint, branches, devices=jax.local_devices()[:1], precision=precision)
        expected = dict(alone.decode(prompts))
        together = Decoder(checkpoint, branches, model_parallelism=parts, precision=precision)
        differing += flips(expected, dict(together.decode(prompts)), branches=None)
        compared += len(prompts)
        if rule.needs_full_model():
            continue
        served = EarlyExitDecoder(
            checkpoint, branches[1], precision=precision, model_parallelism=parts
        )
        differing += flips(expected, dict(served.decode(prompts)), branches=1)
        batch = Decoder(
            checkpoint,
            branches[:1],
            max_input_length=64,
            max_cache_tokens=100,
            precision=precision,
            model_parallelism=parts,
        )
        for branch in (1, 2):
            results = batch.decode([Request(prompt, branches=[branches[branch]]) for prompt in prompts])
            found = {index: result.branch(0) for index, result in results}
            differing += flips(expected, found, branches=branch)
        compared += 3 * len(prompts)
        (weights,) = {
            decoder._weights.layers[0]["mlp"]["wo"]["kernel"].addressable_shards[0].data.shape
            for decoder in together._decoders
        }
        assert weights == (32 // parts, 16), weights
        stores = [keys for keys, _ in batch.open_batch()._engine._cache]
        (store,) = {(keys.dtype, keys.addressable_shards[0].data.shape[1]) for keys in stores}
        heads = checkpoint.config.num_kv_heads
        assert store == (precision.dtype, heads * 8 // (1 if heads % parts else parts)), store
print(f"{differing} of {compared}")
"""
)


def _run(program: str, *arguments: str, devices: int = 8) -> str:
    run = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def _differing(parts: str, *arguments: str) -> tuple[int, int]:
    """Returns how many outputs differ, and their total, with eight devices as one model, or two models of two each."""
    # Every model is compiled for its own devices.
    differing, _, compared = _run(_PARITY, parts, *arguments, devices=8 if parts == "8" else 4).split()
    return int(differing), int(compared)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("parts", "family", "rules"),
    [
        ("8", "t5", ("softmax", "state/projected")),
        ("2", "t5", ("softmax", "classifier/from_first_exit")),
        ("8", "t5", ("entropy", "patience", "oracle")),
        ("2", "llama", ("softmax", "state/projected")),
        ("2", "exits", ("softmax", "state/from_first_exit")),
        # Query heads are divided; the fewer key heads are not.
        ("8", "llama", ("softmax",)),
        # Each of four experts is divided among two devices.
        ("8", "experts", ("softmax",)),
    ],
    ids=["eight", "two", "measures", "decoder_only_two", "own_exits_two", "decoder_only_eight", "experts_eight"],
)
def test_devices_that_share_a_model_give_the_outputs_of_one(parts: str, family: str, rules: tuple[str, ...]) -> None:
    """Sweep, served decoder and batch decoder on two or eight devices a model decide as on one device.

    Each device holds only its part of the weights and of the keys and values. The few outputs with near ties may
    differ.
    """
    differing, compared = _differing(parts, family, "float32", *rules)
    assert differing <= compared // 50


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("parts", ["2", "8"])
@pytest.mark.parametrize("family", ["t5", "llama"])
def test_devices_that_share_a_model_compute_in_bfloat16(parts: str, family: str) -> None:
    """Devices hold bfloat16 and add float32: outputs are those of one device, but for near ties.

    There are more near ties than in float32, since a sum may round to either side of one.
    """
    differing, compared = _differing(parts, family, "bfloat16", "softmax")
    assert differing <= compared // 10


_SHARED = (
    _START
    + """
import threading

from calm_beam.precision import FLOAT32
from calm_beam.serving.generator import on_device

rule = ExitRule()
branches = sweep_branches(rule, (0.6,), max_decode_length=8)
checkpoint = build_checkpoint(build_config(num_heads=8, exit_classifier=2))
alone = Decoder(checkpoint, branches, devices=jax.local_devices()[:1])
expected = dict(alone.decode(prompts))
placed = on_device(checkpoint, FLOAT32, model_parallelism=2)
batch = Decoder(placed, branches[1:], model_parallelism=2)
single = EarlyExitDecoder(placed, branches[1], model_parallelism=2)
assert len(batch._decoders) == 4
found = {}
threads = [threading.Thread(target=lambda: found.update(single.decode(prompts))) for _ in range(2)]
for thread in threads:
    thread.start()
together = {index: result.branch(0) for index, result in batch.decode(prompts)}
for thread in threads:
    thread.join()
same = sum(
    np.array_equal(result.tokens[1], outputs[index].tokens)
    for outputs in (found, together)
    for index, result in expected.items()
)
try:
    EarlyExitDecoder(placed, branches[1], exit_head="int8", model_parallelism=2)
except ValueError as error:
    assert "exit_head is int8, but model_parallelism is 2" in str(error), error
else:
    raise AssertionError("a certified head was divided")
print(same)
"""
)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_threads_take_turns_with_devices() -> None:
    """Single prompts in two threads while a batch runs, with weights placed once, have their usual outputs.

    No thread waits forever. A certified head is refused.
    """
    assert int(_run(_SHARED)) >= 2 * 13 - 1


_MEMORY = """
import gc, itertools, sys, time, weakref

import jax
import numpy as np

from calm_beam.checkpoints import StoredArray, load_checkpoint
from calm_beam.decoding import device_groups

# By number of the read, without a running sum, since threads of JAX drop arrays, too.
held, peak = {}, 0

def alive():
    return sum(list(held.values()))

read, numbers = StoredArray.__getitem__, itertools.count()

def counted(self, index):
    global peak
    values, number = read(self, index), next(numbers)
    held[number] = values.nbytes
    peak = max(peak, alive())
    weakref.finalize(values, held.pop, number)
    return values

# Devices must hold copies, not the memory that was read, which would count as the host's.
put = jax.device_put
jax.device_put = lambda values, device=None, **options: put(values, device, may_alias=False, **options)
StoredArray.__getitem__ = counted
checkpoint = load_checkpoint(sys.argv[1])
group, *_ = device_groups.device_groups(checkpoint.config, model_parallelism=int(sys.argv[2]))
on_group = device_groups.placed(checkpoint, group)
total = sum(array.nbytes for array in on_group.arrays.values())
# JAX keeps the last few for a while.
for _ in range(20):
    jax.block_until_ready(put(np.zeros(8, np.float32), jax.local_devices()[0], may_alias=False))
    gc.collect()
    if alive() < total / 10:
        break
    time.sleep(0.1)
else:
    raise AssertionError(f"{alive()} bytes are still held")
assert checkpoint.fingerprint() == on_group.fingerprint() == load_checkpoint(sys.argv[1]).fingerprint()
wi = on_group.arrays["decoder/layers_0/mlp/wi_0/kernel"]
expected = np.asarray(checkpoint.arrays["decoder/layers_0/mlp/wi_0/kernel"])
for shard in wi.addressable_shards:
    np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])
print(peak, total)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["native", "hugging_face", "t5x"])
def test_the_host_never_holds_the_model(tmp_path: pathlib.Path, layout: str) -> None:
    """Loading a model of 270 MB with its fingerprint, and placing it on eight devices, takes less than a quarter of it.

    The count is the peak of the arrays that were read and not yet dropped.
    """
    config = build_config(
        vocab_size=8000, emb_dim=512, num_heads=8, head_dim=64, mlp_dim=2048, num_encoder_layers=7, num_decoder_layers=7
    )
    checkpoint = build_checkpoint(config)
    if layout == "native":
        write_native(tmp_path, config, arrays=checkpoint.arrays, vocabulary_path=None)
    elif layout == "hugging_face":
        write_hugging_face(tmp_path, config, {name: np.asarray(array) for name, array in checkpoint.arrays.items()})
    else:
        write_t5x(tmp_path, checkpoint.arrays)
    peak, total = map(int, _run(_MEMORY, str(tmp_path), "8").split())
    assert total > 250 << 20
    assert 0 < peak < total / 4


def test_a_stored_array_is_read_for_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one device an array is read once, whole; a placed array stays where it is."""
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    reads = []

    def read(slices: tuple[slice, ...]) -> np.ndarray:
        reads.append(slices)
        return values[slices]

    group = first_device()
    array = group.place("decoder/layers_0/mlp/wo/kernel", StoredArray((3, 4), values.dtype, read=read))
    np.testing.assert_array_equal(np.asarray(array), values)
    assert len(reads) == 1
    assert group.place("decoder/layers_0/mlp/wo/kernel", array) is array


def test_devices_that_are_left_over_are_refused() -> None:
    """The number of devices must be a multiple of those that share a model; the indivisible number is named."""
    config = build_config(num_heads=6, mlp_dim=36)
    with pytest.raises(UsageError, match="model_parallelism is 3, but this process has 1 device: that many must be"):
        device_groups(config, model_parallelism=3)
    with pytest.raises(UsageError, match="model_parallelism is 4, but 6 attention heads cannot be divided by 4"):
        device_groups(config, model_parallelism=4, devices=jax.local_devices() * 4)


def test_placing_a_model_twice_moves_nothing() -> None:
    """Decoders of one placed model share its weights."""
    checkpoint = placed(build_checkpoint(), first_device())
    again = placed(checkpoint, first_device())
    assert all(again.arrays[name] is array for name, array in checkpoint.arrays.items())
