"""`calm-beam convert`: the same model in another layout, written atomically."""

import json
import os
import pathlib
import re
import shlex

import numpy as np
import pytest
import safetensors.numpy

import calm_beam.launch.convert
from calm_beam.checkpoints import GenerationFacts, load_checkpoint
from calm_beam.inputs.vocabularies.vocabulary import open_vocabulary
from calm_beam.launch.cli import main
from tests.builders import build_arrays, build_config, train_vocabulary, write_hugging_face, write_t5x
from tests.calm_beam.checkpoints.decoder_only_folders import write_decoder_only
from tests.pipelines import CONFIG, write_model, write_vocabulary


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    """Gives a native model with its vocabulary."""
    return write_model(tmp_path / "model", vocabulary=write_vocabulary(tmp_path / "trained.model"))


def test_there_and_back(model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Native to T5X and back gives the same weights and vocabulary; stdout has the fingerprint."""
    t5x, native = tmp_path / "t5x", tmp_path / "native"
    assert main(["convert", f"--checkpoint={model}", f"--output={t5x}", "--layout=t5x", "--step=2000"]) == 0
    fingerprint = load_checkpoint(model).fingerprint()
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.splitlines() == [
        f"Read {model} (native).",
        f"Wrote {t5x / 'checkpoint_2000'} (t5x).",
        f"Fingerprint: {fingerprint}",
    ]
    assert sorted(os.listdir(t5x)) == ["checkpoint_2000", "sentencepiece.model"]
    assert main(["convert", f"--checkpoint={t5x}", f"--output={native}", "--layout=native"]) == 0
    assert f"Wrote {native} (native)." in capsys.readouterr().out
    assert load_checkpoint(native).fingerprint() == fingerprint
    for name in ("config.json", "sentencepiece.model"):
        assert (native / name).read_bytes() == (model / name).read_bytes()


def test_a_step_stays_what_it_was(tmp_path: pathlib.Path) -> None:
    """Without --step, a T5X step keeps its number, and a model without one becomes step 1."""
    write_t5x(tmp_path / "run", build_arrays(CONFIG, 0), step=40)
    for index, checkpoint in enumerate((tmp_path / "run", write_model(tmp_path / "model"))):
        output = tmp_path / f"output_{index}"
        assert main(["convert", f"--checkpoint={checkpoint}", f"--output={output}", "--layout=t5x"]) == 0
    assert os.listdir(tmp_path / "output_0") == ["checkpoint_40"]
    assert os.listdir(tmp_path / "output_1") == ["checkpoint_1"]


def test_from_hugging_face(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Hugging Face T5 is converted with its vocabulary, whose file keeps its name, which decides how it is read."""
    config = build_config(num_encoder_layers=1, tied_head=True, gated_mlp=False)
    source = write_hugging_face(tmp_path / "source", config, build_arrays(config, 0))
    (source / "spiece.model").write_bytes(b"pieces")
    output = tmp_path / "output"
    assert main(["convert", f"--checkpoint={source}", f"--output={output}", "--layout=native"]) == 0
    assert f"Read {source} (hugging_face)." in capsys.readouterr().out
    assert load_checkpoint(output).config == config
    assert load_checkpoint(output).fingerprint() == load_checkpoint(source).fingerprint()
    assert (output / "spiece.model").read_bytes() == b"pieces"
    assert not (output / "sentencepiece.model").exists()


def test_sentinels_go_along(tmp_path: pathlib.Path) -> None:
    """Sentinels in Hugging Face's tokenizer files, and added tokens, are carried to all layouts."""
    config = build_config(num_encoder_layers=1)
    source = write_hugging_face(tmp_path / "source", config, build_arrays(config, 0))
    train_vocabulary(source / "spiece.model")
    (source / "tokenizer_config.json").write_text('{"extra_ids": 5}')
    (source / "added_tokens.json").write_text('{"{": 53}')
    for layout in ("native", "hugging_face", "t5x"):
        output = tmp_path / layout
        assert main(["convert", f"--checkpoint={source}", f"--output={output}", f"--layout={layout}"]) == 0
        vocabulary = open_vocabulary(output / "spiece.model")
        assert (vocabulary.extra_ids, vocabulary.size, vocabulary.encode("{")) == (5, 54, [53])
        assert vocabulary.fingerprint == open_vocabulary(source / "spiece.model").fingerprint


def test_without_a_vocabulary(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model without a vocabulary is converted without one, and a message says so."""
    model = write_model(tmp_path / "model")
    for layout in ("native", "hugging_face", "t5x"):
        output = tmp_path / layout
        assert main(["convert", f"--checkpoint={model}", f"--output={output}", f"--layout={layout}"]) == 0
        assert "There is no vocabulary in or next to the model, so none was copied." in capsys.readouterr().out
        assert load_checkpoint(output).vocabulary_path is None


def test_rounding_is_told(model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Converting to float16 prints the new fingerprint together with the old one."""
    output = tmp_path / "half"
    flags = [f"--checkpoint={model}", f"--output={output}", "--layout=native", "--dtype=float16"]
    assert main(["convert", *flags]) == 0
    printed = capsys.readouterr().out
    before, after = load_checkpoint(model).fingerprint(), load_checkpoint(output).fingerprint()
    assert before != after
    assert f"Fingerprint: {after}\nWeights were rounded. Manifests of the model as it was ({before}) do" in printed
    again = tmp_path / "again"
    assert main(["convert", f"--checkpoint={output}", f"--output={again}", "--layout=native", "--dtype=float16"]) == 0
    assert "rounded" not in capsys.readouterr().out


def test_overwriting(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """With --overwrite, a model of the same layout and step is replaced, its vocabulary included."""
    other = write_model(tmp_path / "other", seed=1)
    for layout, flags in (("native", []), ("hugging_face", []), ("t5x", ["--step=5"])):
        output = tmp_path / layout
        for checkpoint in (model, other):
            command = ["convert", f"--checkpoint={checkpoint}", f"--output={output}", f"--layout={layout}", *flags]
            assert main([*command, "--overwrite"]) == 0
        assert load_checkpoint(output).fingerprint() == load_checkpoint(other).fingerprint()
        assert load_checkpoint(output).vocabulary_path is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "the following arguments are required: --checkpoint, --output, --layout"),
        (["--checkpoint={model}", "--output={tmp}/x", "--layout=orbax"], "argument --layout: invalid choice: 'orbax'"),
        (["--checkpoint={model}", "--output={tmp}/x", "--layout=native", "--dtyp=float16"], "Did you mean --dtype?"),
        (
            ["--checkpoint={model}", "--output={tmp}/x", "--layout=t5x", "--dtype=float16"],
            "--dtype=float16 is for --layout=native and hugging_face: T5X's is written in float32.",
        ),
        (
            ["--checkpoint={model}", "--output={tmp}/x", "--layout=native", "--step=3"],
            "--step=3 is for --layout=t5x: the native layout has no steps.",
        ),
        (
            ["--checkpoint={model}", "--output={tmp}/x", "--layout=hugging_face", "--step=3"],
            "--step=3 is for --layout=t5x: the hugging_face layout has no steps.",
        ),
        (
            ["--checkpoint={model}", "--output={tmp}/x", "--layout=t5x", "--step=0"],
            "argument --step: expected a whole number of at least 1, got '0'",
        ),
        (
            ["--checkpoint={tmp}/none", "--output={tmp}/x", "--layout=native"],
            "--checkpoint: checkpoint {tmp}/none: no such directory.",
        ),
        (
            ["--checkpoint={tmp}/notes", "--output={tmp}/x", "--layout=native"],
            "--checkpoint: checkpoint {tmp}/notes: no model here. Expected config.json with model.safetensors",
        ),
        (["--checkpoint=s3://bucket/model", "--output={tmp}/x", "--layout=native"], "--checkpoint: s3://bucket/model:"),
        (
            ["--checkpoint={model}", "--output=s3://bucket/x", "--layout=native"],
            "--output s3://bucket/x: of object stores only",
        ),
        (
            ["--checkpoint={model}", "--output={tmp}/notes/a.txt", "--layout=native"],
            "--output={tmp}/notes/a.txt: is a file, expected a folder or nothing.",
        ),
        (
            ["--checkpoint={model}", "--output={tmp}/notes", "--layout=native"],
            "--output={tmp}/notes: is not empty. Name another folder, or pass --overwrite.",
        ),
        (
            ["--checkpoint={model}", "--output={model}", "--layout=t5x", "--overwrite"],
            "--output={model}: holds a native model. --overwrite replaces models of the same layout and step only",
        ),
        (
            ["--checkpoint={model}", "--output={tmp}/run", "--layout=t5x", "--step=5", "--overwrite"],
            "--output={tmp}/run: holds a t5x model of step 40. --overwrite",
        ),
        (
            ["--checkpoint={model}", "--output={tmp}/run", "--layout=native", "--overwrite"],
            "--output={tmp}/run: holds a t5x model of step 40. --overwrite",
        ),
    ],
)
def test_bad_usage(
    flags: list[str], message: str, model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has status 2, says on stderr what was wrong, and writes nothing."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    write_t5x(tmp_path / "run", build_arrays(CONFIG, 1), step=40)
    before = sorted(tmp_path.rglob("*"))
    assert main(["convert", *(flag.format(tmp=tmp_path, model=model) for flag in flags)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("calm-beam convert: ")
    assert message.format(tmp=tmp_path, model=model) in printed.err
    assert sorted(tmp_path.rglob("*")) == before


def test_what_cannot_be_written(
    model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that cannot be made has status 1 and names it; so have weights and sizes that a layout cannot hold."""
    (tmp_path / "file").write_text("x")
    assert main(["convert", f"--checkpoint={model}", f"--output={tmp_path}/file/x", "--layout=native"]) == 1
    assert f"{tmp_path}/file/x" in capsys.readouterr().err
    arrays = build_arrays(CONFIG, 0)
    arrays["token_embedder/embedding"][3, 3] = np.float32(1e6)
    large = write_t5x(tmp_path / "large", arrays)
    output = tmp_path / "output"
    command = ["convert", f"--output={output}"]
    assert main([*command, f"--checkpoint={large}", "--layout=native", "--dtype=float16"]) == 1
    assert "token_embedder/embedding has values that are not finite in float16" in capsys.readouterr().err
    assert not output.exists()
    near = write_model(tmp_path / "near", config=build_config(relative_max_distance=64))
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.gin").write_text("network.T5Config.mlp_activations = ('swish', 'linear')")
    assert main(["convert", f"--checkpoint={near}", f"--output={run}", "--layout=t5x", "--overwrite"]) == 1
    assert "config.gin: is of another model, with activation silu" in capsys.readouterr().err
    assert os.listdir(run) == ["config.gin"]


def test_what_the_arrays_do_not_show(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both layouts carry the user's declarations about a T5X model, and assumptions are printed."""
    write_t5x(tmp_path / "run", build_arrays(CONFIG, 0))
    command = ["convert", f"--checkpoint={tmp_path / 'run'}"]
    assert main([*command, f"--output={tmp_path / 'plain'}", "--layout=native"]) == 0
    assert "is assumed to be 128, as in T5: there is no config.gin in" in capsys.readouterr().out
    declared = ["--activation=silu", "--relative_max_distance=64"]
    assert main([*command, *declared, f"--output={tmp_path / 'native'}", "--layout=native"]) == 0
    assert "Activation is silu: you said so.\nRelative max distance is 64: you said so.\n" in capsys.readouterr().out
    command = ["convert", f"--checkpoint={tmp_path / 'native'}"]
    assert main([*command, f"--output={tmp_path / 't5x'}", "--layout=t5x"]) == 0
    for folder in ("native", "t5x"):
        config = load_checkpoint(tmp_path / folder).config
        assert (config.activation, config.relative_max_distance) == ("silu", 64)
    assert main([*command, "--activation=relu", f"--output={tmp_path / 'no'}", "--layout=native"]) == 2
    assert "--checkpoint: activation is silu by" in capsys.readouterr().err


def test_transformers_tokens_are_kept(tmp_path: pathlib.Path) -> None:
    """Ids of beginning and padding stay as in a Hugging Face original, and are not made up where it has none."""
    source, output = write_decoder_only(tmp_path / "source"), tmp_path / "output"
    convert = ["convert", f"--checkpoint={source}", f"--output={output}", "--layout=hugging_face", "--overwrite"]
    assert main(convert) == 0
    config, generation = (json.loads((output / name).read_text()) for name in ("config.json", "generation_config.json"))
    assert (config["bos_token_id"], config["pad_token_id"]) == (None, None)
    assert generation == {"eos_token_id": 2}
    fields = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**fields, "bos_token_id": 1, "pad_token_id": 2}))
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 4], "pad_token_id": 3, "stop_strings": "w9"}')
    native = tmp_path / "native"
    assert main(["convert", f"--checkpoint={source}", f"--output={native}", "--layout=native"]) == 0
    # The folder itself, and by way of the native layout.
    for folder in (source, native):
        convert[1] = f"--checkpoint={folder}"
        assert main(convert) == 0
        files = ("config.json", "generation_config.json")
        config, generation = (json.loads((output / name).read_text()) for name in files)
        assert generation == {"eos_token_id": [2, 4], "bos_token_id": 1, "pad_token_id": 3, "stop_strings": ["w9"]}
        assert (config["bos_token_id"], config["pad_token_id"]) == (1, 3)
        assert load_checkpoint(folder).fingerprint() == load_checkpoint(output).fingerprint()
    write_decoder_only(tmp_path / "plain")
    plain = ["convert", f"--checkpoint={tmp_path / 'plain'}", f"--output={native}", "--layout=native", "--overwrite"]
    assert main(plain) == 0
    assert load_checkpoint(native).generation == GenerationFacts()


def test_arrays_are_left_out(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A head that only training needs is named with the flag that leaves it out, and then left out."""
    config = build_config(num_encoder_layers=1)
    source = write_hugging_face(tmp_path / "source", config, build_arrays(config, 0))
    tensors = safetensors.numpy.load_file(source / "model.safetensors")
    extra = {"cm_head.weight": np.full((2, 16), np.nan, np.float32), "cm_head.bias": np.zeros(2, np.float32)}
    safetensors.numpy.save_file({**tensors, **extra}, source / "model.safetensors")
    command = ["convert", f"--checkpoint={source}", f"--output={tmp_path / 'output'}", "--layout=native"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "unknown cm_head.bias, cm_head.weight" in error
    assert "calm-beam convert --drop_arrays=REGEX leaves them out" in error
    assert main([*command, r"--drop_arrays=cm_head\..*"]) == 0
    assert "Left out 2 arrays: cm_head.bias, cm_head.weight." in capsys.readouterr().out
    assert load_checkpoint(tmp_path / "output").config == config
    command[2] = f"--output={tmp_path / 'other'}"
    for regex, message in (
        ("cm_head", "No array's whole name matches 'cm_head'"),
        ("cm_head.*|shared.*", "shared.weight is missing"),
        ("(", "expected a regular expression, got '('"),
    ):
        assert main([*command, f"--drop_arrays={regex}"]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_the_commands_of_the_docstring(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands in the module's docstring run, one after the other."""
    config = build_config(num_encoder_layers=1)
    write_hugging_face(tmp_path / "flan-t5-small", config, build_arrays(config, 0))
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^    calm-beam (convert .+)$", calm_beam.launch.convert.__doc__ or "", re.MULTILINE)
    commands = [command for command in commands if ".gguf" not in command]
    assert len(commands) == 4
    free = write_hugging_face(tmp_path / "free_t5", config, build_arrays(config, 0))
    tensors = safetensors.numpy.load_file(free / "model.safetensors")
    extra = {"cm_head.bias": np.zeros(2, np.float32)}
    safetensors.numpy.save_file({**tensors, **extra}, free / "model.safetensors")
    for command in commands:
        assert main(shlex.split(command)) == 0
    assert load_checkpoint("t5x_model").step == 2000


def test_decoder_only_models_become_native_and_not_t5x(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The native layout holds both architectures with one fingerprint each; T5X's holds T5 only."""
    folder = write_decoder_only(tmp_path / "theirs")
    assert main(["convert", f"--checkpoint={folder}", f"--output={tmp_path / 'ours'}", "--layout=native"]) == 0
    assert load_checkpoint(tmp_path / "ours").fingerprint() == load_checkpoint(folder).fingerprint()
    assert main(["convert", f"--checkpoint={folder}", f"--output={tmp_path / 't5x'}", "--layout=t5x"]) == 1
    assert "T5X's layout holds T5s only, and this model is a llama." in capsys.readouterr().err
    assert not (tmp_path / "t5x").exists()
