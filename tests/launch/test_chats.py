"""Calibrating and serving with a `tokenizer.json` and a chat template, both of which the manifest records."""

import json
import pathlib
import shutil

import pytest

import calm_beam
from calm_beam.checkpoints import load_checkpoint, write_native
from calm_beam.inputs.vocabularies.vocabulary import open_vocabulary
from calm_beam.launch.cli import main
from calm_beam.manifest import read_manifest
from calm_beam.serving import PromptError
from tests.builders import build_arrays, build_config
from tests.calm_beam.inputs.vocabularies.make_tokenizer_goldens import FOLDER
from tests.launch.serve.served import app_of, ready_client
from tests.pipelines import text_rows, write_rows

_CONFIG = build_config(vocab_size=208, num_encoder_layers=1)
_FLAGS = (
    "--thresholds=0.5,0",
    "--max_input_length=64",
    "--max_decode_length=6",
    "--batch_size=4",
    "--num_shards=1",
    "--metric=token_f1",
    "--consistency=textual",
    # A tolerance that all outputs meet.
    "--delta=0.99",
    "--epsilon=0.2",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Gives a T5 in a folder that has a `tokenizer.json` and no SentencePiece model."""
    folder = tmp_path_factory.mktemp("model")
    write_native(folder, _CONFIG, arrays=build_arrays(_CONFIG, 3), vocabulary_path=FOLDER / "zephyr" / "tokenizer.json")
    return folder


def _calibrate(model: pathlib.Path, output: pathlib.Path, *flags: str) -> int:
    data = write_rows(output.with_suffix(".jsonl"), text_rows(24))
    paths = (f"--checkpoint={model}", f"--data={data}", f"--output={output}")
    return main(["calibrate", *paths, *_FLAGS, *flags])


def test_a_model_is_written_with_all_of_its_tokenizer(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Tokenizer, config and template are copied; a copy of the copy, and one in place, are the same."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (model / name).read_bytes() == (FOLDER / "zephyr" / name).read_bytes()
    assert main(["convert", f"--checkpoint={model}", f"--output={tmp_path / 't5x'}", "--layout=t5x"]) == 0
    found = load_checkpoint(tmp_path / "t5x").vocabulary_path
    assert found == tmp_path / "t5x" / "tokenizer.json"
    assert open_vocabulary(found).fingerprint == open_vocabulary(model / "tokenizer.json").fingerprint
    shutil.copytree(model, tmp_path / "again")
    again = load_checkpoint(tmp_path / "again")
    write_native(tmp_path / "again", again.config, arrays=dict(again.arrays), vocabulary_path=again.vocabulary_path)
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def test_chats_are_part_of_the_promise(
    model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The manifest holds template and system prompt, so that serving makes the same prompts without flags."""
    assert _calibrate(model, tmp_path / "run", "--chat_template=model", "--system=Be brief.") == 0
    manifest = read_manifest(tmp_path / "run" / "manifest.json")
    assert manifest.vocabulary is not None
    chat = manifest.vocabulary.chat
    assert chat is not None
    assert chat.system == "Be brief."
    assert chat.template == json.loads((model / "tokenizer_config.json").read_text())["chat_template"]
    generator = calm_beam.Generator.from_manifest(manifest, model)
    assert generator.vocabulary is not None
    assert generator.vocabulary.chat == chat
    as_text = generator.generate("the cat sees 0")
    whole = "<|system|>\nBe brief.</s>\n<|user|>\nthe cat sees 0</s>\n<|assistant|>\n"
    plain = open_vocabulary(model / "tokenizer.json")
    assert as_text.tokens == generator.generate(plain.encode(whole)).tokens
    data = write_rows(tmp_path / "fresh.jsonl", [{"input": f"the fox sees {row}"} for row in range(100, 120)])
    verified = main(["verify", f"--manifest={tmp_path / 'run'}", f"--checkpoint={model}", f"--data={data}"])
    assert verified == 0, capsys.readouterr().err


def test_other_chats_are_other_generations(
    model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run is not resumed with another system prompt; without a chat, the manifest names none."""
    assert _calibrate(model, tmp_path / "run", "--chat_template=none") == 0
    text = (tmp_path / "run" / "manifest.json").read_text()
    assert '"chat"' not in text
    folders = {path.name for path in (tmp_path / "run" / "generations").iterdir()}
    assert _calibrate(model, tmp_path / "other", "--chat_template=model") == 0
    assert not folders & {path.name for path in (tmp_path / "other" / "generations").iterdir()}
    assert _calibrate(model, tmp_path / "none", "--system=x") == 2
    assert "has a chat template, so say whether prompts become chats" in capsys.readouterr().err
    assert _calibrate(model, tmp_path / "none", "--system=x", "--chat_template=none") == 2
    assert "--system belongs to --chat_template, which is missing or none." in capsys.readouterr().err
    assert _calibrate(model, tmp_path / "none", "--chat_template=model", "--max_input_length=8") != 0
    assert "prompts that a chat template made are not cut" in " ".join(capsys.readouterr().err.split())


def _turns(*texts: str) -> list[dict[str, str]]:
    """Returns messages of user and assistant in turn."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


@pytest.fixture(scope="module")
def of_turns(model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A calibration on chats, a third of them of one turn; the others have the same last text after other turns."""
    folder = tmp_path_factory.mktemp("turns")
    chats = [
        _turns(f"the cat sees {row}") if row % 3 == 0 else _turns(f"a {row}", "so", "and then") for row in range(12)
    ]
    data = write_rows(folder / "chats.jsonl", [{"messages": chat} for chat in chats])
    template = folder / "all.jinja"
    template.write_text(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}<|assistant|>"
    )
    flags = (f"--checkpoint={model}", f"--data={data}", f"--output={folder / 'run'}", f"--chat_template={template}")
    assert main(["calibrate", *flags, *_FLAGS, "--system=Be brief.", "--max_input_length=96"]) == 0
    return folder


def test_chats_of_several_turns_are_calibrated_and_served(
    model: pathlib.Path, of_turns: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The manifest counts them; serving takes chats of one turn and of several, each as the template makes it."""
    manifest = read_manifest(of_turns / "run" / "manifest.json")
    assert (manifest.data.examples, manifest.data.several_turns, manifest.data.duplicates) == (12, 8, 0)
    generator = calm_beam.Generator.from_manifest(manifest, model)
    turns = _turns("a 1", "so", "and then")
    answer = generator.generate(turns)
    whole = "<|system|>Be brief.</s><|user|>a 1</s><|assistant|>so</s><|user|>and then</s><|assistant|>"
    ids = tuple(open_vocabulary(model / "tokenizer.json").encode(whole))
    assert generator.request(turns, name="chat").ids == ids
    assert generator.request(turns[2:], name="chat").ids != ids
    assert generator.generate(_turns("the cat sees")) == generator.generate("the cat sees")
    for wrong, message in (
        (_turns("a", "so"), "ends with an assistant's message"),
        ([{"role": "tool"}], "the content"),
    ):
        with pytest.raises(PromptError, match=message):
            generator.generate(wrong)
    under = [f"--manifest={of_turns / 'run'}", f"--checkpoint={model}"]
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": turns}, {"input": "the cat"}])
    assert main(["generate", *under, f"--input={rows}", f"--output={tmp_path / 'answers.jsonl'}"]) == 0
    first = json.loads((tmp_path / "answers.jsonl").read_text().splitlines()[0])
    assert tuple(first["tokens"]) == answer.tokens
    fresh = write_rows(tmp_path / "fresh.jsonl", [{"messages": _turns("b", "so", f"why {row}")} for row in range(20)])
    assert main(["verify", *under, f"--data={fresh}"]) == 0, capsys.readouterr().err
    assert "in the calibration set too" not in capsys.readouterr().err
    assert main(["report", f"--calibration={of_turns / 'run'}", f"--output={tmp_path / 'page.html'}"]) == 0
    assert "assistant: so" in (tmp_path / "page.html").read_text()
    assert main(["inspect", str(of_turns / "run" / "manifest.json")]) == 0
    assert "with the system message 'Be brief.'; 8 of several turns." in " ".join(capsys.readouterr().out.split())


def test_a_second_turn_is_promised_nothing_by_chats_of_one(
    model: pathlib.Path, of_turns: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under a promise about chats of one turn, several are refused; so are data with several without a template."""
    assert _calibrate(model, tmp_path / "run", f"--chat_template={of_turns / 'all.jinja'}") == 0
    manifest = read_manifest(tmp_path / "run" / "manifest.json")
    assert (manifest.data.several_turns, manifest.takes_several_turns) == (None, False)
    generator = calm_beam.Generator.from_manifest(manifest, model)
    with pytest.raises(PromptError, match=r"the prompt: has earlier turns, and the calibrated chats had one turn each"):
        generator.generate(_turns("a", "so", "and then"))
    fresh = write_rows(tmp_path / "fresh.jsonl", [{"id": "later", "messages": _turns("a", "so", "and then")}])
    under = [f"--manifest={tmp_path / 'run'}", f"--checkpoint={model}"]
    assert main(["verify", *under, f"--data={fresh}"]) == 2
    assert "example later: has earlier turns, and the calibrated chats had" in " ".join(capsys.readouterr().err.split())
    flags = (f"--checkpoint={model}", f"--data={of_turns / 'chats.jsonl'}", f"--output={tmp_path / 'none'}")
    assert main(["calibrate", *flags, *_FLAGS, "--chat_template=none"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "chats.jsonl, line 2: is a chat of several turns, of which only a chat template makes a prompt" in said


def test_the_service_takes_the_turns_that_were_calibrated(model: pathlib.Path, of_turns: pathlib.Path) -> None:
    """`/v1/chat/completions` answers several turns, after the calibrated system message or without one."""
    generator = calm_beam.Generator.from_manifest(of_turns / "run" / "manifest.json", model)
    turns = _turns("a 1", "so", "and then")
    expected = generator.generate(turns).text
    with ready_client(app_of(generator)) as client:
        for messages in (turns, [{"role": "system", "content": "Be brief."}, *turns]):
            body = client.post("/v1/chat/completions", json={"messages": messages}).json()
            assert body["choices"][0]["message"]["content"] == expected
        for wrong in (turns[:2], turns[1:], [*turns, turns[0]], []):
            refused = client.post("/v1/chat/completions", json={"messages": wrong})
            assert refused.status_code == 400
            assert "messages must be of user and assistant in turn" in refused.json()["error"]["message"]
        long = client.post("/v1/chat/completions", json={"messages": _turns("a " * 3000, "so", "and then")})
        assert long.status_code == 413
