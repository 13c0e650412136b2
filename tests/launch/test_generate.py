"""`calm-beam generate` from flags to answers."""

import gzip
import io
import json
import pathlib
import re
import shutil
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from calm_beam.checkpoints import Declared, load_checkpoint
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary
from calm_beam.launch.cli import main
from calm_beam.launch.generate.here import LayerPrinter
from calm_beam.manifest import write_manifest
from calm_beam.serving import Generator, token_texts
from calm_beam.serving.answer import exit_tests
from tests.builders import write_t5x
from tests.calm_beam.serving.builders import build_entry, build_served_manifest
from tests.pipelines import BROKEN_ID, write_model, write_rows, write_vocabulary

_TEXTS = ("the cat sees 3", "the owl", "hen hears the fox")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Holds a tiny model with a vocabulary, `model`, and a manifest of it."""
    folder = tmp_path_factory.mktemp("generate")
    model = write_model(folder / "model", vocabulary=write_vocabulary(folder / "v.model"))
    manifest = build_served_manifest(
        load_checkpoint(model),
        (build_entry(0.3), build_entry(None, delta=0.01)),
        vocabulary=Vocabulary(folder / "v.model"),
    )
    write_manifest(manifest, folder / "manifest.json")
    return folder


@pytest.fixture(scope="module")
def generator(folder: pathlib.Path) -> Generator:
    """A generator whose answers the command has to give."""
    return Generator.from_manifest(folder / "manifest.json", folder / "model", delta=0.1)


def _flags(folder: pathlib.Path, *more: str) -> list[str]:
    return ["generate", f"--manifest={folder}", f"--checkpoint={folder / 'model'}", "--delta=0.1", *more]


def test_a_prompt_is_answered(folder: pathlib.Path, generator: Generator, capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output gets the text alone; what was served and saved goes to stderr."""
    assert main(_flags(folder, f"--prompt={_TEXTS[0]}", "--verbose")) == 0
    printed = capsys.readouterr()
    answer = generator.generate(_TEXTS[0])
    assert printed.out == f"{answer.text}\n"
    memory, first, last = printed.err.splitlines()
    assert re.fullmatch(
        r"[\d.]+ KiB of weights(, [\d.]+ KiB for a second copy that native code reads)?, [\d.,]+ GiB left: "
        r"room for [\d,]+ tokens of prompts and outputs at a time",
        memory,
    )
    assert first == (
        "textual, token_f1, delta 0.1, epsilon 0.05 (threshold 0.3), calibrated at 3.00 of 4 layers per token"
    )
    layers = answer.layers_used / len(answer.tokens)
    saved = answer.layers_saved / (answer.layers_saved + answer.layers_used)
    tests = exit_tests(answer, generator.manifest) / len(answer.tokens)
    assert tests > 0
    assert re.fullmatch(
        re.escape(
            f"prompts: 1, of which too long and cut: 0; tokens: {len(answer.tokens)}, {layers:.2f} layers per token, "
            f"{saved:.0%} of the full model's saved; {tests:.2f} extra exit tests per token, "
        )
        + "[1-9][0-9,]* tokens a second, compiling included",
        last,
    )


def test_an_assumed_activation_is_named_where_models_differ(
    folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A declared activation is served as calibrated; without a declaration, the assumed one is printed."""
    write_t5x(tmp_path, load_checkpoint(folder / "model").arrays)
    shutil.copy(folder / "model" / "sentencepiece.model", tmp_path)
    declared = load_checkpoint(tmp_path, declared=Declared(activation="silu"))
    manifest = build_served_manifest(declared, (build_entry(0.3),), vocabulary=Vocabulary(folder / "v.model"))
    write_manifest(manifest, tmp_path / "manifest.json")
    command = ["generate", f"--manifest={tmp_path}", f"--checkpoint={tmp_path}", f"--prompt={_TEXTS[0]}"]
    assert main([*command, "--activation=silu"]) == 0
    capsys.readouterr()
    assert main(command) != 0
    assert (
        "Activation is assumed to be gelu, and relative max distance is assumed to be 128, as in T5"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.txt.gz"])
def test_a_file_of_lines_is_answered_line_by_line(
    folder: pathlib.Path,
    generator: Generator,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    """A file of lines gets one answer a line, in the order of the prompts, in batches too; cut prompts are named."""
    content = "\n".join([*_TEXTS, "the cat " * 40]) + "\n"
    path = tmp_path / name
    path.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    assert main(_flags(folder, f"--input={path}", "--batch_size=3")) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [generator.generate(text).text for text in (*_TEXTS, "the cat " * 40)]
    assert f"{path}, line 4: was longer than the manifest allows, and was cut" in printed.err
    assert "prompts: 4, of which too long and cut: 1;" in printed.err


def test_rows_are_written(
    folder: pathlib.Path, generator: Generator, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --output, every row of a JSONL file gets a row with all fields of the answer, under its id."""
    rows: list[dict[str, Any]] = [{"id": "a", "input": _TEXTS[0]}, {"id": "b", "input_ids": [5, 9, 1]}]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    output = tmp_path / "answers.jsonl"
    flags = _flags(folder, f"--input={data}", f"--output={output}")
    assert main(flags) == 0
    assert capsys.readouterr().out == ""
    prompts: list[str | list[int]] = [_TEXTS[0], [5, 9, 1]]
    for line, name, prompt in zip(output.read_text().splitlines(), "ab", prompts, strict=True):
        answer = generator.generate(prompt)
        assert json.loads(line) == {
            "id": name,
            "text": answer.text,
            "tokens": list(answer.tokens),
            "exit_layers": list(answer.exit_layers),
            "confidences": pytest.approx(list(answer.confidences), rel=0, abs=1e-5),
            "layers_used": answer.layers_used,
            "layers_saved": answer.layers_saved,
            "truncated": False,
            "finish_reason": "stop" if generator.has_ended(answer.tokens) else "length",
        }
    assert main(flags) == 2
    assert "exists already. Choose another file, or pass --overwrite." in capsys.readouterr().err
    assert main([*flags, "--overwrite"]) == 0


def test_every_format_gives_the_same_answers(
    folder: pathlib.Path, generator: Generator, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts are read as in calibration: in all formats, from several files, and by the given field name."""
    rows = [{"id": str(index), "question": text} for index, text in enumerate(_TEXTS)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    write_rows(tmp_path / "b.jsonl", rows)
    (tmp_path / "c").write_text("\n".join(_TEXTS) + "\n")
    answers = [generator.generate(text).text for text in _TEXTS]
    assert main(_flags(folder, f"--input={tmp_path}/[ab].*", "--inputs_field=question", "--batch_size=4")) == 0
    assert capsys.readouterr().out.splitlines() == [*answers, *answers]
    assert main(_flags(folder, f"--input={tmp_path}/c", "--data_format=text")) == 0
    assert capsys.readouterr().out.splitlines() == answers


def test_lines_of_standard_input_are_answered_as_they_come(
    folder: pathlib.Path,
    generator: Generator,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Lines of standard input are answered as they come; a bad line ends the command after earlier answers."""
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([*_TEXTS, "", "never asked"])))
    assert main(_flags(folder)) == 1
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [generator.generate(text).text for text in _TEXTS]
    assert "calm-beam generate: standard input, line 4 is empty." in printed.err


def test_a_line_that_is_no_text_is_named(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes that are not UTF-8 are read as surrogates; the line that has them is named, and the command ends."""
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{_TEXTS[0]}\na \udcff\n"))
    assert main(_flags(folder)) == 1
    assert "calm-beam generate: standard input, line 2: is not Unicode text" in capsys.readouterr().err


class _Terminal(io.StringIO):
    """Typed text."""

    def isatty(self) -> bool:
        return True


def test_who_types_may_try_again(
    folder: pathlib.Path,
    generator: Generator,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a terminal a bad prompt is reported and the next one is answered; the end of input ends the command."""
    monkeypatch.setattr("sys.stdin", _Terminal(f"\n{_TEXTS[0]}\n"))
    assert main(_flags(folder)) == 0
    printed = capsys.readouterr()
    assert "standard input, line 1 is empty." in printed.err
    assert printed.out.replace("> ", "").splitlines()[0] == generator.generate(_TEXTS[0]).text


def test_the_entry_has_to_be_named(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several entries need a name, and an entry that never exits is served as the full model."""
    flags = [flag for flag in _flags(folder, "--prompt=the cat") if flag != "--delta=0.1"]
    assert main(flags) == 2
    assert "there are 2 calibrations. Say which delta:\n  --delta=0.1\n  --delta=0.01\n" in capsys.readouterr().err
    assert main([*flags, "--delta=0.01"]) == 0
    printed = capsys.readouterr()
    assert "(never exit), calibrated at 4.00 of 4 layers per token" in printed.err
    assert "4.00 layers per token, 0% of the full model's saved; 0.00 extra exit tests per token, " in printed.err


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--prompt=a", "--input=b"], 2, "--prompt and --input both give prompts: leave one of them out."),
        (["--prompt=a", "--output=b.jsonl", "--show_layers"], 2, "--show_layers colours what is printed"),
        (["--output=b.jsonl"], 2, "--output is written as a whole: pass --prompt or --input with it."),
        (["--prompt=a", "--output=absent/b.jsonl"], 2, "the folder absent does not exist"),
        (["--input=absent.txt"], 2, "--input absent.txt: no such file."),
        (["--prompt=a", "--data_format=text"], 2, "--data_format belongs to --input, which is missing."),
        (["--inputs_field=a"], 2, "--inputs_field belongs to --input, which is missing."),
        (["--prompt= "], 2, "--prompt is empty; leave it out, or give it a value."),
        (["--prompt=a", "--batch_size=0"], 2, "expected a whole number of at least 1, got '0'"),
        (["--prompt=a", "--metric=rouge"], 2, "no calibration has metric=rouge, delta=0.1. The manifest has:"),
        (["--prompt=a", "--checkpoint=absent"], 2, "checkpoint absent: no such directory."),
        (["--prompt=a", "--vocabulary=absent"], 2, "vocabulary absent: cannot be read as a SentencePiece model"),
        (
            ["--prompt=a", "--dtype=bfloat16"],
            2,
            "--dtype=bfloat16: the manifest was calibrated with float32, and its thresholds hold for no other. Leave",
        ),
        (
            ["--prompt=a", "--matmul_precision=high"],
            2,
            "--matmul_precision=high: the manifest was calibrated with",
        ),
        (["--promt=a"], 2, "unknown flag --promt. Did you mean --prompt?"),
        (["--manifest=absent"], 2, "--manifest absent: no such file."),
    ],
)
def test_bad_usage_is_refused(
    folder: pathlib.Path, capsys: pytest.CaptureFixture[str], flags: list[str], status: int, message: str
) -> None:
    """Bad usage gets a message that says what is wrong, and nothing goes to standard output."""
    assert main(_flags(folder, *flags)) == status
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"the cat\n\nthe owl\n", "a.txt, line 2: is blank. Every line must be one prompt."),
        ("a.txt", b"", "a.txt: holds no prompts."),
        ("a.txt", b"the cat\n\xff\xfe", "a.txt, line 2: is not UTF-8 ("),
        ("a.csv", b"the cat\n", "a.csv: its suffix tells no format"),
        ("a.parquet", b"the cat\n", "a.parquet: cannot be read as Parquet ("),
        (
            "a.jsonl",
            b'{"input": "a"}\n{"inputs": "b"}\n',
            "a.jsonl, line 2: expected exactly one of the keys input and",
        ),
        ("a.txt.gz", b"the cat", "a.txt.gz: damaged gzip data after line 0 (Not a gzipped file"),
        (
            "a.jsonl",
            b'{"id": "x", "input_ids": [64]}\n',
            "a.jsonl, line 1 (x): token ids must be integers from 0 to 63, got 64.",
        ),
    ],
)
def test_bad_files_are_refused_before_anything_is_decoded(
    folder: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: bytes,
    message: str,
) -> None:
    """File and line of a bad row are named, and no prompt is answered, not even in good lines."""
    (tmp_path / name).write_bytes(content)
    assert main(_flags(folder, f"--input={tmp_path / name}")) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_a_broken_model_writes_nothing(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If a prompt has no output, the status is 1, the prompt is named, and no file is written."""
    model = write_model(tmp_path / "model", is_broken=True)
    write_manifest(build_served_manifest(load_checkpoint(model)), tmp_path / "manifest.json")
    data = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [5, 1]}, {"id": "bad", "input_ids": [BROKEN_ID, 1]}])
    output = tmp_path / "answers.jsonl"
    # The manifest's path of the model is used unless a flag gives another.
    assert main(["generate", f"--manifest={tmp_path}", "--prompt=a"]) == 2
    assert "checkpoint /models/tiny: no such directory." in capsys.readouterr().err
    flags = ["generate", f"--manifest={tmp_path}", f"--checkpoint={model}", f"--input={data}", f"--output={output}"]
    assert main(flags) == 1
    assert f"{data}, line 2 (bad) ([63, 1]): the model gave logits that are not finite" in capsys.readouterr().err
    assert not output.exists()


def test_a_manifest_that_was_changed_is_a_failure(
    folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A changed manifest is refused with status 1."""
    text = (folder / "manifest.json").read_text().replace('"delta": 0.1', '"delta": 0.2')
    (tmp_path / "manifest.json").write_text(text)
    assert main(["generate", f"--manifest={tmp_path}", f"--checkpoint={folder / 'model'}", "--prompt=a"]) == 1
    assert "changed after it was written" in capsys.readouterr().err


def test_layers_are_shown_as_numbers_without_colours(
    folder: pathlib.Path, generator: Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a terminal, every token is followed by its layer, and no escape sequence is printed."""
    assert main(_flags(folder, f"--prompt={_TEXTS[0]}", "--show_layers")) == 0
    legend, line = capsys.readouterr().out.splitlines()
    assert legend == "text[layer at which the token left, of 4]"
    answer = generator.generate(_TEXTS[0])
    texts = token_texts(answer.tokens, generator.vocabulary)
    assert line == "".join(f"{text or '·'}[{layer}]" for text, layer in zip(texts, answer.exit_layers, strict=True))


@pytest.mark.parametrize("no_color", [None, "", "1"])
def test_colours_are_those_of_the_legend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_color: str | None
) -> None:
    """On a terminal every layer has its own background, the same in the legend; NO_COLOR removes them."""
    for name in ("NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    printer = LayerPrinter(8)
    printer.print_legend()
    printer.print_output(["Un", " chat", "\n", "</s>"], [1, 8, 3, 1])
    legend, line = capsys.readouterr().out.splitlines()
    if no_color:
        assert (legend, line) == ("text[layer at which the token left, of 8]", "Un[1] chat[8]⏎[3]</s>[1]")
        return
    background = re.compile(r"48;2;(\d+;\d+;\d+)m([^\x1b]*)")
    colours = {text.strip(): colour for colour, text in background.findall(legend)}
    assert list(colours) == [str(layer) for layer in range(1, 9)]
    assert len(set(colours.values())) == 8
    shown = [(colours["1"], "Un"), (colours["8"], " chat"), (colours["3"], "⏎"), (colours["1"], "</s>")]
    assert background.findall(line) == shown
