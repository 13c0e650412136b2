"""How-to pages: their commands run as shown, in order, on tiny models and data.

Commands that need Google Cloud are in `test_page_commands.py` alone.
"""

import gzip
import pathlib
import shutil

import numpy as np
import pytest

from calm_beam.checkpoints import write_native
from tests.builders import build_arrays, build_config, hugging_face_tensors, write_hugging_face
from tests.calm_beam.inputs.losses.builders import write_lm_eval
from tests.calm_beam.model.llama.builders import build_llama_arrays, build_llama_config, write_word_tokenizer
from tests.page_runs import CONFIG, run, run_shortened, shortened, write_checkpoint, write_place
from tests.pipelines import write_rows
from tests.snippets import ROOT, blocks, own_commands

_DOCS = ROOT / "docs"
pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The current folder, with data and a vocabulary."""
    monkeypatch.chdir(tmp_path)
    write_place(tmp_path)
    return tmp_path


def _filled_in(command: list[str], model: str) -> list[str]:
    """Returns a command with a model and data where the page leaves them out."""
    filled = [f"--checkpoint={model}", "--data=calibration-*.jsonl.gz"]
    return [each for word in command for each in (filled if word == "..." else [word])]


def _compressed(source: str, target: str) -> None:
    path = pathlib.Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(pathlib.Path(source).read_bytes()))


def test_on_a_laptop(place: pathlib.Path) -> None:
    """The laptop page's commands run; its shell loop is run by hand, and models of earlier parts are removed."""
    classified = build_config(num_encoder_layers=1, num_decoder_layers=2, exit_classifier=2)
    write_native(
        place / "model", classified, arrays=build_arrays(classified, 0), vocabulary_path=place / "sentencepiece.model"
    )
    write_checkpoint(place / "checkpoints" / "my_t5")
    _compressed("validation.jsonl", "validation-0.jsonl.gz")
    first, in_loop, again, *others = own_commands(_DOCS / "laptop.md")
    assert first == ["calibrate", "--confidence=softmax", "--output=demo"]
    for measure in ("softmax", "state", "classifier"):
        run(shortened([word.replace("$measure", measure) for word in in_loop]))
    run(again)
    shutil.rmtree("model")
    for command in others:
        run(shortened(command))


def test_about_models(place: pathlib.Path) -> None:
    """The page about models trains a T5 and its classifier."""
    write_checkpoint(place / "t5_small")
    run_shortened(_DOCS / "models.md")


def test_about_decoder_only_models(place: pathlib.Path) -> None:
    """The page about decoder-only models inspects, trains and calibrates a Llama on chats."""
    config = build_llama_config(vocab_size=40, max_positions=64, end_ids=(2,))
    tokenizer = write_word_tokenizer(place / "tokenizer.json", 40, ends=(2,))
    write_native(place / "llama", config, arrays=build_llama_arrays(config, 0), vocabulary_path=tokenizer)
    for name in ("prompts", "questions"):
        shutil.copy("validation.jsonl", f"{name}.jsonl")
    # The page's GGUF file is not here; tests of GGUF make their own.
    commands = [command for command in own_commands(_DOCS / "decoder_only.md") if ".gguf" not in " ".join(command)]
    *before, chats = commands
    for command in before:
        run(shortened(command))
    # With a template next to the tokenizer, every command would ask whether to use it.
    template = "{% for message in messages %}w11 {{ message.content }} {% endfor %}w12"
    (place / "model" / "chat_template.jinja").write_text(template)
    run(shortened(chats))


def test_an_instruct_model(place: pathlib.Path) -> None:
    """An instruct model is calibrated on chats, as its manifest says; the service has tests of its own."""
    config = build_llama_config(vocab_size=40, max_positions=64, end_ids=(2,), num_decoder_layers=9)
    tokenizer = write_word_tokenizer(place / "tokenizer.json", 40, ends=(2,))
    write_native(place / "smollm2", config, arrays=build_llama_arrays(config, 0), vocabulary_path=tokenizer)
    template = "{% for message in messages %}w11 {{ message.content }} {% endfor %}w12"
    (place / "smollm2" / "chat_template.jinja").write_text(template)
    asked = [{"role": "user", "content": f"w{index} w{index + 3} w4"} for index in range(12)]
    answers = [{"role": "assistant", "content": f"w{index + 1}"} for index in range(12)]
    write_rows(place / "questions.jsonl", [{"messages": [each]} for each in asked])
    for name in ("chats", "first", "train-0", "fresh"):
        write_rows(place / f"{name}.jsonl", [{"messages": list(pair)} for pair in zip(asked, answers, strict=True)])
    for command in own_commands(_DOCS / "llm.md"):
        if command[0] != "serve":
            run(shortened(command))


def test_about_commands(place: pathlib.Path) -> None:
    """The page about commands runs with its placeholders filled in; the pilot ran on another device than the page's."""
    write_checkpoint(place / "checkpoints" / "my_t5")
    for name in ("data", "prompts"):
        _compressed("validation.jsonl", f"{name}/rows.jsonl.gz")
    _compressed("validation.jsonl", "train-0.jsonl.gz")
    pathlib.Path("losses.txt").write_text("".join(f"{each}\n" for each in np.linspace(0, 0.1, 50)))
    for number, command in enumerate(own_commands(_DOCS / "commands.md")):
        command = _filled_in(command, "checkpoints/my_t5")
        if "--accelerator=nvidia-l4" in command:
            command.append("--speedup=10")
        if command[0] == "train":
            # So few texts do not give a vocabulary of the usual size.
            command.append("--vocab_size=64")
        if command[0] == "calibrate" and not any(word.startswith("--output") for word in command):
            command.append(f"--output=run-{number}")
        run(shortened(command))


def test_about_t5x(place: pathlib.Path) -> None:
    """T5X checkpoints are inspected and converted, one of them with weights that the model does not need."""
    write_checkpoint(place / "checkpoints" / "my_t5")
    arrays = build_arrays(CONFIG, 0)
    write_hugging_face(place / "free_t5", CONFIG, arrays)
    shutil.copy("sentencepiece.model", "free_t5/spiece.model")
    _add_tensor(place / "free_t5", "cm_head.weight", hugging_face_tensors(CONFIG, arrays))
    for command in own_commands(_DOCS / "t5x.md"):
        if "--checkpoint=free_t5" in command:
            shutil.rmtree("model")
        run(command)


def test_frequent_questions(place: pathlib.Path) -> None:
    """The commands in the answers of the FAQ run on the demo model."""
    run_shortened(_DOCS / "faq.md")


def _add_tensor(folder: pathlib.Path, name: str, tensors: dict[str, np.ndarray]) -> None:
    import safetensors.numpy

    (path,) = folder.glob("*.safetensors")
    safetensors.numpy.save_file({**tensors, name: np.zeros((3, 3), np.float32)}, path)


def _write_evaluated(settings: dict[str, float], ids: list[str]) -> None:
    """Writes losses of 0 and 1, given each setting's probability of loss."""
    generator = np.random.default_rng(0)
    lines = ["id,setting,loss"]
    for name in ids:
        for setting, wrong in settings.items():
            lines.append(f"{name},{setting},{int(generator.random() < wrong)}")
    pathlib.Path("evaluated-0.csv").write_text("\n".join(lines) + "\n")


def test_about_losses_of_others(
    place: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses in tables, logs of an evaluation, and rounds that end when enough is proved are certified.

    The page shows what its first command prints of the losses that its first code block makes.
    """
    page = _DOCS / "certify.md"
    # The sweep of the page on external decoders is certified there.
    commands = [command for command in own_commands(page) if "--outputs" not in " ".join(command)]
    from_losses, from_logs, first_round, next_round = commands
    exec(compile(blocks(page, "python")[0], str(page), "exec"), {})
    monkeypatch.setenv("COLUMNS", "80")
    capsys.readouterr()
    run(from_losses)
    printed = capsys.readouterr()
    shown = "".join(f"{line.rstrip()}\n" for line in printed.out.splitlines())
    assert f"```\n{shown.partition('All calibration entries')[0]}```" in page.read_text(encoding="utf-8")

    for name, wrong in (("bf16", 10), ("int8", 12), ("int4", 200)):
        write_lm_eval(place / "runs" / name, {"strict-match": [float(number >= wrong) for number in range(1000)]})
    run(from_logs)

    ids = [f"e{number}" for number in range(1000)]
    pathlib.Path("ids.txt").write_text("".join(f"{name}\n" for name in ids))
    run(first_round)
    told = pathlib.Path("rounds", "next_ids.txt")
    evaluated: list[str] = []
    while not pathlib.Path("rounds", "manifest.json").exists():
        evaluated += told.read_text().split()
        _write_evaluated({"16bit": 0.0, "8bit": 0.0, "6bit": 0.01, "4bit": 0.3}, evaluated)
        run(next_round)
    assert len(evaluated) < len(ids)
