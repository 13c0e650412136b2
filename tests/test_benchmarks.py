"""The benchmarks of the sweep and of the pipeline around it, on tiny models and fake decoders."""

import dataclasses
import functools
import json
import pathlib
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    across_devices,
    large_model,
    multiply_adds,
    pipeline_overhead,
    rules_together,
    sweep,
    training_step,
)
from benchmarks.paper_model import PAPER_DIMENSIONS
from benchmarks.process import CompileTime
from benchmarks.widened_model import widen_to_paper
from calm_beam.checkpoints import StoredArray, load_checkpoint
from calm_beam.decoding.branches import sweep_branches
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.engine import Work
from calm_beam.decoding.xla import steps
from calm_beam.exits.rule import ExitRule
from calm_beam.model import EarlyExitT5, parameter_shapes
from tests.builders import build_arrays, build_config, checkpoint_of, write_t5x
from tests.sampling import sampled

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PROMPTS = [[5, 9, 12, 1], [7, 3, 1], [20, 21, 22, 23, 24, 1]]
_STEPS = 5
_REQUIRED = {
    "layer_work_over_full_pass",
    "projection_work_over_full_pass",
    "speedup_over_per_threshold",
    "speedup_over_batch_1",
    "matmul_share",
    "peak_memory_bytes",
    "compile_seconds",
}


@pytest.fixture(scope="module")
def model_and_data(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path]:
    """Returns a tiny checkpoint's folder and a file of three prompts."""
    folder = tmp_path_factory.mktemp("benchmark")
    checkpoint = write_t5x(folder, build_arrays(build_config(exit_classifier=2), 0))
    data = folder / "prompts.jsonl"
    lines = [json.dumps({"id": str(index), "input_ids": ids}) for index, ids in enumerate(_PROMPTS)]
    data.write_text("\n".join(lines) + "\n")
    return checkpoint, data


@pytest.fixture(autouse=True)
def _small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips the measurement of this machine's rates, which no test needs."""
    monkeypatch.setattr(multiply_adds, "_SIDE", 64)
    monkeypatch.setattr(multiply_adds, "_SECONDS", 0.0)


def _run(capsys: pytest.CaptureFixture[str], model_and_data: tuple[pathlib.Path, pathlib.Path], *more: str) -> Any:
    checkpoint, data = model_and_data
    arguments = [f"--checkpoint={checkpoint}", f"--data={data}", f"--max_decode_length={_STEPS}", "--batch_size=2"]
    assert sweep.main([*arguments, "--json", *more]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_counts_are_those_of_the_outputs(
    capsys: pytest.CaptureFixture[str], model_and_data: tuple[pathlib.Path, pathlib.Path]
) -> None:
    """Layer counts of the full model and of every threshold are the sums of exit layers; the sweep runs fewer."""
    figures = _run(capsys, model_and_data, "--thresholds=2", "--prompts=3", "--runs=2")
    assert set(figures) >= _REQUIRED
    checkpoint = load_checkpoint(model_and_data[0])
    decoder = Decoder(
        checkpoint,
        sweep_branches(ExitRule(), (0.5, 0.0), max_decode_length=_STEPS),
    )
    exits = np.stack([result.exit_layers for _, result in decoder.decode(_PROMPTS)])
    full = exits[:, 0].sum()
    assert full == 4 * figures["tokens_of_full_model"]
    assert figures["tokens_of_all_lanes"] == (exits > 0).sum()
    assert figures["full_pass_layer_work"] == figures["full_pass_projection_work"] == 1
    assert figures["per_threshold_layer_work_over_full_pass"] == pytest.approx(exits.sum() / full)
    # With softmax, every layer that may exit computes the head; the full model only the last one.
    assert figures["per_threshold_projection_work_over_full_pass"] == pytest.approx(1 + exits[:, 1:].sum() / full * 4)
    assert 1 <= figures["layer_work_over_full_pass"] < figures["per_threshold_layer_work_over_full_pass"]
    assert figures["mean_exit_layer_by_threshold"] == [
        pytest.approx(lane[lane > 0].mean(), abs=1e-3) for lane in (exits[:, 1], exits[:, 2])
    ]
    assert figures["per_threshold_outputs_compared"] == 6
    assert figures["per_threshold_outputs_that_differ"] == 0
    assert figures["peak_memory_bytes"] >= figures["memory_before_sweep_bytes"] > 0


def test_batches_have_the_bits_of_the_sweep(
    capsys: pytest.CaptureFixture[str],
    model_and_data: tuple[pathlib.Path, pathlib.Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The benchmark reports that batches have the sweep's bits, and notices a layer that changes states by one bit."""
    monkeypatch.setattr(across_devices, "_BATCHES", (1, 2))
    monkeypatch.setattr(across_devices, "_ALONE", 1)
    checkpoint, data = model_and_data
    flags = [f"--checkpoint={checkpoint}", f"--data={data}", "--max_decode_length=4", "--engine=xla"]
    across_devices.main(flags)
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split(":")[0].strip() for line in lines[:2]] == ["batches of 1", "batches of 2"]
    assert all(": 0 of " in line and "; 0 of " in line for line in lines[:2])
    run_layer = steps.run_layer

    def moved(*arguments: Any, **others: Any) -> Any:
        states, *made = run_layer(*arguments, **others)
        return jnp.nextafter(states, states + 1) if states.shape[1] == 1 else states, *made

    monkeypatch.setattr(steps, "run_layer", moved)
    across_devices.main(flags)
    of_one, of_two, _ = capsys.readouterr().out.splitlines()[2:]
    assert "; 0 of " not in of_one
    assert "; 0 of " in of_two


@pytest.mark.parametrize("confidence", sampled(["state", "classifier"], keep=(0,)))
def test_confidences_that_need_no_logits_project_every_token_once(
    capsys: pytest.CaptureFixture[str], model_and_data: tuple[pathlib.Path, pathlib.Path], confidence: str
) -> None:
    """Measures that need no logits project every token once per threshold, over all branches."""
    figures = _run(capsys, model_and_data, "--thresholds=2", "--prompts=3", f"--confidence={confidence}")
    tokens = figures["tokens_of_all_lanes"] / figures["tokens_of_full_model"]
    assert figures["per_threshold_projection_work_over_full_pass"] == pytest.approx(tokens)


def test_long_grids_are_measured_in_part_and_scaled(
    capsys: pytest.CaptureFixture[str],
    model_and_data: tuple[pathlib.Path, pathlib.Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thresholds that are left out count as the measured ones do, and both numbers are given; prompts repeat."""
    monkeypatch.setattr(sweep, "_MOST_MEASURED", 1)
    figures = _run(capsys, model_and_data, "--thresholds=3", "--prompts=4")
    assert (figures["thresholds"], figures["per_threshold_measured"]) == (3, 1)
    assert (figures["prompts"], figures["distinct_prompts"]) == (4, 3)
    decoder = Decoder(
        load_checkpoint(model_and_data[0]),
        sweep_branches(ExitRule(), (1 / 3,), max_decode_length=_STEPS),
    )
    exits = np.stack([result.exit_layers for _, result in decoder.decode([*_PROMPTS, _PROMPTS[0]])])
    full, alone = exits[:, 0].sum(), exits[:, 1].sum()
    assert figures["per_threshold_layer_work_over_full_pass"] == pytest.approx(1 + 3 * alone / full)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--thresholds=0"], "--thresholds must be at least 1, got 0"),
        (["--data=prompts.jsonl"], "--checkpoint and --data go together"),
        (["--paper_dimensions", "--checkpoint=MODEL", "--data=DATA"], "its num_decoder_layers is 4, the paper's 8"),
        (["--confidence=classifier", "--prompts=1"], "--confidence=classifier needs a model with an exit classifier"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    capsys: pytest.CaptureFixture[str],
    model_and_data: tuple[pathlib.Path, pathlib.Path],
    arguments: list[str],
    message: str,
) -> None:
    """Flags that do not fit are refused with what to pass, and nothing is decoded."""
    model, data = map(str, model_and_data)
    with pytest.raises(SystemExit, match="2"):
        sweep.main([argument.replace("MODEL", model).replace("DATA", data) for argument in arguments])
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("exit_classifier", [1, 2])
def test_a_widened_model_computes_what_it_did(exit_classifier: int) -> None:
    """In the paper's dimensions, logits and scores of every layer are the small model's; no added token is likely."""
    config = build_config(num_decoder_layers=8, exit_classifier=exit_classifier)
    small = checkpoint_of(config, build_arrays(config, 0))
    wide = widen_to_paper(small)
    assert dataclasses.replace(wide.config, exit_classifier=1) == PAPER_DIMENSIONS
    generator = np.random.default_rng(0)
    source, target = (generator.integers(3, config.vocab_size, (3, size)).astype(np.int32) for size in (9, 7))
    source[1, 4:] = 0
    logits, scores = [], []
    for checkpoint in (small, wide):
        apply = functools.partial(EarlyExitT5(checkpoint.config).apply, {"params": checkpoint.parameters()})
        states = apply(source, target, method="decode_teacher_forced")
        logits.append(apply(states, 1, method="head"))
        scores.append(apply(states, method="exit_score"))
    own, added = np.split(np.asarray(logits[1]), [config.vocab_size], axis=-1)
    np.testing.assert_allclose(own, logits[0], rtol=0, atol=1e-3 * np.abs(logits[0]).max())
    assert np.ptp(scores[0]) > 0.05
    np.testing.assert_allclose(scores[1], scores[0], rtol=0, atol=2e-3)
    assert added.max() < -1000


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tied_head": True}, "its tied_head is True, the paper's False"),
        ({"vocab_size": 32129}, "its vocab_size is 32129, the paper's 32128"),
        ({"emb_dim": 512}, "its emb_dim is the paper's already"),
    ],
)
def test_models_that_do_not_fit_are_not_widened(sizes: dict[str, Any], message: str) -> None:
    """A model that cannot be widened is refused with the size that does not fit."""
    config = build_config(num_decoder_layers=8, **sizes)
    with pytest.raises(ValueError, match=message):
        widen_to_paper(checkpoint_of(config, build_arrays(config, 0)))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", [["benchmarks/sweep.py"], ["-m", "benchmarks.sweep"]])
def test_it_starts_as_a_file_and_as_a_module(how: list[str]) -> None:
    """As a file and as a module, the benchmark finds the packages of this repository."""
    command = [sys.executable, *how, "--thresholds=0"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 2
    assert "--thresholds must be at least 1" in done.stderr


def test_multiply_adds_are_the_kernels_sizes() -> None:
    """A layer's row passes each of its kernels once, except for the keys and values of the source."""
    for gated in (True, False):
        config = build_config(gated_mlp=gated)
        shapes = parameter_shapes(config)
        kernels = {
            name: np.prod(shape)
            for name, shape in shapes.items()
            if name.startswith("decoder/layers_0/") and name.endswith("kernel")
        }
        source = [kernels[f"decoder/layers_0/encoder_decoder_attention/{part}/kernel"] for part in ("key", "value")]
        made = [kernels[f"decoder/layers_0/self_attention/{part}/kernel"] for part in ("key", "value")]
        layer, head = sum(kernels.values()) - sum(source), np.prod(shapes["decoder/logits_dense/kernel"])
        work = Work(layer_rows=3, projection_rows=5, fill_rows=7, padded_rows=11)
        assert multiply_adds.large_steps(config, work) == 3 * layer + 5 * head + 7 * sum(made)


def test_nested_compilation_counts_once() -> None:
    """A function traced inside another one is part of the other's time."""

    @jax.jit
    def inner(values: jax.Array) -> jax.Array:
        return jnp.sin(values)

    @jax.jit
    def outer(values: jax.Array) -> jax.Array:
        return inner(values) + inner(values * 2)

    with CompileTime() as compiling:
        outer(jnp.ones(3))
    seconds = compiling.seconds()
    assert seconds > 0
    outer(jnp.ones(4))
    assert compiling.seconds() == seconds


def test_the_overhead_is_taken_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """The pipeline's time is printed next to that of the bare loop, with each of its parts."""
    pipeline_overhead.main(["--fake_decoder", "--prompts=20", "--num_shards=2"])
    printed = capsys.readouterr().out
    for name in ("bare sweep", "calm-beam calibrate", "overhead", "reading Parquet", "scoring", "summing"):
        assert f"{name}  " in printed


def _write_small(folder: pathlib.Path) -> None:
    """Writes a small copy of a large decoder-only model."""
    sizes = {"vocab_size": 60, "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    more = {"intermediate_size": 12, "num_hidden_layers": 2, "eos_token_id": [5, 9]}
    large_model.write_random(folder, {**large_model.LLAMA_3_2_1B, **sizes, **more})


def test_both_parts_of_a_training_step_are_timed(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Gradient and update are timed after they are compiled, and compared with a square product."""
    _write_small(tmp_path)
    training_step.main([f"--checkpoint={tmp_path}", "--rows=2", "--source=6", "--target=3"])
    printed = capsys.readouterr().out
    assert "12 tokens, losses of 2 of 2 layers" in printed
    for name in ("gradient", "update"):
        assert re.search(rf"{name}: [\d.]+ s, \d+% of the rate of a square product; compiled in \d+ s", printed)


def test_a_large_models_files_are_those_of_a_model(tmp_path: pathlib.Path) -> None:
    """A small copy of a large model's files can be read: a file per layer in bfloat16, a tied head, a tokenizer."""
    _write_small(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    assert (checkpoint.config.num_decoder_layers, checkpoint.config.end_ids) == (2, (5, 9))
    assert checkpoint.config.tied_head
    assert checkpoint.vocabulary_path == tmp_path / "tokenizer.json"
    arrays = checkpoint.arrays.values()
    assert all(isinstance(array, StoredArray) and array.stored_dtype.name == "bfloat16" for array in arrays)
    large_model.write_prompts(tmp_path / "prompts.jsonl", 3, vocab_size=400)
    lengths = [len(json.loads(line)["input_ids"]) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert len(lengths) == 3
    assert all(20 <= length < 60 for length in lengths)


def test_rules_together_compares_outputs(
    model_and_data: tuple[pathlib.Path, pathlib.Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It reports the time of all rules at once, and fails if a rule's outputs are not those of its own sweep."""
    checkpoint, data = model_and_data
    flags = [f"--checkpoint={checkpoint}", f"--data={data}", "--thresholds=3", "--max_decode_length=5", "--runs=1"]
    assert rules_together.main([*flags, "--confidence=softmax,state"]) == 0
    printed = capsys.readouterr().out
    assert "3 prompts, 3 thresholds, 6 rules: softmax, state" in printed
    assert re.search(r"all at once: [\d.]+ s, [\d.]+ of the first alone, [\d.]+ of all", printed)
    swept = rules_together._swept

    def spoiled(model: Any, rules: Any, *others: Any, **more: Any) -> Any:
        results, seconds = swept(model, rules, *others, **more)
        if len(rules) > 1:
            for result in results.values():
                result.tokens[-1] += 1
        return results, seconds

    monkeypatch.setattr(rules_together, "_swept", spoiled)
    assert rules_together.main([*flags, "--confidence=softmax,state"]) == 1
    assert "outputs of every rule are NOT those of its own sweep" in capsys.readouterr().out
