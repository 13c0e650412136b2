"""The plan names the entry that is served; every command that serves uses it by default."""

import json
import pathlib

import pytest

import calm_beam as calm
from calm_beam.launch.cli import main
from calm_beam.manifest import Manifest, read_manifest
from calm_beam.serving import Generator
from tests.pipelines import SHORT_FLAGS, id_rows, write_model, write_rows


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny random model without a vocabulary."""
    return write_model(tmp_path_factory.mktemp("serve") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Thirty prompts of token ids."""
    return write_rows(tmp_path_factory.mktemp("serve") / "rows.jsonl", id_rows(30))


@pytest.fixture(scope="module")
def served(model: pathlib.Path, data: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The output of a calibration that named the second of its two entries."""
    output = tmp_path_factory.mktemp("serve") / "served"
    assert _calibrate(model, data, output, "--serve=textual,0.95") == 0
    return output


def _calibrate(model: pathlib.Path, data: pathlib.Path, output: pathlib.Path, *flags: str) -> int:
    asked = [f"--checkpoint={model}", f"--data={data}", f"--output={output}", *SHORT_FLAGS, "--metric=token_f1"]
    return main(["calibrate", *asked, "--delta=0.01,0.95", "--epsilon=0.3", *flags])


def _manifest(output: pathlib.Path) -> Manifest:
    return read_manifest(output / "manifest.json")


def test_the_named_entry_is_served(
    served: pathlib.Path, model: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`Generator`, `generate` and `monitor` take the named entry by default, and `inspect` shows which it is."""
    manifest = _manifest(served)
    assert manifest.plan is not None
    assert manifest.plan.serve == 1
    assert Generator.from_manifest(manifest, model).entry == manifest.calibrations[1]
    assert Generator.from_manifest(manifest, model, delta=0.01).entry == manifest.calibrations[0]
    prompt = json.dumps({"id": "a", "input_ids": [3, 4, 1]})
    (served / "prompts.jsonl").write_text(f"{prompt}\n")
    asked = [f"--manifest={served}", f"--checkpoint={model}", f"--input={served / 'prompts.jsonl'}"]
    assert main(["generate", *asked]) == 0
    assert "delta 0.95" in capsys.readouterr().err
    (served / "losses.txt").write_text("0\n0.5\n")
    assert main(["monitor", f"--manifest={served}", f"--losses={served / 'losses.txt'}"]) == 0
    assert "delta 0.95" in "".join(capsys.readouterr())
    assert main(["inspect", str(served)]) == 0
    assert (
        "The plan named the entry that is served before any loss was seen: textual, token_f1, delta 0.95, epsilon 0.3."
        in capsys.readouterr().out
    )
    page = (served / "report.html").read_text(encoding="utf-8")
    assert "The plan named the entry that is served before any loss was seen" in page
    assert json.loads(page.split('id="data">')[1].split("</script>")[0])["served"] == 1


def test_the_report_of_variants_opens_with_the_named_entry(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """The first sentence is about the entry that is served, whichever others were proved."""
    for delta in ("0.9", "0.95"):
        output = tmp_path / delta
        asked = ("--confidence=softmax,static", "--delta=0.9,0.95", f"--serve=textual,{delta}")
        assert _calibrate(model, data, output, *asked) == 0
        sentence = (output / "report.html").read_text(encoding="utf-8").split('<p class="sentence')[1].split("</p>")[0]
        assert f"{delta} token_f1" in sentence


def test_without_a_name_none_is_taken(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several separate entries give a warning before decoding, and `Generator` asks for one."""
    assert _calibrate(model, data, tmp_path / "out") == 0
    said = "2 promises hold each by itself, not all together, and picking one after seeing their losses voids it"
    assert said in capsys.readouterr().err
    with pytest.raises(calm.CalmBeamError, match="there are 2 calibrations"):
        Generator.from_manifest(tmp_path / "out" / "manifest.json", model)
    assert _calibrate(model, data, tmp_path / "joint", "--joint") == 0
    assert "hold each by itself" not in capsys.readouterr().err


def test_one_may_still_be_named_while_nothing_is_shown(
    model: pathlib.Path,
    data: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The warning says how to name an entry while the run decodes, and that works; of stored outputs, it does not."""
    with monkeypatch.context() as stopped:
        stopped.setattr("calm_beam.launch.calibrate.run.run_pipeline", _interrupt)
        assert _calibrate(model, data, tmp_path / "out") == 130
    how = "name it before, with --serve, or pass --joint (stop this run, and go on with that flag and --resume)."
    assert how in capsys.readouterr().err
    assert _calibrate(model, data, tmp_path / "out", "--resume", "--serve=textual,0.95") == 0
    manifest = read_manifest(tmp_path / "out" / "manifest.json")
    assert manifest.served is not None
    assert [each.answered for each in manifest.earlier_plans or ()] == [False]
    capsys.readouterr()
    asked = ["--metric=token_f1", "--delta=0.9,0.95", "--epsilon=0.3", f"--output={tmp_path / 'again'}"]
    assert main(["calibrate", f"--generations={tmp_path / 'out'}", *asked]) == 0
    printed = capsys.readouterr()
    assert "voids it: name it before, with --serve, or pass --joint.\n" in printed.err
    # Results of this data were shown before.
    assert "\nBefore you serve it, calibrate examples that no plan has seen: " in printed.out
    assert "calm-beam generate" not in printed.out


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("serve", "message"),
    [
        ("textual", "serve must name one entry, and textual fits 2 of those that are asked for"),
        ("risk,0.95", "fits none of those"),
        ("delta=x", "serve: delta must be a number, got 'x'."),
    ],
)
def test_what_names_no_entry_is_refused_before_anything_runs(
    model: pathlib.Path,
    data: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    serve: str,
    message: str,
) -> None:
    """A name that matches no entry gives status 2, and nothing is written."""
    assert _calibrate(model, data, tmp_path / "out", f"--serve={serve}") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_entry_is_named_from_python(model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Python names an entry by the same text; each group is served by its own entry of the named promise."""
    rows = [{**row, "language": "en" if index % 2 else "fr"} for index, row in enumerate(id_rows(30))]
    grouped = write_rows(tmp_path / "grouped.jsonl", rows)
    manifest = calm.calibrate(
        model=model,
        data=str(grouped),
        output=tmp_path / "out",
        guarantees=[calm.Guarantee("textual", "token_f1", delta=delta) for delta in (0.5, 0.95)],
        thresholds=(0.9, 0.5, 0),
        max_input_length=16,
        max_decode_length=4,
        group_key="language",
        serve="textual,0.95",
    )
    assert manifest.served == manifest.calibrations[1]
    assert (manifest.calibration(group="fr").group, manifest.calibration(group="fr").delta) == ("fr", 0.95)
