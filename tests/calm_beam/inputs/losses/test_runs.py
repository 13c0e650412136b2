"""Scores in logs of evaluation frameworks, and the losses of candidates against a baseline."""

import dataclasses
import json
import pathlib
import re
import struct
import zipfile
from collections.abc import Callable, Sequence

import pytest

from calm_beam.calibration.loss_table import LossTable
from calm_beam.inputs.losses.frameworks import format_of
from calm_beam.inputs.losses.frameworks.example import digest_of_asked
from calm_beam.inputs.losses.runs import Run, RunScores, losses_of_runs
from calm_beam.inputs.losses.tables import LossRow, named
from calm_beam.risk.testing import LossesError
from tests.calm_beam.inputs.losses.builders import (
    pack_in_zstandard,
    write_helm,
    write_inspect,
    write_lighteval,
    write_lm_eval,
)

_SCORES = [1.0, 0.0, 1.0, 0.5]


def _read(text: object, *, metric: str | None = None, task: str | None = None) -> RunScores:
    return RunScores.read(Run.found(str(text), task=task), metric=metric)


def _by_number(scores: RunScores) -> list[float]:
    return [score for _, score in sorted(scores.scores.items())]


def test_every_framework(tmp_path: pathlib.Path) -> None:
    """From a run's folder or file, framework, log, task and a single metric are found."""
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
    """Several filters of the harness are several metrics, named as in its results."""
    place = write_lm_eval(tmp_path / "run", {"strict-match": [1.0, 0.0], "flexible-extract": [1.0, 1.0]})
    assert _by_number(_read(place, metric="exact_match,strict-match")) == [1, 0]
    with pytest.raises(LossesError, match=r"name the metric .* exact_match,strict-match; exact_match,flexible-extract"):
        _read(place)
    with pytest.raises(LossesError, match=r"'exact_match' is the name of 2 metrics\. Name one"):
        _read(place, metric="exact_match")
    with pytest.raises(LossesError, match=r"has no metric 'bleu'. There are: exact_match,strict-match"):
        _read(place, metric="bleu")


def test_samples_in_zstandard(tmp_path: pathlib.Path) -> None:
    """Members of Inspect's logs in Zstandard, which only later Pythons support, are read and checked."""
    plain = write_inspect(tmp_path / "plain.eval", ["C", "I"])
    path = pack_in_zstandard(plain, tmp_path / "log.eval")
    assert _by_number(_read(path)) == [1, 0]
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        checksum = struct.pack("<I", archive.getinfo("samples/0_epoch_1.json").CRC)
    path.write_bytes(data.replace(checksum, b"\0\0\0\0"))
    with pytest.raises(LossesError, match="is not a whole log of inspect"):
        _read(path)


def test_logs_that_cannot_be_trusted(tmp_path: pathlib.Path) -> None:
    """Unfinished evaluations, epochs, perturbations, cut files and scores outside [0, 1] are refused."""
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
    """HELM's statistics of one name are distinguished by their other fields; equal ones are refused."""

    def stat(score: float, **name: object) -> dict[str, object]:
        return {"name": {"name": "exact_match", **name}, "count": 1, "sum": score}

    two = write_helm(tmp_path / "two", [1.0], stats=[stat(1.0, split="test"), stat(0.0, split="valid")])
    (path,) = two.rglob("per_instance_stats.json")
    path.write_text(json.dumps(json.loads(path.read_text())[:1]))
    with pytest.raises(LossesError, match=r"stats\.json: 'exact_match' is the name of \d metrics\. Name one"):
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
    """The loss is the baseline's score minus the candidate's, or its positive part."""
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


def test_withdrawn_logs(tmp_path: pathlib.Path) -> None:
    """Inspect's logs are refused if they, or a sample, were invalidated, or if samples are missing."""
    withdrawn = {"timestamp": "2026-02-01T00:00:00Z", "author": "me", "reason": "leaked"}
    for name in ("log.eval", "log.json"):
        with pytest.raises(LossesError, match="the log was invalidated, as its header says"):
            _read(write_inspect(tmp_path / f"a-{name}", ["C"], header={"invalidated": True}))
        with pytest.raises(LossesError, match="sample '0' was invalidated"):
            _read(write_inspect(tmp_path / f"b-{name}", ["C"], sample={"invalidation": withdrawn}))
        with pytest.raises(LossesError, match="holds 2 samples, and its header counts 3"):
            _read(write_inspect(tmp_path / f"c-{name}", ["C", "I"], header={"results": {"total_samples": 3}}))
        whole = {"invalidated": False, "results": {"total_samples": 1, "completed_samples": 1}}
        assert _by_number(
            _read(write_inspect(tmp_path / f"d-{name}", ["C"], header=whole, sample={"invalidation": None}))
        ) == [1]


def _messages(text: object, **more: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": text, "source": "input", **more}]


_INSPECT_ASKED: list[tuple[dict[str, object], dict[str, object], bool]] = [
    ({"input": "hard question"}, {"input": "easy question"}, False),
    ({"input": "q", "target": "1"}, {"input": "q", "target": "2"}, False),
    ({"input": "q", "choices": ["a", "b"]}, {"input": "q", "choices": ["b", "a"]}, False),
    ({"input": _messages("hard")}, {"input": _messages("easy")}, False),
    # Ids of messages are drawn again in every run, and a text may be in a list of parts or among attachments.
    ({"input": _messages("q", id="x1")}, {"input": _messages("q", id="y2")}, True),
    ({"input": _messages("q")}, {"input": _messages([{"type": "text", "text": "q"}])}, True),
    ({"input": "q"}, {"input": "attachment://5f", "attachments": {"5f": "q"}}, True),
    ({"input": "q", "target": "1"}, {"input": "q", "target": ["1"]}, True),
]


@pytest.mark.parametrize(("ours", "theirs", "is_same"), _INSPECT_ASKED)
def test_what_inspect_asked(
    ours: dict[str, object], theirs: dict[str, object], is_same: bool, tmp_path: pathlib.Path
) -> None:
    """Samples of one id are compared by input, choices and target, and by no field that changes between runs."""
    first, second = (
        _read(write_inspect(tmp_path / f"{name}.eval", ["C"], sample=sample)).contents
        for name, sample in (("a", ours), ("b", theirs))
    )
    assert (first == second) is is_same
    assert first.keys() == {"0"}


def test_hard_questions_are_not_easy_ones(tmp_path: pathlib.Path) -> None:
    """Equal ids with different questions are refused, in every framework that logs the questions."""

    def pair(logs: Sequence[pathlib.Path], metric: str | None = None) -> None:
        one, other = logs
        run = Run.found(str(other), task=None)
        pairs = [(run, RunScores.read(run, metric=metric))]
        list(losses_of_runs(_read(one, metric=metric), pairs, loss="signed", direction="higher"))

    hard = "gives 2 ids ('0', '1') to other examples than the baseline does"
    by_lighteval = [
        write_lighteval(tmp_path / f"lighteval{is_hard}", [1, 1], hard=is_hard) for is_hard in (False, True)
    ]
    with pytest.raises(LossesError, match=re.escape(hard)):
        pair(by_lighteval, "acc")
    by_helm = [write_helm(tmp_path / f"helm-{asked}", [1.0, 1.0], asked=asked) for asked in ("easy ", "hard ")]
    with pytest.raises(LossesError, match=re.escape(hard.replace("'0', '1'", "'id0', 'id1'"))):
        pair(by_helm, "exact_match")
    by_inspect = [
        write_inspect(tmp_path / f"{asked}.eval", ["C", "C"], sample={"input": asked}) for asked in ("easy", "hard")
    ]
    with pytest.raises(LossesError, match=re.escape(hard)):
        pair(by_inspect)
    by_harness = [
        write_lm_eval(tmp_path / f"lm-{changed}", {"none": [1.0] * 2}, changed=changed) for changed in ([], [1])
    ]
    for folder in by_harness:
        (log,) = folder.rglob("samples_*")
        # Early versions write no digest of the document, but the document.
        log.write_text(log.read_text().replace('"doc_hash"', '"other"'))
    with pytest.raises(LossesError, match=r"gives 1 id \('1'\)"):
        pair(by_harness)


def test_both_forms_of_helm(tmp_path: pathlib.Path) -> None:
    """The text input of early versions and the list of later ones are the same questions."""
    place = write_helm(tmp_path / "a", [1.0, 0.0], asked="")
    (states,) = place.rglob("scenario_state.json")
    contents = _read(place, metric="exact_match").contents
    assert contents.keys() == {"id0", "id1"}
    instances = [state["instance"] for state in json.loads(states.read_text())["request_states"]]
    early = [
        {**each, "input": each["input"]["text"], "references": [_early(r) for r in each["references"]]}
        for each in instances
    ]
    for listed in (instances, early):
        states.with_name("instances.json").write_text(json.dumps(listed))
        states.unlink(missing_ok=True)
        assert _read(place, metric="exact_match").contents == contents


def _early(reference: dict[str, dict[str, str]]) -> dict[str, object]:
    return {**reference, "output": reference["output"]["text"]}


def test_an_object_that_is_no_json(tmp_path: pathlib.Path) -> None:
    """A document with a picture, which a framework writes with its memory address, is the same in every run."""
    first, second = (
        digest_of_asked({"image": f"<PIL.PngImage mode=RGB size=8x8 at {place}>"}) for place in ("0x7f01", "0x7Fa2")
    )
    assert first == second != digest_of_asked({"image": "<PIL.PngImage mode=RGB size=9x9 at 0x7f01>"})


@pytest.mark.parametrize(
    ("write", "key"),
    [
        (lambda place: write_lm_eval(place, {"none": [1.0, 0.0, 1.0]}), "doc.passage"),
        (lambda place: write_lighteval(place, [1.0, 0.0, 1.0]), "doc.specific.passage"),
        (lambda place: write_inspect(place.with_suffix(".eval"), ["C", "I", "C"]), "metadata.passage"),
        (lambda place: write_inspect(place.with_suffix(".json"), ["C", "I", "C"]), "metadata.passage"),
        (lambda place: write_helm(place, [1.0, 0.0, 1.0], asked=""), "extra_data.passage"),
    ],
)
def test_clusters_of_logs(write: Callable[[pathlib.Path], pathlib.Path], key: str, tmp_path: pathlib.Path) -> None:
    """The passage of a question is read from every framework's record of an example, and belongs to its loss."""
    run = Run.found(f"int8={write(tmp_path / 'run')}", task=None)
    metric = {"lighteval": "acc", "HELM": "exact_match"}.get(run.format.name)
    scores = RunScores.read(run, metric=metric, cluster_key=key)
    assert sorted(scores.clusters.values()) == ["p0", "p0", "p1"]
    rows = list(losses_of_runs(scores, [(run, scores)], loss="signed", direction="higher"))
    assert sorted(row.cluster or "" for row in rows) == ["p0", "p0", "p1"]
    assert LossTable.of(rows).clusters_of(None) == 2
    elsewhere = dataclasses.replace(scores, clusters=dict.fromkeys(scores.clusters, "p0"))
    with pytest.raises(LossesError, match=r"has 1 id \('(id)?2'\) in other clusters than the baseline does"):
        list(losses_of_runs(elsewhere, [(run, scores)], loss="signed", direction="higher"))
    for missing in (f"{key}.title", f"{key}s", "nowhere"):
        with pytest.raises(LossesError, match=f"has no {missing}, which --cluster_key names"):
            RunScores.read(run, metric=metric, cluster_key=missing)


def test_clusters_need_their_file(tmp_path: pathlib.Path) -> None:
    """If HELM's log lacks the file with the questions, clusters are refused."""
    run = Run.found(str(write_helm(tmp_path / "run", [1.0])), task=None)
    with pytest.raises(LossesError, match=r"is looked for in instances\.json or scenario_state\.json next to it"):
        RunScores.read(run, metric="exact_match", cluster_key="extra_data.passage")


def test_names_in_messages() -> None:
    """The first few names are shown, with their total."""
    assert named([str(index) for index in range(1200)], "id") == "1,200 ids ('0', '1', '2', '3', '4', ...)"
