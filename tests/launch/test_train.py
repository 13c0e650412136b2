"""`calm-beam train`: bad usage, a short run, and a killed one."""

import gzip
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import calm_beam.launch.train.run
from calm_beam.checkpoints import fingerprint, load_checkpoint
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary
from calm_beam.launch.cli import main
from calm_beam.launch.terminal import PlainConsole
from calm_beam.launch.train.request import TrainRequest
from calm_beam.training.config import ClassifierConfig, TrainingConfig
from calm_beam.training.train import train

_SIZES = [
    *("--vocab_size=28", "--emb_dim=16", "--num_heads=2", "--head_dim=8", "--mlp_dim=16"),
    *("--num_encoder_layers=1", "--num_decoder_layers=2"),
]
# All rows are cut to one length, so that one shape is compiled.
_SHORT = ["--steps=3", "--batch_tokens=16", "--max_input_length=4", "--max_target_length=4"]


@pytest.fixture
def data(tmp_path: pathlib.Path) -> pathlib.Path:
    """Nine rows, of which the first has two references."""
    nouns, others = ("cat", "dog", "owl"), ("mouse", "house", "bird")
    rows = [
        {"input": f"the {noun} sees a {other}", "references": [f"{other} {noun}"]} for noun in nouns for other in others
    ]
    rows[0]["references"] = ["mouse cat", "a mouse and a cat sees the house"]
    path = tmp_path / "rows.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def _train(*flags: str) -> int:
    return main(["train", *_SHORT, *flags])


def _log(folder: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]


def _die_after(monkeypatch: pytest.MonkeyPatch, step: int, error: BaseException) -> None:
    """Makes the next runs raise an error after the state of a step is written."""

    def dying_train(*arguments: Any, on_save: Any, **options: Any) -> Any:
        def save(state: Any) -> None:
            on_save(state)
            if state.step == step:
                raise error

        return train(*arguments, on_save=save, **options)

    monkeypatch.setattr(calm_beam.launch.train.run, "train", dying_train)


def test_a_short_run_writes_a_model(
    data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three steps write a model that loads, with its vocabulary; progress and losses go to stderr only."""
    flags = [
        f"--data={data}",
        f"--validation_data={data}",
        f"--output={tmp_path / 'model'}",
        "--stored_dtype=float16",
        *_SIZES,
    ]
    assert _train(*flags) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "on 10 pairs for 3 steps; 9 pairs to validate on" in printed.err
    assert "Cut 10 inputs to --max_input_length=4 and " in printed.err
    assert "step 3/3, loss" in printed.err
    assert "step 3: validation loss of the layers " in printed.err
    assert "Validation loss" in printed.err
    assert f"Wrote {tmp_path / 'model'}: the weights after step 3, the last." in printed.err
    assert [(row["step"], len(row["validation_losses"])) for row in _log(tmp_path / "model")] == [(3, 2)]
    assert _log(tmp_path / "model")[0].keys() >= {"loss", "target_tokens", "seconds"}
    assert [path.name for path in tmp_path.iterdir() if "training" in path.name] == []
    checkpoint = load_checkpoint(tmp_path / "model")
    assert (checkpoint.config.emb_dim, checkpoint.config.num_decoder_layers) == (16, 2)
    assert checkpoint.vocabulary_path is not None
    assert Vocabulary(checkpoint.vocabulary_path).size == 28
    # Stored in half precision: rounding again changes nothing.
    assert all(np.array_equal(array, np.asarray(array, np.float16)) for array in checkpoint.arrays.values())


def test_fine_tuning_keeps_the_vocabulary(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A run from a checkpoint writes other weights with the same sizes and the same vocabulary."""
    assert _train(f"--data={data}", f"--output={tmp_path / 'one'}", *_SIZES) == 0
    assert _train(f"--data={data}", f"--output={tmp_path / 'two'}", f"--checkpoint={tmp_path / 'one'}") == 0
    one, two = load_checkpoint(tmp_path / "one"), load_checkpoint(tmp_path / "two")
    assert one.config == two.config
    assert fingerprint(one.arrays) != fingerprint(two.arrays)
    assert one.vocabulary_path is not None
    assert two.vocabulary_path is not None
    assert one.vocabulary_path.read_bytes() == two.vocabulary_path.read_bytes()


@pytest.mark.parametrize("architecture", ["t5", "llama"])
def test_exits_are_given_norms_and_heads(
    architecture: str, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new model has exit norms and heads; a checkpoint without them gets them, and one with them keeps them."""
    sizes = (
        _SIZES
        if architecture == "t5"
        else ["--vocab_size=270", *_SIZES[1:5], "--num_kv_heads=2", "--num_decoder_layers=2"]
    )
    new = [*sizes, f"--architecture={architecture}"]
    plain, added, kept, begun = (tmp_path / name for name in ("plain", "added", "kept", "begun"))
    own = ["--exit_norm", "--exit_heads=separate"]
    assert _train(f"--data={data}", f"--output={begun}", *new, *own) == 0
    assert _train(f"--data={data}", f"--output={plain}", *new, "--exit_heads=shared") == 0
    assert "Exits begin" not in capsys.readouterr().err
    assert _train(f"--data={data}", f"--output={added}", f"--checkpoint={plain}", *own) == 0
    assert "Exits begin with the final norm and the output head" in capsys.readouterr().err
    assert _train(f"--data={data}", f"--output={kept}", f"--checkpoint={added}") == 0
    configs = [load_checkpoint(path).config for path in (plain, added, kept, begun)]
    assert [(config.exit_norms, config.exit_heads) for config in configs] == [(False, False)] + [(True, True)] * 3
    head = load_checkpoint(added).arrays["decoder/exit_heads_0/kernel"]
    assert not np.array_equal(head, load_checkpoint(added).arrays["decoder/logits_dense/kernel"])
    assert not np.array_equal(head, load_checkpoint(kept).arrays["decoder/exit_heads_0/kernel"])
    refused = _train(f"--data={data}", f"--output={tmp_path / 'no'}", f"--checkpoint={kept}", "--exit_heads=shared")
    assert refused == 2
    assert "--exit_heads=shared: the layers of --checkpoint have heads of their own" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--step=3"], "unknown flag --step. Did you mean --steps?"),
        (["--steps=few"], "argument --steps: invalid int value: 'few'"),
        (["--steps=0"], "--steps must be at least 1, got 0."),
        (["--dropout=1"], "--dropout must be in [0, 1), got 1.0."),
        (["--emb_dim=0"], "--emb_dim must be at least 1, got 0."),
        (["--dtype=float16"], "argument --dtype: invalid choice: 'float16' (choose from 'float32', 'bfloat16')"),
        (["--stored_dtype=bfloat16"], "argument --stored_dtype: invalid choice: 'bfloat16'"),
        (["--muon_learning_rate=0"], "--muon_learning_rate must be positive and finite, got 0.0."),
        (
            ["--learning_rate=0.1"],
            "--learning_rate: belongs to --optimizer=adafactor, this run has muon. Leave it out.",
        ),
        (
            ["--optimizer=adafactor", "--warmup_steps=0", "--adam_learning_rate=1"],
            "--adam_learning_rate, --warmup_steps: belongs to --optimizer=muon, this run has adafactor. Leave them",
        ),
        (["--optimizer=adafactor", "--learning_rate=nan"], "--learning_rate must be positive and finite, got nan."),
        (["--optimizer=adam"], "argument --optimizer: invalid choice: 'adam'"),
        (["--layer_weights=cubic"], "argument --layer_weights: invalid choice: 'cubic'"),
        (["--label_smoothing=1"], "--label_smoothing must be in [0, 1), got 1.0."),
        (["--z_loss=-1"], "--z_loss must be at least 0 and finite, got -1.0."),
        (["--save_every=-1"], "--save_every must be at least 0, got -1."),
        (["--validate_every=2"], "--validation_data is missing: --validate_every and --best_by need rows"),
        (["--best_by=rouge_l"], "--validation_data is missing: --validate_every and --best_by need rows"),
        (["--best_by_rows=5"], "--best_by_rows: belongs to a metric in --best_by. Leave it out."),
        (["--best_by_rows=0"], "argument --best_by_rows: expected a whole number of at least 1, got '0'"),
        (["--resume"], "--resume: there is no state of an interrupted run in"),
        (["--balance_classes"], "--balance_classes: not a flag of --stage=model. Leave it out."),
        # The default.
        (["--classifier_logits=2"], "--classifier_logits: not a flag of --stage=model. Leave it out."),
        (["--stage=classifier"], "--checkpoint is missing: --stage=classifier needs the model to train it for."),
        (["--vocab_size=9000"], "--vocab_size=9000: vocabulary: 19 texts do not give one of vocab_size=9000"),
        (["--data=nothing-*.jsonl"], "--data nothing-*.jsonl: no such file."),
        (
            ["--validation_data=s3://b/x.jsonl"],
            "--validation_data s3://b/x.jsonl: of object stores only",
        ),
        (
            ["--output=gs://b/model"],
            "--output=gs://b/model: training writes its states and its model to",
        ),
        (["--num_kv_heads=2"], "--num_kv_heads: --architecture=t5 has no such number. Leave it out."),
        (
            ["--architecture=llama", "--num_encoder_layers=2", "--relative_max_distance=8"],
            "--num_encoder_layers, --relative_max_distance: --architecture=llama has no such number. Leave them",
        ),
        (["--architecture=gpt"], "argument --architecture: invalid choice: 'gpt' (choose from 't5', 'llama')"),
        (["--architecture=llama", "--num_kv_heads=3"], "--num_kv_heads must divide num_heads, got 3 and 4"),
        (
            ["--architecture=llama", "--vocab_size=270", "--dropout=0.2"],
            "dropout is 0.2, but decoder-only models have none",
        ),
        (["--architecture=llama", "--vocab_size=9000"], "vocab_size=9000: they give "),
        (
            ["--rotating_layers=2", "--sampled_layers=1"],
            "--sampled_layers: belongs to runs without --rotating_layers. Leave it out.",
        ),
        (
            ["--exit_norm", "--num_decoder_layers=1"],
            "--exit_norm, --exit_heads: exit_norms is true, but needs at least 2 decoder layers",
        ),
        (["--exit_heads=tied"], "argument --exit_heads: invalid choice: 'tied'"),
        (["--layer_dropout=1"], "--layer_dropout must be in [0, 1), got 1.0."),
        (["--system=Be brief."], "--system belongs to --chat_template, which is missing."),
        (["--checkpoint=nowhere"], "--checkpoint: checkpoint nowhere: no such directory."),
        (["--checkpoint=nowhere", "--architecture=llama"], "--architecture: a model from --checkpoint has its own"),
        (["--checkpoint=nowhere", "--emb_dim=64"], "--emb_dim: a model from --checkpoint has its own sizes."),
    ],
)
def test_bad_usage_is_explained(
    flags: list[str],
    message: str,
    data: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each bad flag gives status 2, says what was wrong, and writes nothing."""
    assert _train(f"--data={data}", f"--output={tmp_path / 'model'}", *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--best_by=rouge_l"], "--best_by=rouge_l needs --validate_every: with one validation, at the end, there is"),
        (["--best_by=rogue_l", "--validate_every=1"], 'metric "rogue_l" is not known. Did you mean "rouge_l"?'),
    ],
)
def test_bad_choices_of_the_best_are_explained(
    flags: list[str], message: str, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A metric that does not exist, or that is measured only once, is refused."""
    assert _train(f"--data={data}", f"--validation_data={data}", f"--output={tmp_path / 'model'}", *flags) == 2
    assert message in capsys.readouterr().err


def test_missing_flags_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Without data or output, the status is 2 and what is missing is named."""
    assert main(["train"]) == 2
    assert "the following arguments are required: --output" in capsys.readouterr().err
    assert main(["train", "--output=x"]) == 2
    assert "--data is missing: files with the rows to learn from, or --seqio_task." in capsys.readouterr().err


def test_a_full_output_is_kept(data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder with files in it is refused unless --overwrite is given."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    flags = [f"--data={data}", f"--output={tmp_path / 'model'}", *_SIZES]
    assert _train(*flags) == 2
    assert "is not empty. Name another folder, or pass --overwrite." in capsys.readouterr().err
    assert _train(*flags, "--overwrite") == 0
    assert (tmp_path / "model" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON: "),
        ("[]", "line 2: expected a JSON object, got list"),
        ('{"input": " ", "references": ["a"]}', "line 2: input is empty"),
        ('{"input": "a"}', "line 2: training needs input as text, and references"),
        (
            '{"messages": [{"role": "user", "content": "a"}]}',
            "In a chat, the reference is the assistant's message after the user's.",
        ),
        ('{"input": "a", "references": [1]}', "line 2: references must be a list of texts"),
    ],
)
def test_bad_rows_are_located(
    line: str, message: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A malformed row gives status 2 and its file and line."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "a", "references": ["b"]}\n' + line + "\n")
    assert _train(f"--data={path}", f"--output={tmp_path / 'model'}") == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert message in error


def test_a_checkpoint_without_vocabulary_is_refused(
    data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fine-tuning needs the checkpoint's own vocabulary."""
    assert _train(f"--data={data}", f"--output={tmp_path / 'one'}", *_SIZES) == 0
    (tmp_path / "one" / "sentencepiece.model").unlink()
    assert _train(f"--data={data}", f"--output={tmp_path / 'two'}", f"--checkpoint={tmp_path / 'one'}") == 2
    assert "has no vocabulary. Put its sentencepiece.model or tokenizer.json next to it." in capsys.readouterr().err


def test_divergence_is_a_failure(
    data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loss that is no longer finite gives status 1, and no model is written."""
    flags = [f"--data={data}", f"--output={tmp_path / 'model'}", "--muon_learning_rate=1e38", *_SIZES]
    assert _train(*flags, "--adam_learning_rate=1e38") == 1
    assert "the training loss is" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / "model.training").exists()


def test_the_best_weights_by_a_metric_are_written(
    data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --best_by and a metric, each validation has a score, and the written step is the first of the best."""
    flags = [f"--data={data}", f"--validation_data={data}", f"--output={tmp_path / 'model'}", *_SIZES]
    options = ["--validate_every=1", "--best_by=token_f1", "--best_by_rows=2", "--optimizer=adafactor"]
    assert _train(*flags, *options, "--learning_rate=0.5", "--layer_weights=exponential", "--z_loss=1e-4") == 0
    scores = {row["step"]: row["validation_score"] for row in _log(tmp_path / "model")}
    assert list(scores) == [1, 2, 3]
    best = max(scores, key=lambda step: (scores[step], -step))
    expected = f"the weights after step {best}, the best of those validated by token_f1 ({scores[best]:.4f})."
    assert expected in capsys.readouterr().err


def test_a_failed_run_is_resumed(
    data: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A failed run keeps its states; --resume ends with the model and log of a run that did not fail."""
    flags = [f"--data={data}", f"--validation_data={data}", "--save_every=1", "--validate_every=2", *_SIZES]
    assert _train(*flags, f"--output={tmp_path / 'whole'}") == 0
    with monkeypatch.context() as patch:
        _die_after(patch, 2, OSError("no space left"))
        assert _train(*flags, f"--output={tmp_path / 'model'}") == 1
    assert not (tmp_path / "model").exists()
    folder = tmp_path / "model.training"
    assert sorted(path.name for path in folder.iterdir()) == [
        "state_00000001.safetensors",
        "state_00000002.safetensors",
        "training_log.jsonl",
    ]
    # Half a row, as a killed process may leave it.
    with open(folder / "training_log.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    capsys.readouterr()
    assert _train(*flags, f"--output={tmp_path / 'model'}") == 2
    assert "an interrupted run of it left states in" in capsys.readouterr().err
    log = (folder / "training_log.jsonl").read_bytes()
    assert _train(*flags, f"--output={tmp_path / 'model'}", "--resume", "--seed=5") == 2
    # Refused calls announce and change nothing.
    assert capsys.readouterr().err.startswith("calm-beam train: the interrupted run was another one (seed: 0, now 5)")
    assert (folder / "training_log.jsonl").read_bytes() == log
    assert _train(*flags, f"--output={tmp_path / 'model'}", "--resume") == 0
    assert "Going on after step 2." in capsys.readouterr().err
    assert not folder.exists()
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "model")]
    assert weights[0] == weights[1]
    logs = [[{**row, "seconds": None} for row in _log(tmp_path / name)] for name in ("whole", "model")]
    assert logs[0] == logs[1]
    seconds = [row["seconds"] for row in _log(tmp_path / "model")]
    assert seconds == sorted(seconds)


def test_overwriting_drops_the_states_of_an_earlier_run(
    data: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--overwrite starts again and removes old states, but only after all flags are found valid."""
    flags = [f"--data={data}", "--save_every=1", f"--output={tmp_path / 'model'}", *_SIZES]
    with monkeypatch.context() as patch:
        _die_after(patch, 2, OSError("no space left"))
        assert _train(*flags) == 1
    assert _train(*flags, "--overwrite", "--vocab_size=9000") == 2
    assert (tmp_path / "model.training" / "state_00000002.safetensors").exists()
    assert _train(*flags, "--overwrite") == 0
    assert not (tmp_path / "model.training").exists()


def test_a_damaged_newest_state_is_passed_over(
    data: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the newest state cannot be read, the run continues from the one before, and says so."""
    flags = [f"--data={data}", "--save_every=1", f"--output={tmp_path / 'model'}", *_SIZES]
    with monkeypatch.context() as patch:
        _die_after(patch, 2, OSError("no space left"))
        assert _train(*flags) == 1
    (tmp_path / "model.training" / "state_00000002.safetensors").write_bytes(b"damaged")
    assert _train(*flags, "--resume") == 0
    assert "Going on after step 1 (the newer state, of step 2, cannot be read)." in capsys.readouterr().err


def test_an_interrupt_says_how_to_go_on(
    data: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C after a saved state gives status 130 and names --resume; before that, no new files are left."""
    flags = [f"--data={data}", f"--output={tmp_path / 'model'}", *_SIZES]
    with monkeypatch.context() as patch:
        _die_after(patch, 2, KeyboardInterrupt())
        assert _train(*flags, "--save_every=1") == 130
    assert "interrupted. With --resume, the same command goes on after step 2." in capsys.readouterr().err

    def interrupted_before(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    def interrupted(*_: Any, on_start: Callable[[], None], **__: Any) -> None:
        on_start()
        raise KeyboardInterrupt

    monkeypatch.setattr(calm_beam.launch.train.run, "train", interrupted_before)
    assert _train(*flags, "--overwrite") == 130
    assert (tmp_path / "model.training" / "state_00000002.safetensors").exists()
    monkeypatch.setattr(calm_beam.launch.train.run, "train", interrupted)
    assert _train(*flags, "--overwrite") == 130
    assert not (tmp_path / "model.training").exists()


@pytest.mark.slow
def test_a_killed_run_is_resumed(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A process killed in the middle, at any instruction, loses nothing: resumed, it ends with the same bytes."""
    flags = ["--data", str(data), "--validation_data", str(data), *_SIZES, "--batch_tokens=16", "--max_input_length=4"]
    flags += ["--max_target_length=4", "--steps=400", "--save_every=20", "--validate_every=50"]
    assert main(["train", *flags, f"--output={tmp_path / 'whole'}"]) == 0
    code = 'import sys; from calm_beam.launch.cli import main; sys.exit(main(["train", *sys.argv[1:]]))'
    output = tmp_path / "model"
    process = subprocess.Popen([sys.executable, "-c", code, *flags, f"--output={output}"], stderr=subprocess.DEVNULL)
    folder = tmp_path / "model.training"
    while not list(folder.glob("state_000001*.safetensors")):
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not output.exists()
    assert main(["train", *flags, f"--output={output}", "--resume"]) == 0
    for name in ("model.safetensors", "config.json", "sentencepiece.model"):
        assert (output / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert [row["step"] for row in _log(output)] == [row["step"] for row in _log(tmp_path / "whole")]
    assert not folder.exists()


@pytest.mark.parametrize(("steps", "num_shapes"), [(None, 6), (40, 2), (250, 4)])
def test_short_runs_compile_fewer_batch_shapes(steps: int | None, num_shapes: int) -> None:
    """A run of a few dozen steps has two batch shapes, a long one the six that pad least."""
    request = TrainRequest(data="rows.jsonl", output="model", steps=steps)
    assert request.training_config().num_shapes == num_shapes


def test_defaults_are_those_of_the_settings() -> None:
    """Flags that are not given have the defaults of the settings classes of both stages."""
    request = TrainRequest(data="rows.jsonl", output="model")
    assert request.training_config() == TrainingConfig(steps=2000, save_every=500)
    both: dict[str, Any] = {
        "data": "rows.jsonl",
        "validation_data": "rows.jsonl",
        "checkpoint": "model",
        "output": "out",
    }
    assert TrainRequest(**both, stage="classifier").classifier_config() == ClassifierConfig()


def test_first_steps_are_not_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Until the first report, which compiling may hold back for minutes, a line now and then says what takes time."""
    monkeypatch.setattr(calm_beam.launch.train.run, "_SECONDS_BETWEEN_LINES", 0.05)
    with calm_beam.launch.train.run.StepBar(PlainConsole()) as bar:
        time.sleep(0.3)
        bar.show(1, 2, text="loss 1.0")
        shown = capsys.readouterr().out
        time.sleep(0.2)
    assert re.match(r"(compiling, then the first steps, for \d+ s\n)+step 1/2, loss 1.0, \d+ s left\n$", shown)
    assert capsys.readouterr().out == ""


def test_compiling_and_the_first_steps_are_told_apart(
    data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run says when it has compiled and how long its first step took; after the second, how long all others take."""
    assert _train(f"--data={data}", f"--output={tmp_path / 'model'}", *_SIZES, "--steps=4") == 0
    shown = capsys.readouterr().err
    phases = r"""compiling the first step
compiled in \d+ s; computing the first step
first step computed in \d+\.\d s; computing the second step
\d+\.\d s a step: about \d+ s for 2 further steps, without validating and compiling
"""
    assert re.search(phases, shown), shown


def test_a_forecast_is_without_compiling(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Seconds of a step leave out what was compiled meanwhile; long durations are in hours and minutes."""
    compiled = iter([100.0, 100.0, 170.0])
    with calm_beam.launch.train.run.StepBar(PlainConsole()) as bar:
        monkeypatch.setattr("calm_beam.launch.train.run.CompileTime.seconds", lambda _: next(compiled))
        now = [0.0]
        monkeypatch.setattr("calm_beam.launch.train.run.time.monotonic", lambda: now[0])
        bar.begin("compiling the first step")
        for done, now[0] in enumerate([100.0, 160.0, 290.0]):
            bar.show_first(done, 2000)
    assert capsys.readouterr().out.splitlines() == [
        "compiling the first step",
        "compiled in 100 s; computing the first step",
        "first step computed in 60.0 s; computing the second step",
        "60.0 s a step: about 33 h 18 min for 1,998 further steps, without validating and compiling",
    ]
