"""`--group_key` from flags to files, and the commands on a manifest with groups."""

import csv
import dataclasses
import json
import pathlib
import shutil

import pyarrow.parquet
import pytest

from calm_beam.calibration.guarantee import Guarantee
from calm_beam.errors import UsageError
from calm_beam.launch.calibrate.command import calibrate
from calm_beam.launch.cli import main
from calm_beam.manifest import Manifest, ManifestError, content_digest, read_manifest
from calm_beam.metrics.squad import token_f1
from calm_beam.outputs import read_generations
from calm_beam.serving import Generator, LossProbe
from calm_beam.storage import joined
from tests.calm_beam.report.pages import page_data
from tests.pipelines import SETTINGS, SHORT_FLAGS, id_rows, without_time, write_model, write_rows

_ROWS = 48
_ASKED = ("--metric=token_f1", "--delta=0.5", "--epsilon=0.2")


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def _language(index: int) -> str:
    """Returns a group; a sixteenth of the prompts are of one too small to prove anything."""
    return "fr" if index % 16 == 3 else "en"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny random model without a vocabulary."""
    return write_model(tmp_path_factory.mktemp("groups") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Prompts of token ids in two groups, one of them tiny."""
    rows = [{**row, "language": _language(index)} for index, row in enumerate(id_rows(_ROWS))]
    return write_rows(tmp_path_factory.mktemp("groups") / "rows.jsonl", rows)


@pytest.fixture(scope="module")
def joint(model: pathlib.Path, data: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The output of a joint calibration of both groups."""
    output = tmp_path_factory.mktemp("groups") / "joint"
    assert _calibrate(model, data, output, "--joint") == 0
    return output


def _calibrate(model: pathlib.Path, data: pathlib.Path, output: pathlib.Path, *flags: str) -> int:
    return main(
        [
            "calibrate",
            f"--checkpoint={model}",
            f"--data={data}",
            f"--output={output}",
            "--group_key=language",
            *SHORT_FLAGS,
            *_ASKED,
            *flags,
        ]
    )


def _manifest(output: pathlib.Path) -> Manifest:
    return read_manifest(output / "manifest.json")


def test_each_group_has_its_own_entry(joint: pathlib.Path) -> None:
    """Losses, n and layers of an entry are those that its group's generations show; all entries share epsilon."""
    manifest = _manifest(joint)
    assert [(group.name, group.examples) for group in manifest.data.groups or ()] == [("en", 45), ("fr", 3)]
    assert manifest.plan is not None
    assert (manifest.plan.group_key, manifest.plan.joint_epsilon) == ("language", 0.2)
    assert [(entry.group, entry.epsilon) for entry in manifest.calibrations] == [
        (None, 0.2 / 3),
        ("en", 0.2 / 3),
        ("fr", 0.2 / 3),
    ]
    stored = [item for path in joint.glob("generations/*/*.parquet") for item in read_generations(path)]
    for entry in manifest.calibrations:
        members = [item.outputs for item in stored if entry.group in (None, item.example.group)]
        for step in entry.path:
            lane = 1 + SETTINGS.thresholds.index(step.threshold)
            losses = [1 - token_f1(outputs[lane].text, [outputs[0].text]) for outputs in members]
            layers = [layer for outputs in members for layer in outputs[lane].exit_layers]
            assert step.n == len(members)
            assert step.risk == pytest.approx(sum(losses) / len(losses), abs=1e-9)
            assert step.layers == pytest.approx(sum(layers) / len(layers))
    whole, large, tiny = manifest.calibrations
    assert whole.threshold is not None
    assert large.threshold is not None
    assert tiny.threshold is None
    assert "An entry of a group, which language names" in manifest.guarantee


def test_terminal_table_and_report_know_groups(joint: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The risk table has a column of groups, `inspect` names them, and the report shows each group's own losses."""
    with (joint / "risk_table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["group"] for row in rows[:: len(SETTINGS.thresholds)]] == ["", "en", "fr"]
    assert main(["inspect", str(joint)]) == 0
    shown = capsys.readouterr().out
    assert "Groups by language: en (45 examples), fr (3 examples)." in shown
    assert "\n fr " in shown
    page = page_data((joint / "report.html").read_text(encoding="utf-8"))
    assert [objective["group"] for objective in page["objectives"]] == [None, "en", "fr"]
    for place, objective in enumerate(page["objectives"]):
        of_group = rows[place * len(SETTINGS.thresholds) :]
        assert objective["risks"][1:] == [float(row["risk"]) for row in of_group[: len(SETTINGS.thresholds)]]
        assert page["entries"][place]["objective"] == place
    assert [entry["units"] for entry in page["entries"]] == [48, 45, 3]
    assert "".join(page["entries"][1]["sentence"]).startswith("For prompts of group en, with probability at least ")
    assert "".join(page["entries"][2]["sentence"]).startswith(
        "For prompts of group fr, never exit: from 3 calibration examples of the group, no threshold"
    )


def test_groups_are_told_before_the_plan(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line names the groups; a finished run is not run again, and one that lost a shard is."""
    output = tmp_path / "out"
    assert _calibrate(model, data, output, "--verbose") == 0
    printed = capsys.readouterr()
    told = printed.err.splitlines()
    groups = told.index("2 groups by language: en (45 examples), fr (3 examples)")
    assert [line.startswith("plan sha256:") for line in told].index(True) > groups
    assert "48 examples of 2 groups in" in printed.out
    assert "Mean loss at every threshold, group fr" in " ".join(printed.out.split())
    first = without_time(_manifest(output))
    assert _calibrate(model, data, output, "--resume") == 0
    assert "is finished; nothing is left to do" in capsys.readouterr().err
    (output / "manifest.json").unlink()
    next(output.glob("generations/*/complete.json")).unlink()
    next(output.glob("generations/*/*.parquet")).unlink()
    assert _calibrate(model, data, output, "--resume") == 0
    assert without_time(_manifest(output)) == first


def test_stored_generations_know_their_groups(
    joint: pathlib.Path, model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Stored generations are recalibrated with or without groups, from Python too, as if decoded again."""
    stored = [f"--generations={joint}", *_ASKED]
    assert main(["calibrate", *stored, "--group_key=language", "--joint", f"--output={tmp_path / 'again'}"]) == 0
    assert without_time(_manifest(tmp_path / "again")) == without_time(_manifest(joint))
    assert main(["calibrate", *stored, f"--output={tmp_path / 'whole'}"]) == 0
    whole = _manifest(tmp_path / "whole")
    assert whole.data.groups is None
    assert [entry.group for entry in whole.calibrations] == [None]
    assert not (tmp_path / "whole" / "risk_table.csv").read_text().splitlines()[0].endswith("group")
    called = calibrate(
        output=tmp_path / "called",
        model=model,
        data=str(data),
        guarantees=[Guarantee("textual", "token_f1", delta=0.5, epsilon=0.2)],
        thresholds=SETTINGS.thresholds,
        max_input_length=32,
        max_decode_length=6,
        batch_size=4,
        num_shards=3,
        group_key="language",
        joint=True,
    )
    assert called.calibrations == _manifest(joint).calibrations


def test_generations_without_groups_are_as_they_were(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Generations without groups have no column of groups, and cannot be calibrated by groups."""
    output = tmp_path / "out"
    flags = [f"--checkpoint={model}", f"--data={data}", f"--output={output}", *SHORT_FLAGS, *_ASKED]
    assert main(["calibrate", *flags]) == 0
    job = json.loads(next(output.glob("generations/*/decode.json")).read_text())
    assert "group_key" not in job
    assert job["digest"] == content_digest(job)
    for path in output.glob("generations/*/*.parquet"):
        assert "group" not in pyarrow.parquet.read_schema(path).names
        assert {item.example.group for item in read_generations(path)} == {None}
    stored = [f"--generations={output}", f"--output={tmp_path / 'b'}", *_ASKED]
    capsys.readouterr()
    assert main(["calibrate", *stored, "--group_key=language"]) == 2
    assert "were decoded without groups. Decode again with it, or leave it out." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cluster_key=id"], "--group_key and --cluster_key cannot be given together"),
        (["--p_value=wsr"], "--p_value=wsr needs every single loss, and those of groups are only summed"),
        (["--group_key=nowhere"], "rows.jsonl, line 1: has no 'nowhere', which was to name its group"),
    ],
)
def test_what_cannot_be_told_apart_is_refused_before_work(
    model: pathlib.Path,
    data: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    """Groups that cannot be distinguished are refused before work, and nothing is written."""
    assert _calibrate(model, data, tmp_path / "out", *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_field_of_ids_is_refused(
    model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A field that names every example names no groups."""
    data = write_rows(tmp_path / "rows.jsonl", id_rows(120))
    assert _calibrate(model, data, tmp_path / "out", "--group_key=id") == 2
    assert "--group_key=id: the data have more than 100 groups" in capsys.readouterr().err


def test_rounds_are_counted_by_group(model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A sequential calibration to the end of the data finds in every group what one look at all of it finds."""
    flags = ("--sequential", "--round_examples=24", "--num_shards=4", "--joint")
    assert _calibrate(model, data, tmp_path / "out", *flags, "--stop_at_layers=1") == 0
    stopped = _manifest(tmp_path / "out")
    for entry in stopped.calibrations:
        assert entry.looks is not None
        assert entry.looks[-1].n == stopped.data.units_of(entry.group)
    # The tiny group never proves anything, so nothing stops before the end.
    assert stopped.data.examples == _ROWS
    assert {entry.p_value for entry in stopped.calibrations} == {"signed_mixture"}


@pytest.mark.slow
def test_a_lazy_sweep_by_rounds_knows_groups(model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Decoding only what is tested, round by round, comes to the same thresholds in every group."""
    flags = ("--sequential", "--round_examples=16", "--num_shards=6")
    assert _calibrate(model, data, tmp_path / "full", *flags) == 0
    assert _calibrate(model, data, tmp_path / "lazy", *flags, "--sweep=lazy") == 0
    full, lazy = _manifest(tmp_path / "full"), _manifest(tmp_path / "lazy")
    assert [entry.threshold for entry in lazy.calibrations] == [entry.threshold for entry in full.calibrations]


def test_a_prompt_is_answered_by_the_entry_of_its_group(joint: pathlib.Path, model: pathlib.Path) -> None:
    """A prompt gets the answer of its group's entry; for an unknown group, that of the safest entry."""
    manifest = _manifest(joint)
    generator = Generator.from_manifest(manifest, model)
    prompts = [[5, 9, 1], [7, 1], [5, 9, 1], [5, 9, 1]]
    answers = generator.generate_batch(prompts, groups=[None, "en", "fr", "it"])
    whole, large, tiny = manifest.calibrations
    assert [answer.entry for answer in answers] == [whole, large, tiny, tiny]
    assert [answer.group for answer in answers] == [None, "en", "fr", "it"]
    assert set(answers[3].exit_layers) == {generator.num_layers}
    for answer, prompt in zip(answers[:3], prompts, strict=False):
        alone = Generator.from_manifest(manifest, model, group=answer.group)
        expected = alone.generate(prompt)
        assert expected == dataclasses.replace(answer, confidences=expected.confidences)
        assert answer.confidences == pytest.approx(expected.confidences, abs=1e-5)
    assert generator.full_model().generate(prompts[0]).entry is None
    with pytest.raises(ManifestError, match='there is no group "it"'):
        Generator.from_manifest(manifest, model, group="it")


def test_a_probe_watches_one_group(joint: pathlib.Path, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Losses of another group say nothing about an entry, and are not added to its file."""
    generator = Generator.from_manifest(joint / "manifest.json", model, group="en")
    probe = LossProbe(generator, tmp_path / "losses.jsonl", share=1, salt="s")
    prompt = [5, 9, 1]
    probe.observe("1", prompt, answer=generator.generate(prompt))
    with pytest.raises(ValueError, match="was answered for group 'it', but the probe is about group 'en'"):
        probe.observe("2", prompt, answer=generator.generate(prompt, group="it"))
    with pytest.raises(ValueError, match="was answered for group '', but the probe is about group 'en'"):
        probe.observe("3", prompt, answer=generator.generate(prompt, group=""))
    (row,) = map(json.loads, (tmp_path / "losses.jsonl").read_text().splitlines())
    assert row["calibration"] == 1
    flags = ["monitor", f"--manifest={joint}", f"--losses={tmp_path / 'losses.jsonl'}"]
    assert main([*flags, "--group=en"]) == 0
    # The row names its entry, and the entry about all prompts refuses it.
    assert main(flags) == 0
    (whole,) = {entry.delta for entry in read_manifest(joint / "manifest.json").calibrations}
    assert main([*flags, f"--delta={whole:g}"]) == 1


def test_monitor_names_the_groups_there_are(joint: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Monitor refuses an unknown group, and an entry that never exits."""
    flags = ["monitor", f"--manifest={joint}", "--losses=-"]
    assert main([*flags, "--group=it"]) == 2
    assert '--group: there is no group "it". The manifest has: en, fr.' in capsys.readouterr().err
    assert main([*flags, "--group=fr"]) == 2
    assert "what was asked for says never exit" in capsys.readouterr().err


def test_generate_takes_groups_of_flags_and_of_rows(
    joint: pathlib.Path, model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every row is answered by the entry of its group, from a flag or a field, which the output names."""
    rows = [{"input_ids": [5, 9, 1], "language": name} for name in ("en", "fr", "it")]
    prompts, answers = write_rows(tmp_path / "prompts.jsonl", rows), tmp_path / "answers.jsonl"
    flags = ["generate", f"--manifest={joint}", f"--checkpoint={model}", f"--input={prompts}", f"--output={answers}"]
    assert main([*flags, "--group_key=language"]) == 0
    errors = capsys.readouterr().err
    assert "the manifest knows no group it. Their prompts are answered by its safest entry" in errors
    assert "group en: textual, token_f1" in errors
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    en = _manifest(joint).calibrations[1]
    assert [(row["group"], row["threshold"]) for row in found] == [("en", en.threshold), ("fr", None), ("it", None)]
    assert main([*flags, "--overwrite", "--group=en"]) == 0
    assert {json.loads(line)["group"] for line in answers.read_text().splitlines()} == {"en"}
    for wrong, message in (
        (["--group=it"], 'there is no group "it". The manifest has: en, fr.'),
        (["--group=en", "--group_key=language"], "--group names the group of all prompts, --group_key that of each"),
    ):
        capsys.readouterr()
        assert main([*flags, "--overwrite", *wrong]) == 2
        assert message in capsys.readouterr().err


def test_verify_tests_each_group_on_its_own_examples(
    joint: pathlib.Path, model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fresh examples count for their group, those of unknown groups for the whole only; an empty group is an error."""
    rows = [{**row, "language": "it" if index % 4 == 0 else "en"} for index, row in enumerate(id_rows(16, seed=5))]
    flags = ["verify", f"--manifest={joint}", f"--checkpoint={model}", "--batch_size=4", "--num_shards=2"]
    fresh = write_rows(tmp_path / "fresh.jsonl", rows)
    assert main([*flags, f"--data={fresh}"]) == 0
    printed = capsys.readouterr()
    assert "the manifest knows no group it: such examples count for the promises about all prompts" in printed.err
    assert "\n en " in printed.out
    only = write_rows(tmp_path / "only.jsonl", [{**row, "language": "it"} for row in rows])
    assert main([*flags, f"--data={only}"]) == 0
    assert "the fresh data have no example of group en: not tested" in capsys.readouterr().err
    without = write_rows(tmp_path / "without.jsonl", id_rows(16, seed=5))
    assert main([*flags, f"--data={without}"]) == 2
    assert "has no 'language', which was to name its group" in capsys.readouterr().err


def test_python_asks_for_the_key_that_was_read(joint: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """`Calibrate` accepts only the group key with which the generations were read."""
    import apache_beam as beam

    from calm_beam.transforms import Calibrate, ReadGenerations

    shutil.copytree(joint, tmp_path / "copy")
    pipeline = beam.Pipeline()
    sweeps = pipeline | ReadGenerations(joined(str(tmp_path), "copy"))
    guarantees = [Guarantee("textual", "token_f1", delta=0.7)]
    with pytest.raises(UsageError, match="group_key is 'domain', but the examples were read with group_key 'language'"):
        _ = sweeps | Calibrate(guarantees, group_key="domain")
