"""The list of plans next to a set of outputs: plans are counted, none is lost, and changes are detected."""

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import shutil

import pytest

from calm_beam.errors import UsageError
from calm_beam.manifest import EarlierPlan, SequentialPlan, plans_in_words, write_manifest
from calm_beam.manifest.plan_list import PLANS, AskedPlan, PlanList, home_of
from tests.calm_beam.manifest.builders import build_plan_record, build_planned_manifest

_FIRST = AskedPlan(plan="sha256:1", tests="sha256:1", data="a", command="calibrate", decodes=True)
_SECOND = dataclasses.replace(_FIRST, plan="sha256:2", tests="sha256:2")
_THIRD = dataclasses.replace(_FIRST, plan="sha256:3", tests="sha256:3")


def _asked(home: pathlib.Path, asked: AskedPlan, *, is_answered: bool = True) -> tuple[EarlierPlan, ...]:
    return PlanList(str(home)).ask(asked, is_answered=is_answered)


def _digests(plans: tuple[EarlierPlan, ...]) -> list[str]:
    return [each.plan for each in plans]


def test_plans_are_counted_in_the_order_in_which_they_were_asked(tmp_path: pathlib.Path) -> None:
    """Each plan is given the earlier ones, the first none."""
    assert _asked(tmp_path, _FIRST) == ()
    assert _digests(_asked(tmp_path, _SECOND)) == ["sha256:1"]
    assert _digests(_asked(tmp_path, _THIRD)) == ["sha256:1", "sha256:2"]


def test_the_same_plan_again_is_not_counted_twice(tmp_path: pathlib.Path) -> None:
    """A resumed or repeated run keeps its place, whatever was asked in the meantime."""
    for asked in (_FIRST, _SECOND, _FIRST, _FIRST):
        _asked(tmp_path, asked)
    assert _digests(_asked(tmp_path, _FIRST)) == []
    assert _digests(_asked(tmp_path, _SECOND)) == ["sha256:1"]
    assert len(list((tmp_path / PLANS).iterdir())) == 2


def test_the_same_plan_of_other_data_is_counted(tmp_path: pathlib.Path) -> None:
    """The same plan on more examples counts as a second one."""
    _asked(tmp_path, _FIRST)
    assert _digests(_asked(tmp_path, dataclasses.replace(_FIRST, data="a and more"))) == ["sha256:1"]


def test_another_rule_to_stop_is_not_counted() -> None:
    """A sequential plan is the same under any stopping rule; its round size is part of it."""
    plan = build_plan_record(sequential=SequentialPlan(round_examples=100, stop_at_layers=3))
    other = build_plan_record(sequential=SequentialPlan(round_examples=100, stop_gain=0.02))
    larger = build_plan_record(sequential=SequentialPlan(round_examples=200))
    asked = [AskedPlan.of(each, data="a", command="calibrate") for each in (plan, other, larger)]
    assert asked[0].is_same(asked[1])
    assert asked[0].plan != asked[1].plan
    assert not asked[0].is_same(asked[2])


def test_an_answer_is_told_apart_from_a_plan_that_was_asked(tmp_path: pathlib.Path) -> None:
    """A plan whose run never ended has shown nothing, until its result may be seen."""
    _asked(tmp_path, _FIRST, is_answered=False)
    assert [each.answered for each in _asked(tmp_path, _SECOND, is_answered=False)] == [False]
    PlanList(str(tmp_path)).answer(_FIRST)
    PlanList(str(tmp_path)).answer(_FIRST)
    assert [each.answered for each in _asked(tmp_path, _SECOND, is_answered=False)] == [True]
    assert len(list((tmp_path / PLANS).iterdir())) == 3


def test_runs_that_ask_at_the_same_time_are_all_listed(tmp_path: pathlib.Path) -> None:
    """Of many concurrent writers of the next file, each gets its own place."""
    asked_plans = [dataclasses.replace(_FIRST, plan=f"sha256:{k}", tests=f"sha256:{k}") for k in range(12)]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        told = list(pool.map(lambda asked: _asked(tmp_path, asked), asked_plans))
    assert sorted(len(earlier) for earlier in told) == list(range(12))
    assert {each.plan for each in PlanList(str(tmp_path)).plans()} == {asked.plan for asked in asked_plans}


def test_a_manifest_shows_its_plan_by_itself(tmp_path: pathlib.Path) -> None:
    """Without a list, or without its answer in it, a manifest in the directory counts as an answered plan."""
    manifest = build_planned_manifest()
    write_manifest(manifest, tmp_path / "manifest.json")
    assert manifest.plan is not None
    (before,) = _asked(tmp_path, _FIRST)
    assert before == EarlierPlan(plan=manifest.plan.digest, command="calibrate", asked=manifest.created, answered=True)
    # It is in the list now, and stays there.
    (tmp_path / "manifest.json").unlink()
    assert _asked(tmp_path, _FIRST) == (before,)


def test_a_manifest_tells_what_it_knew(tmp_path: pathlib.Path) -> None:
    """Earlier plans that a manifest lists count even if the list itself is gone."""
    earlier = EarlierPlan(plan="sha256:0", command="evaluate", asked="2026-01-01T00:00:00Z", answered=True)
    write_manifest(build_planned_manifest(earlier_plans=(earlier,)), tmp_path / "manifest.json")
    assert _asked(tmp_path, _FIRST)[0] == earlier


def test_the_plan_of_a_manifest_is_no_other_plan(tmp_path: pathlib.Path) -> None:
    """The plan of a manifest is not counted again, and the list then records its data."""
    manifest = build_planned_manifest()
    write_manifest(manifest, tmp_path / "manifest.json")
    assert manifest.plan is not None
    same = AskedPlan.of(manifest.plan, data="a", command="calibrate")
    assert _asked(tmp_path, same) == ()
    assert len(_asked(tmp_path, dataclasses.replace(same, data="a and more"))) == 1


def test_a_manifest_answers_what_was_decoded_last(tmp_path: pathlib.Path) -> None:
    """If the same plan was asked on more data, the existing manifest answers for those."""
    manifest = build_planned_manifest()
    assert manifest.plan is not None
    first = AskedPlan.of(manifest.plan, data="a", command="calibrate", decodes=True)
    for asked in (first, dataclasses.replace(first, data="a and more")):
        _asked(tmp_path, asked, is_answered=False)
    write_manifest(manifest, tmp_path / "manifest.json")
    assert [each.answered for each in _asked(tmp_path, _THIRD)] == [False, True]


def test_data_of_outputs_are_those_of_the_last_that_decoded(tmp_path: pathlib.Path) -> None:
    """A plan on stored outputs is about the data that made them, whatever other outputs asked in the meantime."""
    _asked(tmp_path, _FIRST)
    _asked(tmp_path, dataclasses.replace(_SECOND, data="a and more"))
    _asked(tmp_path, dataclasses.replace(_THIRD, data="z", decodes=False))
    assert PlanList(str(tmp_path)).data_of_outputs() == "a and more"
    assert PlanList(str(tmp_path / "none")).data_of_outputs() is None


def _change(path: pathlib.Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, "plan": "sha256:other"}), encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "00001.json").unlink(), "00001.json: is missing, and later plans are there"),
        (lambda folder: (folder / "00002.json").unlink(), "00002.json: is missing, and later plans are there"),
        (lambda folder: _change(folder / "00002.json"), "was changed after it was written"),
        (lambda folder: (folder / "00002.json").write_text("{"), "00002.json"),
        (
            lambda folder: shutil.copy(folder / "00001.json", folder / "00002.json"),
            "it does not follow the file before it",
        ),
    ],
)
def test_a_damaged_list_is_refused(tmp_path: pathlib.Path, damage: object, message: str) -> None:
    """A missing, changed, truncated or misplaced file ends the run, since the count would be wrong."""
    for asked in (_FIRST, _SECOND, _THIRD):
        _asked(tmp_path, asked)
    assert callable(damage)
    damage(tmp_path / PLANS)
    with pytest.raises(UsageError, match=message):
        PlanList(str(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_outputs_whose_list_cannot_be_written_are_refused(tmp_path: pathlib.Path) -> None:
    """A plan that cannot be recorded is refused."""
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="every plan that is asked of outputs is listed next to them"):
        _asked(tmp_path, _FIRST)


def test_a_file_in_the_lists_place_is_told(tmp_path: pathlib.Path) -> None:
    """A file in place of the list is named."""
    (tmp_path / PLANS).write_text("mine")
    with pytest.raises(UsageError, match="plans: cannot be written"):
        _asked(tmp_path, _FIRST)


def test_home_is_the_output_directory() -> None:
    """Generations of one output share its list; a folder of them that was moved out has its own."""
    assert home_of("/runs/a/generations/sha256-1") == "/runs/a"
    assert home_of("gs://bucket/a/generations/sha256-1") == "gs://bucket/a"
    assert home_of("/elsewhere/sha256-1") == "/elsewhere/sha256-1"


def test_what_it_does_to_a_promise_is_said() -> None:
    """The first plan has no warning; later ones have their place, and whether anything had been shown before."""
    plan = EarlierPlan(plan="sha256:1", command="calibrate", asked="2026-01-01T00:00:00Z", answered=True)
    unseen = dataclasses.replace(plan, answered=False)
    assert plans_in_words(None) == ""
    assert plans_in_words([unseen]) == (
        "This is the 2nd plan on these outputs, by the list next to them. No result of the earlier one was shown, so "
        "the promises stand."
    )
    assert plans_in_words([plan, unseen, plan], of="losses") == (
        "This is the 4th plan on these losses, by the list next to them. Results of 2 earlier ones were shown before. "
        "Unless this plan was settled before that, or all of its examples are new, epsilon does not bound the chance "
        "that a promise here is wrong."
    )


def test_a_list_on_cloud_storage(bucket: str) -> None:
    """Objects are added on the condition that they do not exist, so that none is lost; a repeated plan is one."""
    home = f"{bucket}/out"
    asked_plans = [dataclasses.replace(_FIRST, plan=f"sha256:{k}", tests=f"sha256:{k}") for k in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        told = list(pool.map(lambda asked: PlanList(home).ask(asked, is_answered=True), asked_plans))
    assert sorted(len(earlier) for earlier in told) == list(range(4))
    assert len(PlanList(home).ask(asked_plans[0], is_answered=True)) < 4
    assert len(PlanList(home).plans()) == 4
