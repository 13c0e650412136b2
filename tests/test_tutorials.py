"""Tutorials and how-to pages: every command and all code on them run, on the models that they name or on tiny ones."""

import gzip
import json
import pathlib
import re
import shutil
import string
import sys
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from calm_beam.demo import embedded
from calm_beam.exits.measures import measure_named
from calm_beam.launch.cli import main
from calm_beam.metrics.registry import get_metric
from tests.builders import build_arrays, build_config, write_hugging_face, write_t5x
from tests.calm_beam.checkpoints.decoder_only_folders import write_decoder_only
from tests.calm_beam.model.llama.builders import write_word_tokenizer
from tests.pipelines import SHORT_FLAGS, text_rows, write_rows, write_vocabulary
from tests.snippets import ROOT, blocks, commands, own_commands

_DOCS = ROOT / "docs"
_CONFIG = build_config(num_encoder_layers=1, num_decoder_layers=2)
# What makes a command short, after its own flags: the last of a kind counts.
_SHORTER = {
    "train": ("--steps=2", "--max_input_length=16", "--max_target_length=8"),
    "calibrate": SHORT_FLAGS,
    "evaluate": ("--max_examples=6",),
    "suitability": ("--max_examples=6", "--max_input_length=32", "--max_decode_length=6"),
    "verify": ("--batch_size=4",),
}
# A promise of a model that was hardly trained may be found broken.
_STATUSES = {"verify": (0, 3)}


def _run(command: list[str]) -> None:
    assert main(command) in _STATUSES.get(command[0], (0,)), command


def _run_shortened(page: pathlib.Path) -> None:
    for command in own_commands(page):
        shorter = [*command, *_SHORTER.get(command[0], ())]
        if "--validate_every=500" in command:
            shorter.append("--validate_every=1")
        _run(shorter)


def _is_what_was_found(page: pathlib.Path, printed: str, folder: pathlib.Path, *, entries: int) -> None:
    """Checks that a page shows the head of what was printed, and of so many entries what a calibration came to."""
    start = printed.index("Lowest threshold")
    head = printed[start : printed.index("─", start)]
    assert "".join(f"{line.rstrip()}\n" for line in head.splitlines()[:-1]) in _text(page)
    found = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["calibrations"][:entries]
    above = r"^ (textual|risk) +([\d.]+) +(never exit|[\d.]+) +([\d.]+) +\d+% +([\d.]+) +[\d.]+$"
    row = above.replace("$", r"\n (\S+) +([\d.]+) +p = [\d.]+$")
    shown = re.findall(row, _text(page), re.MULTILINE)
    assert len(shown) == entries
    for entry, (consistency, delta, threshold, layers, risk, metric, epsilon) in zip(found, shown, strict=True):
        assert (entry["consistency"], entry["metric"]) == (consistency, metric)
        assert (entry["delta"], entry["epsilon"]) == (float(delta), float(epsilon))
        assert entry["threshold"] == (None if threshold == "never exit" else float(threshold))
        # Confidences move in their last digits from one processor to another.
        assert (entry["layers"], entry["risk"]) == (
            pytest.approx(float(layers), abs=0.02),
            pytest.approx(float(risk), abs=0.002),
        )


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with the calibration of the embedded model in `demo`, made by the first command of the tutorial."""
    folder = tmp_path_factory.mktemp("tutorial")
    first = own_commands(_DOCS / "tutorials" / "embedded.md")[0]
    assert first == ["calibrate", "--output=demo"]
    _run(["calibrate", f"--output={folder / 'demo'}"])
    return folder


@pytest.fixture
def place(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The current folder, with data and a vocabulary."""
    monkeypatch.chdir(tmp_path)
    # Some letter is in whatever a model that was hardly trained says.
    rows = [row | {"references": [*row["references"], " ".join(string.ascii_lowercase)]} for row in text_rows(12)]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    for name in ("train-0", "calibration-0"):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(content))
    for name in ("validation", "fresh"):
        write_rows(tmp_path / f"{name}.jsonl", rows[:10])
    write_vocabulary(tmp_path / "sentencepiece.model")
    return tmp_path


@pytest.mark.slow
def test_the_embedded_model(
    demo: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that the tutorial shows runs after its first command, and the table on it is what was found."""
    monkeypatch.chdir(demo)
    page = _DOCS / "tutorials" / "embedded.md"
    monkeypatch.setenv("COLUMNS", "80")
    for command in own_commands(page)[1:]:
        _run(command)
    _is_what_was_found(page, capsys.readouterr().out, demo / "demo", entries=8)
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec"), {})
    assert "voiture" in capsys.readouterr().out


@pytest.mark.slow
def test_layers_against_quality(demo: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tutorial about the paper's figure runs; its calibration is that of the first tutorial, under another name."""
    monkeypatch.chdir(tmp_path)
    for command in own_commands(_DOCS / "tutorial.md"):
        if command == ["calibrate", "--output=tutorial/calibration"]:
            shutil.copytree(demo / "demo", "tutorial/calibration")
        else:
            _run([*command, *(_SHORTER["evaluate"] if "--experiment=tradeoff" in command else ())])
    assert pathlib.Path("tutorial/tradeoff.svg").is_file()


@pytest.mark.slow
def test_the_readme(
    demo: pathlib.Path, place: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commands run in their order, in one folder; the first is that of the first tutorial, and prints its table."""
    (place / "data").mkdir()
    (place / "calibration-0.jsonl.gz").rename(place / "data" / "rows.jsonl.gz")
    write_t5x(place / "checkpoints" / "my_t5", build_arrays(_CONFIG, 0))
    shutil.copy("sentencepiece.model", "checkpoints/my_t5")
    page = ROOT / "README.md"
    first, *others = own_commands(page)
    assert first == ["calibrate", "--output=calibration"]
    shutil.copytree(demo / "demo", "calibration")
    for command in others:
        _run([*command, *_SHORTER.get(command[0], ())])
    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "80")
    # It prints the table that `calibrate` has printed.
    _run(["inspect", "calibration"])
    _is_what_was_found(page, capsys.readouterr().out, pathlib.Path("calibration"), entries=3)


@pytest.mark.slow
def test_a_t5x_checkpoint(place: pathlib.Path) -> None:
    """From a checkpoint of T5X to answers and back, by the commands of the tutorial."""
    write_t5x(place / "checkpoints" / "my_t5", build_arrays(_CONFIG, 0))
    shutil.copy("sentencepiece.model", "checkpoints/my_t5")
    _run_shortened(_DOCS / "tutorials" / "t5x.md")
    assert pathlib.Path("t5x_model/checkpoint_5000/checkpoint").is_file()


@pytest.mark.slow
def test_a_hugging_face_checkpoint(place: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same from folders of Hugging Face, a T5's and a Llama's, but for the commands that would download them."""
    page = _DOCS / "tutorials" / "hugging-face.md"
    write_decoder_only(place / "my_llama", vocab_size=40, eos_token_id=2)
    write_word_tokenizer(place / "my_llama" / "tokenizer.json", 40, ends=(2,))
    write_hugging_face(place / "my_t5", _CONFIG, build_arrays(_CONFIG, 0))
    shutil.copy("sentencepiece.model", "my_t5/spiece.model")
    others = [words[:2] for words in commands(page) if words[0] != "calm-beam"]
    assert others == [["hf", "download"], ["hf", "download"], ["pip", "install"]]
    _run_shortened(page)
    capsys.readouterr()
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec"), {})
    assert capsys.readouterr().out


@pytest.mark.slow
def test_serving_in_a_pipeline(
    demo: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts of files are answered by the command, and one by the pipeline of the page."""
    monkeypatch.chdir(demo)
    (demo / "prompts").mkdir()
    (demo / "prompts" / "some.jsonl.gz").write_bytes(gzip.compress(b'{"input": "Do they want to repair their car?"}\n'))
    page = _DOCS / "how-to" / "serve-in-a-pipeline.md"
    for command in own_commands(page):
        _run(command)
    (code,) = blocks(page, "python")
    exec(compile(code.replace('"model"', repr(str(embedded.MODEL))), str(page), "exec"), {})
    assert "voiture" in capsys.readouterr().out


@pytest.fixture
def module_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A folder whose modules can be imported, and are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("my_measures", "my_metrics"):
        sys.modules.pop(name, None)


def _written(page: str, folder: pathlib.Path) -> None:
    """Writes the module that a page shows, under the name in its first line."""
    (code,) = blocks(_DOCS / "how-to" / page, "python")
    (folder / code.splitlines()[0].removeprefix("# ")).write_text(code)


def test_a_measure_of_ones_own(module_folder: pathlib.Path) -> None:
    """The measure of the page is taken, and is more certain of what is further ahead."""
    _written("add-a-measure.md", module_folder)
    confidences = measure_named("my_measures:margin").confidence(jnp.array([[1.0, 0.9, 0.0], [9.0, 0.0, 1.0]]))
    assert 0 <= confidences[0] < confidences[1] <= 1


def test_measures_of_the_page_about_them(module_folder: pathlib.Path) -> None:
    """Both of docs/measures.md are taken: the one of logits, and the one of states."""
    _written("../measures.md", module_folder)
    of_logits, of_states = (measure_named(f"my_measures:{name}") for name in ("margin", "small_change"))
    confidences = of_logits.confidence(jnp.array([[1.0, 0.9, 0.0], [9.0, 0.0, 1.0]]))
    assert 0 <= confidences[0] < confidences[1] <= 1
    below = jnp.array([[1.0, 1.0], [1.0, 1.0]])
    confidences = of_states.confidence(jnp.array([[3.0, 0.0], [1.0, 1.1]]), below)
    assert 0 <= confidences[0] < confidences[1] <= 1


def test_a_metric_of_ones_own(module_folder: pathlib.Path) -> None:
    """The metric of the page is taken, and scores as it says."""
    _written("add-a-metric.md", module_folder)
    metric = get_metric("my_metrics:same_first_word")
    assert [metric("a cat", [text]) for text in ("a dog", "the cat", "a cat")] == [1, 0, 1]


@pytest.mark.parametrize(
    ("page", "printed"),
    [
        ("how-to/add-a-p-value.md", "wsr"),
        ("how-to/add-a-checkpoint-format.md", "T5Config"),
        ("explanation/integer-sums.md", ""),
    ],
)
def test_code_of_pages(page: str, printed: str, place: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Code that stands alone runs as it is."""
    names: dict[str, Any] = {"np": np}
    for code in blocks(_DOCS / page, "python"):
        exec(compile(code, page, "exec"), names)
    assert printed in capsys.readouterr().out


def _text(page: pathlib.Path) -> str:
    return page.read_text(encoding="utf-8")
