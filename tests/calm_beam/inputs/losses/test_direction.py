"""The direction of scores, from logs, files next to them, a flag or a name."""

import json
import pathlib
from collections.abc import Callable

import pytest

from calm_beam.errors import UsageError
from calm_beam.inputs.losses.runs import Run, RunScores, known_direction, losses_of_runs, settled_direction
from calm_beam.risk.testing import LossesError
from tests.calm_beam.inputs.losses.builders import write_helm, write_inspect, write_lighteval, write_lm_eval

_Writer = Callable[[pathlib.Path, bool], pathlib.Path]
_WRITERS: dict[str, _Writer] = {
    "lm_eval": lambda place, higher: write_lm_eval(place, {"none": [0.1, 0.9]}, metric="shown", higher=higher),
    "lighteval": lambda place, higher: write_lighteval(place, [0.1, 0.9], metric="shown", higher=higher),
    "helm": lambda place, higher: write_helm(place, [0.1, 0.9], metric="shown", higher=higher),
}


def _scores(place: pathlib.Path, metric: str) -> RunScores:
    return RunScores.read(Run.found(str(place), task=None), metric=metric)


@pytest.mark.parametrize("higher", [True, False])
@pytest.mark.parametrize("framework", _WRITERS)
def test_frameworks_say_it(framework: str, higher: bool, tmp_path: pathlib.Path) -> None:
    """Results, configurations and schemas next to a log are read, with either direction."""
    place = _WRITERS[framework](tmp_path / "run", higher)
    assert _scores(place, "shown").higher_is_better is higher


def test_where_nothing_is_said(tmp_path: pathlib.Path) -> None:
    """Without such a file, or if it does not name the metric, a log has no direction."""
    assert _scores(write_lm_eval(tmp_path / "a", {"none": [1.0]}), "exact_match").higher_is_better is None
    assert _scores(write_lighteval(tmp_path / "b", [1.0], higher=True), "em").higher_is_better is None
    assert _scores(write_helm(tmp_path / "c", [1.0], higher=True), "num_references").higher_is_better is None
    assert _scores(write_inspect(tmp_path / "d.eval", [0.5, 1]), "match").higher_is_better is None


def test_other_forms_of_the_same(tmp_path: pathlib.Path) -> None:
    """One value for a whole task, the metrics of its configuration, and several metrics of one name are read too."""
    place = write_lm_eval(tmp_path / "a", {"none": [1.0]}, metric="shown")
    (results,) = place.rglob("results_*.json")
    results.write_text(json.dumps({"higher_is_better": {"gsm8k": False}}))
    assert _scores(place, "shown").higher_is_better is False
    listed = [{"metric": "other", "higher_is_better": True}, {"metric": "shown", "higher_is_better": False}]
    results.write_text(json.dumps({"configs": {"gsm8k": {"metric_list": listed}}}))
    assert _scores(place, "shown").higher_is_better is False
    place = write_lighteval(tmp_path / "b", [1.0], metric="shown", higher=True)
    (results,) = place.rglob("results_*.json")
    several = [{"metric_name": ["shown", "em"], "higher_is_better": {"shown": False, "em": True}}, "text"]
    results.write_text(json.dumps({"config_tasks": {"lighteval|boolq|0": {"metric": several}}}))
    assert _scores(place, "shown").higher_is_better is False


def test_results_of_another_day(tmp_path: pathlib.Path) -> None:
    """Without results of its date, a log has the direction of other results next to it, if they agree."""
    place = write_lm_eval(tmp_path / "a", {"none": [1.0]}, metric="shown", higher=False)
    (results,) = place.rglob("results_*.json")
    other = results.rename(results.with_name("results_2026-02-01T00-00-00.000000.json"))
    assert _scores(place, "shown").higher_is_better is False
    (other.with_name("results_2026-02-02.json")).write_text(
        json.dumps({"higher_is_better": {"gsm8k": {"shown": True}}})
    )
    with pytest.raises(LossesError, match="disagree on whether a higher shown,none is better"):
        _scores(place, "shown")
    other.write_text("{")
    with pytest.raises(LossesError, match=r"results_2026-02-01T00-00-00.000000.json: not JSON"):
        _scores(place, "shown")


def test_grades_say_it(tmp_path: pathlib.Path) -> None:
    """If all of Inspect's scores are C, P, I or N, correct is better; a yes may be good or bad."""
    assert _scores(write_inspect(tmp_path / "a.eval", ["C", "I", "P", "N"], scorer="x"), "x").higher_is_better is True
    assert _scores(write_inspect(tmp_path / "b.eval", ["C", 0.5], scorer="x"), "x").higher_is_better is None
    assert _scores(write_inspect(tmp_path / "c.json", ["yes", "no"], scorer="x"), "x").higher_is_better is None


@pytest.mark.parametrize(
    ("metric", "known"),
    [
        ("exact_match,strict-match", "higher"),
        ("Quasi-Exact-Match", "higher"),
        ("grader/accuracy", "higher"),
        ("rougeL", "higher"),
        ("pass@1:8_samples", "higher"),
        ("toxicity,none", "lower"),
        ("word_perplexity", "lower"),
        ("judge/WER", "lower"),
        ("ece_10_bin,split=test", "lower"),
        ("quality", None),
        ("not_toxicity", None),
        ("toxicity/grade", None),
        ("accuracy_loss", None),
        ("", None),
    ],
)
def test_known_names(metric: str, known: str | None) -> None:
    """A name is known as a whole, without filter, scorer and parameters, or not at all."""
    assert known_direction(metric) == known


def test_who_is_believed() -> None:
    """Logs precede the flag, which must not contradict them; then the flag, then the name; nothing is assumed."""
    assert settled_direction("accuracy", said={"log": False}, asked=None) == "lower"
    assert settled_direction("quality", said={"log": True}, asked="higher") == "higher"
    assert settled_direction("toxicity", said={}, asked="higher") == "higher"
    assert settled_direction("toxicity", said={}, asked=None) == "lower"
    with pytest.raises(LossesError, match="a: says that a lower quality is better, and b says the opposite"):
        settled_direction("quality", said={"a": False, "b": True}, asked=None)
    with pytest.raises(LossesError, match="log: says that a lower quality is better, and --direction=higher says"):
        settled_direction("quality", said={"log": False}, asked="higher")
    with pytest.raises(UsageError, match="nothing says whether a higher or a lower quality is better"):
        settled_direction("quality", said={}, asked=None)


def test_losses_of_lower_scores(tmp_path: pathlib.Path) -> None:
    """If lower is better the loss is the candidate's score minus the baseline's, without rounding."""
    baseline = _scores(write_helm(tmp_path / "a", [0.05, 0.6, 0.3], metric="toxicity"), "toxicity")
    run = Run.found(f"int8={write_helm(tmp_path / 'b', [0.6, 0.05, 0.3], metric='toxicity')}", task=None)
    scores = RunScores.read(run, metric="toxicity")
    losses = [row.loss for row in losses_of_runs(baseline, [(run, scores)], loss="signed", direction="lower")]
    assert losses == [0.6 - 0.05, 0.05 - 0.6, 0]
    losses = [row.loss for row in losses_of_runs(baseline, [(run, scores)], loss="relu", direction="lower")]
    assert losses == [0.6 - 0.05, 0, 0]
    losses = [row.loss for row in losses_of_runs(baseline, [(run, scores)], loss="signed", direction="higher")]
    assert losses == [0.05 - 0.6, 0.6 - 0.05, 0]


def test_a_candidate_that_says_the_opposite(tmp_path: pathlib.Path) -> None:
    """Runs with opposite directions are not compared."""
    baseline = _scores(write_inspect(tmp_path / "a.eval", [1, 0], scorer="x"), "x")
    run = Run.found(str(write_inspect(tmp_path / "b.eval", ["C", "I"], scorer="x")), task=None)
    pairs = [(run, RunScores.read(run, metric="x"))]
    with pytest.raises(LossesError, match="says the opposite of what was settled: that a lower x is better"):
        list(losses_of_runs(baseline, pairs, loss="signed", direction="lower"))
    assert len(list(losses_of_runs(baseline, pairs, loss="signed", direction="higher"))) == 2
