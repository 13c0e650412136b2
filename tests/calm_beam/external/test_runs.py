"""Scores as frameworks of evaluation log them, and the losses of candidates against a baseline."""

import json
import pathlib
import struct
import zipfile
import zlib

import pyarrow
import pytest

from calm_beam.external.frameworks import format_of
from calm_beam.external.rows import LossRow
from calm_beam.external.runs import Run, RunScores, losses_of_runs
from calm_beam.external.shown import named
from calm_beam.risk.setting_sums import LossesError
from tests.calm_beam.external.builders import write_helm, write_inspect, write_lighteval, write_lm_eval

_SCORES = [1.0, 0.0, 1.0, 0.5]


def _read(text: object, *, metric: str | None = None, task: str | None = None) -> RunScores:
    return RunScores.read(Run.found(str(text), task=task), metric=metric)


def _by_number(scores: RunScores) -> list[float]:
    return [score for _, score in sorted(scores.scores.items())]


def test_every_framework(tmp_path: pathlib.Path) -> None:
    """The folder or the file of a run is enough: framework, log, task and a single metric are found."""
    lm_eval = write_lm_eval(tmp_path / "lm_eval", {"none": _SCORES})
    lighteval = write_lighteval(tmp_path / "lighteval", _SCORES)
    inspect = write_inspect(tmp_path / "log.eval", ["C", "I", 1, "P"])
    as_json = write_inspect(tmp_path / "log.json", ["C", "N", True, 0.5])
    helm = write_helm(tmp_path / "helm", _SCORES)
    for place, metric, task in (
        (lm_eval, None, "gsm8k"),
        (lighteval, "acc", "lighteval|boolq|0"),
        (inspect, None, "arithmetic"),
        (as_json, "match", None),
        (helm, "exact_match", "gsm"),
    ):
        run = Run.found(f"int8={place}", task=task)
        assert run.name == "int8"
        assert _by_number(RunScores.read(run, metric=metric)) == _SCORES, place
    assert Run.found(f"{lm_eval}/", task=None).name == "lm_eval"


def test_filters_are_parts_of_metrics(tmp_path: pathlib.Path) -> None:
    """Several filters of the harness are several metrics, called as in its results."""
    place = write_lm_eval(tmp_path / "run", {"strict-match": [1.0, 0.0], "flexible-extract": [1.0, 1.0]})
    assert _by_number(_read(place, metric="exact_match,strict-match")) == [1, 0]
    with pytest.raises(LossesError, match=r"name the metric .* exact_match,strict-match; exact_match,flexible-extract"):
        _read(place)
    with pytest.raises(LossesError, match="has several metric 'exact_match'"):
        _read(place, metric="exact_match")
    with pytest.raises(LossesError, match=r"has no metric 'bleu'. There are: exact_match,strict-match"):
        _read(place, metric="bleu")


def test_samples_in_zstandard(tmp_path: pathlib.Path) -> None:
    """Members that Inspect compresses as only later Pythons can read are read too, and compared with their checksum."""
    plain = write_inspect(tmp_path / "plain.eval", ["C", "I"])
    path = tmp_path / "log.eval"
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as target:
        for name in source.namelist():
            content = source.read(name)
            target.writestr(name, pyarrow.compress(content, codec="zstd", asbytes=True))
            info = target.infolist()[-1]
            # What the directory says of a member: its way of compression, checksum and size.
            info.compress_type, info.CRC, info.file_size = 93, zlib.crc32(content), len(content)
    assert _by_number(_read(path)) == [1, 0]
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        checksum = struct.pack("<I", archive.getinfo("samples/0_epoch_1.json").CRC)
    path.write_bytes(data.replace(checksum, b"\0\0\0\0"))
    with pytest.raises(LossesError, match="is not a whole log of inspect"):
        _read(path)


def test_logs_that_cannot_be_trusted(tmp_path: pathlib.Path) -> None:
    """Unfinished evaluations, epochs, perturbations, cut files and scores that are no shares are refused."""
    with pytest.raises(LossesError, match="the evaluation's status is 'error', so samples may be missing"):
        _read(write_inspect(tmp_path / "a.eval", ["C"], status="error"))
    with pytest.raises(LossesError, match="sample '0' has several epochs, which are not independent draws"):
        _read(write_inspect(tmp_path / "b.json", ["C"], epochs=2))
    with pytest.raises(LossesError, match="instance 'id0' is there in several forms"):
        _read(write_helm(tmp_path / "c", [1.0], perturbation={"name": "typos"}), metric="exact_match")
    with pytest.raises(LossesError, match=r"match of example '0' must be a number in \[0, 1\], got 7"):
        _read(write_inspect(tmp_path / "d.eval", [7]))
    with pytest.raises(LossesError, match=r"must be a number in \[0, 1\], got nan"):
        _read(write_lm_eval(tmp_path / "e", {"none": [float("nan")]}))
    whole = write_inspect(tmp_path / "f.eval", ["C", "I"])
    whole.write_bytes(whole.read_bytes()[:-30])
    with pytest.raises(LossesError, match="damaged ZIP data"):
        _read(whole)
    log = next(write_lm_eval(tmp_path / "g", {"none": [1.0, 0.0]}).rglob("samples_*"))
    log.write_text(log.read_text()[:-20])
    with pytest.raises(LossesError, match="line 2: not JSON"):
        _read(log)


def test_statistics_of_one_name(tmp_path: pathlib.Path) -> None:
    """HELM's statistics of one name are told apart by what else they say; where nothing does, they are refused."""

    def stat(score: float, **name: object) -> dict[str, object]:
        return {"name": {"name": "exact_match", **name}, "count": 1, "sum": score}

    two = write_helm(tmp_path / "two", [1.0], stats=[stat(1.0, split="test"), stat(0.0, split="valid")])
    (path,) = two.rglob("per_instance_stats.json")
    path.write_text(json.dumps(json.loads(path.read_text())[:1]))
    with pytest.raises(LossesError, match=r"per_instance_stats\.json: has several metric 'exact_match'\. There are"):
        _read(two, metric="exact_match")
    assert _by_number(_read(two, metric="exact_match,split=valid")) == [0.0]
    same = write_helm(tmp_path / "same", [1.0], stats=[stat(1.0, split="test"), stat(0.0, split="test")])
    with pytest.raises(LossesError, match=r"json, entry 1: has the statistic 'exact_match' several times"):
        _read(same, metric="exact_match")


def test_ids_of_one_run(tmp_path: pathlib.Path) -> None:
    """An example that is scored twice, or lacks the metric, is named."""
    log = next(write_lm_eval(tmp_path / "run", {"none": [1.0, 0.0]}).rglob("samples_*"))
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines, lines[0]]) + "\n")
    with pytest.raises(LossesError, match=r"scores 1 id \('0'\) several times"):
        _read(log)
    other = {key: value for key, value in json.loads(lines[1]).items() if key != "exact_match"}
    log.write_text("\n".join([lines[0], json.dumps({**other, "metrics": ["f1"], "f1": 1.0})]) + "\n")
    with pytest.raises(LossesError, match=r"has no exact_match,none for 1 id \('1'\)"):
        _read(log, metric="exact_match")


def test_which_log(tmp_path: pathlib.Path) -> None:
    """A folder with several logs needs a task; one without any, and a file of another kind, are refused."""
    folder = write_lm_eval(tmp_path / "runs" / "one", {"none": [1.0]})
    write_lm_eval(tmp_path / "runs" / "two", {"none": [1.0]}, task="arc")
    with pytest.raises(LossesError, match=r"holds 2 logs. Name the task \(--task\), one of arc, gsm8k"):
        Run.found(str(tmp_path / "runs"), task=None)
    assert "one" in Run.found(str(tmp_path / "runs"), task="gsm8k").path
    with pytest.raises(LossesError, match="has no log of --task=mmlu, only of gsm8k"):
        Run.found(str(folder), task="mmlu")
    with pytest.raises(LossesError, match="is of task 'gsm8k', not of --task=mmlu"):
        Run.found(str(next(folder.rglob("samples_*"))), task="mmlu")
    with pytest.raises(
        LossesError, match=r"no such file or folder. Expected a log of lm-evaluation-harness, lighteval"
    ):
        Run.found(str(tmp_path / "nowhere"), task=None)
    (tmp_path / "a.jsonl").write_text('{"id": 1}\n')
    with pytest.raises(LossesError, match="is of none of the frameworks"):
        format_of(str(tmp_path / "a.jsonl"))


def test_losses_against_a_baseline(tmp_path: pathlib.Path) -> None:
    """The loss is the baseline's score minus the candidate's, or what is positive of it."""
    baseline = _read(write_lm_eval(tmp_path / "base", {"none": [1.0, 0.0, 1.0]}))
    run = Run.found(f"int8={write_lm_eval(tmp_path / 'int8', {'none': [1.0, 1.0, 0.0]})}", task=None)
    scores = RunScores.read(run, metric=None)
    signed = list(losses_of_runs(baseline, [(run, scores)], loss="signed", direction="higher"))
    assert signed == [LossRow("0", "int8", 0.0), LossRow("1", "int8", -1.0), LossRow("2", "int8", 1.0)]
    assert [row.loss for row in losses_of_runs(baseline, [(run, scores)], loss="relu", direction="higher")] == [0, 0, 1]


def test_ids_have_to_agree(tmp_path: pathlib.Path) -> None:
    """Missing, extra and changed examples end the pairing with their names."""
    baseline = _read(write_lm_eval(tmp_path / "base", {"none": [1.0] * 8}))

    def pair(name: str, **changes: object) -> None:
        run = Run.found(str(write_lm_eval(tmp_path / name, {"none": [1.0] * 8}, **changes)), task=None)  # type: ignore[arg-type]
        list(losses_of_runs(baseline, [(run, RunScores.read(run, metric=None))], loss="signed", direction="higher"))

    with pytest.raises(
        LossesError, match=r"lacks 1 id \('0'\) of the baseline and has 1 id \('8'\) that the baseline lacks"
    ):
        pair("shifted", first=1)
    with pytest.raises(LossesError, match=r"gives 1 id \('3'\) to other examples than the baseline does"):
        pair("changed", changed=[3])


def test_names_in_messages() -> None:
    """The first few names are shown, and how many there are."""
    assert named([str(index) for index in range(1200)], "id") == "1,200 ids ('0', '1', '2', '3', '4', ...)"
