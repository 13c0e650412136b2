"""Defaults for prompts: length, chat template, and a vocabulary that is not needed."""

import json
import pathlib
import shutil
from typing import Any

import pytest

from calm_beam.checkpoints import write_native
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.errors import UsageError
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs import DataFiles
from calm_beam.inputs.vocabularies.chat_templates import chosen_chat
from calm_beam.launch.cli import main
from calm_beam.model.registry import default_input_length
from calm_beam.outputs.prepared import PreparedSweep, prepare_sweep
from calm_beam.outputs.request import SweepRequest
from calm_beam.training.config import ClassifierConfig, TrainingConfig
from calm_beam.transforms import Sweep
from tests.builders import build_config
from tests.calm_beam.model.llama.builders import build_llama_arrays, build_llama_config, write_word_tokenizer

_ROWS = [{"id": str(row), "input_ids": [5 + row, 9, 7, 2], "reference_ids": [[6, 8]]} for row in range(3)]
_CHAT = "{{ messages[-1].content }}"


def _model(folder: pathlib.Path, *, tokenizer: bool = True, **changes: Any) -> pathlib.Path:
    config = build_llama_config(**{"vocab_size": 64, "emb_dim": 16, "head_dim": 8, "mlp_dim": 32, **changes})
    vocabulary = write_word_tokenizer(folder.with_suffix(".json"), 64, ends=config.end_ids) if tokenizer else None
    if vocabulary is not None:
        shutil.move(vocabulary, folder.parent / "tokenizer.json")
        vocabulary = folder.parent / "tokenizer.json"
    write_native(folder, config, arrays=build_llama_arrays(config, 1), vocabulary_path=vocabulary)
    return folder


def _data(folder: pathlib.Path, rows: list[dict[str, Any]]) -> pathlib.Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _prepared(model: pathlib.Path, data: pathlib.Path, *, steps: int, **request: Any) -> PreparedSweep:
    settings = DecodeSettings(
        rule=ExitRule(), thresholds=(1.0,), max_input_length=512, max_decode_length=steps, task_prefix=""
    )
    asked = SweepRequest(model=str(model), settings=settings, **{"shortens_prompts": True, **request})
    return prepare_sweep(asked, DataFiles.found(str(data)))


@pytest.mark.parametrize(
    ("positions", "steps", "expected"), [(256, 64, 192), (96, 6, 90), (4096, 64, 512), (576, 64, 512), (8, 8, 1)]
)
def test_the_default_is_what_the_model_has_room_for(positions: int, steps: int, expected: int) -> None:
    """Prompts have 512 tokens or the positions that outputs leave; a T5 has no last position."""
    assert default_input_length(build_llama_config(max_positions=positions), steps=steps) == expected
    assert default_input_length(build_config(), steps=steps) == 512


def test_a_small_model_takes_short_prompts_without_flags(tmp_path: pathlib.Path) -> None:
    """Defaults that do not fit a model are reduced; flags that do not fit are refused."""
    model, data = _model(tmp_path / "model", max_positions=256), _data(tmp_path, _ROWS)
    assert _prepared(model, data, steps=64).settings.max_input_length == 192
    with pytest.raises(ValueError, match="the model has 256 positions, but prompts of up to 512 tokens and outputs"):
        _prepared(model, data, steps=64, shortens_prompts=False)
    with pytest.raises(ValueError, match="the model has 256 positions, but prompts of up to 1 tokens and outputs"):
        _prepared(model, data, steps=256)


def test_training_and_calibrating_have_one_default() -> None:
    """Both take 512 tokens; training refuses lengths that do not fit the model's positions."""
    assert TrainingConfig(steps=1).max_input_length == ClassifierConfig().max_input_length == 512
    assert Sweep(model="m", output="o", exits=ExitRule(), thresholds=(1.0,)).max_input_length is None


def test_ids_are_decoded_without_a_tokenizer(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`decode` writes ids without end-of-sequence tokens as text; `calibrate`, which compares texts, refuses."""
    model = _model(tmp_path / "model", tokenizer=False, max_positions=256, end_ids=(2, 7))
    data, output = _data(tmp_path, _ROWS), tmp_path / "out.jsonl"
    flags = (f"--checkpoint={model}", f"--data={data}", "--thresholds=0.5", "--max_decode_length=6", "--num_shards=1")
    assert main(["decode", *flags, f"--output={output}"]) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == 6
    for row in rows:
        assert row["text"] == " ".join(str(token) for token in row["tokens"] if token not in (2, 7))
    capsys.readouterr()
    asked = ("--delta=0.5", "--metric=token_f1", "--consistency=textual", f"--output={tmp_path / 'run'}")
    assert main(["calibrate", *flags, *asked]) == 2
    assert "which only its tokenizer keeps out of the texts that are compared" in " ".join(
        capsys.readouterr().err.split()
    )


def _with_template(folder: pathlib.Path, **config: Any) -> pathlib.Path:
    model = _model(folder / "model", max_positions=256)
    path = model / "tokenizer_config.json"
    fields = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**fields, "chat_template": _CHAT, **config}))
    return model


@pytest.mark.parametrize("command", ["calibrate", "decode", "evaluate", "suitability", "train", "classifier"])
def test_every_command_asks_whether_the_template_is_used(
    command: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a model has a chat template, a flag must say whether prompts become chats before anything starts."""
    model = _with_template(tmp_path)
    data = _data(tmp_path, [{"input": "w5 w9", "references": ["w6"]} for _ in range(3)])
    flags = {
        "calibrate": ("--delta=0.5", "--metric=token_f1", "--thresholds=0.5"),
        "decode": ("--thresholds=0.5",),
        "evaluate": ("--experiment=tradeoff", "--metric=token_f1", "--thresholds=0.5"),
        "suitability": (),
        "train": ("--steps=1",),
        "classifier": ("--stage=classifier", "--steps=1", f"--validation_data={data}"),
    }[command]
    name = "train" if command == "classifier" else command
    assert main([name, f"--checkpoint={model}", f"--data={data}", f"--output={tmp_path / 'out'}", *flags]) == 2
    assert "has a chat template, so say whether prompts become chats: --chat_template=model" in " ".join(
        capsys.readouterr().err.split()
    )
    assert not (tmp_path / "out").exists()


def test_a_template_in_a_file_of_its_own_counts(tmp_path: pathlib.Path) -> None:
    """A template in `chat_template.jinja` counts as one in the config; ids, and models without one, are exempt."""
    model = _model(tmp_path / "model", max_positions=256)
    texts = _data(tmp_path, [{"input": "w5 w9"}])
    assert _prepared(model, texts, steps=8).vocabulary is not None
    (model / "chat_template.jinja").write_text(_CHAT)
    with pytest.raises(UsageError, match=r"chat_template=\.\.\. in Python"):
        _prepared(model, texts, steps=8)
    for template, has_chat in (("model", True), ("none", False), (str(model / "chat_template.jinja"), True)):
        vocabulary = _prepared(model, texts, steps=8, chat_template=template).vocabulary
        assert vocabulary is not None
        assert (vocabulary.chat is not None) == has_chat
    assert _prepared(model, _data(tmp_path, _ROWS), steps=8).vocabulary is not None
    with pytest.raises(UsageError, match="--system belongs to --chat_template, which is missing or none"):
        chosen_chat("none", tokenizer=str(model / "tokenizer.json"), system="Be brief.")


@pytest.mark.parametrize("flag", ["task_prefix", "system", "cluster_key", "group_key"])
def test_text_that_no_file_can_hold_is_refused(
    flag: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes that are not UTF-8, lone surrogates in flags, are refused before a folder is made."""
    paths = (f"--checkpoint={tmp_path}", f"--data={tmp_path}", f"--output={tmp_path / 'out'}", "--delta=0.5")
    assert main(["calibrate", *paths, f"--{flag}=a\udcffb"]) == 2
    assert f"--{flag}=a\\udcffb is not UTF-8 text, or holds a NUL character" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=r"task_prefix must be text that UTF-8 can hold, got 'a\\udcffb'"):
        DecodeSettings(
            rule=ExitRule(), thresholds=(1.0,), max_input_length=8, max_decode_length=8, task_prefix="a\udcffb"
        )
