"""Every plan asked of the same outputs is listed, counted in later manifests, and shown."""

import json
import pathlib
import shutil

import apache_beam as beam
import pytest

import calm_beam as calm
from calm_beam.launch.cli import main
from calm_beam.manifest import EarlierPlan, read_manifest, read_setting_manifest
from calm_beam.manifest.plan_list import PlanList
from calm_beam.transforms import Calibrate, ReadGenerations, WriteManifest
from tests.calm_beam.inputs.losses.builders import ORDER, coin_rows, write_csv
from tests.pipelines import SHORT_FLAGS, id_rows, write_model, write_rows

_ASKED = ("--metric=token_f1", "--delta=0.6", "--epsilon=0.1")
_SHOWN = "The result of an earlier one was shown before."


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny random model without a vocabulary."""
    return write_model(tmp_path_factory.mktemp("plans") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Thirty prompts of token ids."""
    return write_rows(tmp_path_factory.mktemp("plans") / "rows.jsonl", id_rows(30))


@pytest.fixture(scope="module")
def whole(model: pathlib.Path, data: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The output of a first run."""
    output = tmp_path_factory.mktemp("plans") / "whole"
    assert _calibrate(model, data, output) == 0
    return output


@pytest.fixture
def outputs(whole: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the first run's output, with its list."""
    return pathlib.Path(shutil.copytree(whole, tmp_path / "outputs"))


def _calibrate(model: pathlib.Path, data: pathlib.Path, output: pathlib.Path, *flags: str) -> int:
    asked = [f"--checkpoint={model}", f"--data={data}", f"--output={output}", *SHORT_FLAGS, *_ASKED]
    return main(["calibrate", *asked, *flags])


def _again(outputs: pathlib.Path, output: pathlib.Path, *flags: str) -> tuple[EarlierPlan, ...]:
    assert main(["calibrate", f"--generations={outputs}", f"--output={output}", *_ASKED, *flags]) == 0
    return read_manifest(output / "manifest.json").earlier_plans or ()


def test_a_first_run_has_nothing_before_it(whole: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first run's manifest has no list fields, and the list has its plan, asked and answered."""
    manifest = read_manifest(whole / "manifest.json")
    assert "earlier_plans" not in manifest.to_dict()
    assert manifest.plan is not None
    (plan,) = PlanList(str(whole)).plans()
    assert (plan.plan, plan.command, plan.answered) == (manifest.plan.digest, "calibrate", True)
    assert main(["inspect", str(whole)]) == 0
    assert "plan on these outputs" not in capsys.readouterr().out


def test_every_other_plan_of_stored_outputs_is_counted(
    outputs: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another test is the second plan and a coarser grid the third, wherever they write; the terminal says so."""
    assert len(_again(outputs, tmp_path / "wsr", "--p_value=wsr")) == 1
    printed = capsys.readouterr()
    for text in (printed.err, printed.out):
        assert f"This is the 2nd plan on these outputs, by the list next to them. {_SHOWN}" in text
    (folder,) = (outputs / "generations").iterdir()
    earlier = _again(folder, tmp_path / "coarser", "--thresholds=0.5,0")
    assert [plan.command for plan in earlier] == ["calibrate", "calibrate --generations"]
    assert "This is the 3rd plan on these outputs" in capsys.readouterr().out


def test_the_same_plan_again_is_the_same_plan(outputs: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The same plan of stored outputs, asked again after others, is still the first."""
    assert _again(outputs, tmp_path / "same") == ()
    assert len(_again(outputs, tmp_path / "other", "--seed=1")) == 1
    assert _again(outputs, tmp_path / "once-more") == ()
    assert len(PlanList(str(outputs)).plans()) == 2


def test_overwriting_keeps_the_list(
    model: pathlib.Path, data: pathlib.Path, outputs: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """The same plan of the same data counts once; with more data, or with another seed, it is a new one."""
    assert _calibrate(model, data, outputs, "--overwrite") == 0
    assert read_manifest(outputs / "manifest.json").earlier_plans is None
    more = write_rows(tmp_path / "more.jsonl", id_rows(40))
    assert _calibrate(model, more, outputs, "--overwrite") == 0
    assert len(read_manifest(outputs / "manifest.json").earlier_plans or ()) == 1
    assert _again(outputs, tmp_path / "same") == read_manifest(outputs / "manifest.json").earlier_plans
    assert _calibrate(model, more, outputs, "--overwrite", "--seed=1") == 0
    assert len(read_manifest(outputs / "manifest.json").earlier_plans or ()) == 2


def test_a_removed_list_is_made_of_the_manifest(outputs: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Outputs without a list, as of earlier versions, get one from the manifest next to them."""
    shutil.rmtree(outputs / "plans")
    (before,) = _again(outputs, tmp_path / "other", "--seed=1")
    manifest = read_manifest(outputs / "manifest.json")
    assert manifest.plan is not None
    assert (before.plan, before.asked, before.answered) == (manifest.plan.digest, manifest.created, True)


def test_a_damaged_list_stops_the_run(
    outputs: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A damaged list stops the run, since earlier plans cannot be counted."""
    (outputs / "plans" / "00001.json").write_text("{}")
    asked = [f"--generations={outputs}", f"--output={tmp_path / 'no'}", "--delta=0.2"]
    assert main(["calibrate", *asked]) == 2
    assert "The list of plans shows what was asked of these outputs: restore it" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_a_run_that_showed_nothing_does_no_harm(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan that ended before a result is listed, and later manifests say that it has shown nothing."""
    twice = write_rows(tmp_path / "twice.jsonl", [*id_rows(3), id_rows(1)[0]])
    assert _calibrate(model, twice, tmp_path / "out") == 1
    assert _calibrate(model, data, tmp_path / "out") == 0
    assert "No result of the earlier one was shown, so the promises stand." in capsys.readouterr().out


def test_evaluating_outputs_is_asking_them(outputs: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Evaluating repeated splits shows losses, so a later plan is the second; the same splits count once."""
    own = ("--trials=3", "--delta=0.3", "--metric=token_f1", "--consistency=textual")
    for name in ("one", "two"):
        assert main(["evaluate", f"--generations={outputs}", f"--output={tmp_path / name}", *own]) == 0
    earlier = _again(outputs, tmp_path / "other", "--seed=1")
    assert [(plan.command, plan.answered) for plan in earlier] == [("calibrate", True), ("evaluate", True)]


def test_joint_guarantees_are_one_plan(model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Promises declared together in one call are one plan."""
    assert _calibrate(model, data, tmp_path / "out", "--joint", "--delta=0.2,0.4,0.6", "--metric=token_f1,rouge_l") == 0
    assert read_manifest(tmp_path / "out" / "manifest.json").earlier_plans is None


def test_sequential_runs_keep_their_place_under_another_rule(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Another stopping rule is the same plan; another test of all the data afterwards is a new one."""
    rounds = ("--sequential", "--round_examples=8", "--num_shards=10")
    assert _calibrate(model, data, tmp_path / "out", *rounds, "--stop_at_layers=3.9") == 0
    assert _calibrate(model, data, tmp_path / "out", *rounds, "--resume") == 0
    manifest = read_manifest(tmp_path / "out" / "manifest.json")
    assert manifest.sequential is not None
    assert (len(manifest.sequential.continues), manifest.earlier_plans) == (1, None)
    assert len(_again(tmp_path / "out", tmp_path / "other")) == 1


def test_a_confirmed_run_is_one_plan(model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A run with a holdout is one plan, by command and from Python; with another seed it is a second one."""
    assert _calibrate(model, data, tmp_path / "out", "--holdout_share=0.4") == 0
    assert read_manifest(tmp_path / "out" / "manifest.json").earlier_plans is None
    guarantee = calm.Guarantee("textual", "token_f1", delta=0.6, epsilon=0.1)
    for seed, earlier in ((0, 0), (1, 1)):
        manifest = calm.calibrate(
            model=model,
            data=str(data),
            output=tmp_path / "python",
            guarantees=[guarantee],
            thresholds=(0.9, 0.5, 0),
            max_input_length=16,
            max_decode_length=4,
            holdout_share=0.4,
            seed=seed,
            overwrite=True,
        )
        assert len(manifest.earlier_plans or ()) == earlier
        assert manifest.plan is not None
        assert manifest.plan.digest in {plan.plan for plan in PlanList(str(tmp_path / "python")).plans()}


def test_pipelines_of_ones_own_are_counted(outputs: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """`ReadGenerations` and `Calibrate` in a user's pipeline add to the same list."""
    for number, delta in enumerate((0.2, 0.3, 0.3), start=1):
        guarantee = calm.Guarantee("textual", "token_f1", delta=delta)
        with beam.Pipeline() as pipeline:
            tests = Calibrate([guarantee])
            _ = pipeline | ReadGenerations(str(outputs)) | tests | WriteManifest(str(tmp_path / str(number)))
        earlier = read_manifest(tmp_path / str(number) / "manifest.json").earlier_plans or ()
        assert len(earlier) == min(number, 2)


def test_what_inspect_and_the_report_show(
    outputs: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both show the plan's number; the first manifest says how many plans came after it."""
    (before,) = _again(outputs, tmp_path / "other", "--seed=1")
    assert "This is the 2nd plan on these outputs" in (tmp_path / "other" / "report.html").read_text(encoding="utf-8")
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "other")]) == 0
    printed = capsys.readouterr().out
    assert f"This is the 2nd plan on these outputs, by the list next to them. {_SHOWN}" in printed
    assert f"  {before.plan}, by calibrate, {before.asked}\n" in printed
    assert main(["inspect", str(outputs)]) == 0
    assert "1 more plan was asked of these outputs since." in capsys.readouterr().out


def _certify(losses: pathlib.Path, *flags: str) -> tuple[EarlierPlan, ...]:
    output = losses.parent / "certification"
    order = f"--order={','.join(ORDER)}"
    assert main(["certify", f"--losses={losses}", f"--output={output}", order, "--delta=0.1", *flags]) == 0
    return read_setting_manifest(output / "manifest.json").earlier_plans or ()


def test_certifications_are_counted(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Losses are identified by content: the same question counts once, with more losses again."""
    losses = write_csv(tmp_path / "losses.csv", coin_rows(300))
    assert _certify(losses) == ()
    assert _certify(losses, "--overwrite") == ()
    assert len(_certify(losses, "--overwrite", "--p_value=wsr")) == 1
    write_csv(losses, coin_rows(400))
    assert [plan.command for plan in _certify(losses, "--overwrite")] == ["certify", "certify"]
    assert "This is the 3rd plan on these losses" in capsys.readouterr().out
    page = (tmp_path / "certification" / "report.html").read_text(encoding="utf-8")
    assert "This is the 3rd plan on these losses" in page
    assert main(["inspect", str(tmp_path / "certification")]) == 0
    assert "This is the 3rd plan on these losses" in capsys.readouterr().out


def test_sequential_certifications_are_counted(tmp_path: pathlib.Path) -> None:
    """All calls with one ledger are one plan, whatever the rule; a new ledger is a new plan."""
    ids = tmp_path / "ids.txt"
    ids.write_text("".join(f"e{number}\n" for number in range(300)))
    losses = write_csv(tmp_path / "losses.csv", coin_rows(300))
    rounds = ("--sequential", f"--ids={ids}", "--round_examples=50")
    assert _certify(losses, *rounds, "--stop_at_setting=8bit") == ()
    assert _certify(losses, *rounds, "--resume") == ()
    assert len(_certify(losses, *rounds, "--overwrite")) == 1
    assert len(_certify(losses, "--overwrite")) == 2


def test_lists_hold_no_losses(outputs: pathlib.Path) -> None:
    """A list's file holds the question, its data, the command and the time, but no losses."""
    content = json.loads((outputs / "plans" / "00001.json").read_text(encoding="utf-8"))
    assert sorted(content) == [
        "answered",
        "command",
        "data",
        "decodes",
        "digest",
        "number",
        "plan",
        "previous",
        "schema",
        "tests",
        "time",
    ]
