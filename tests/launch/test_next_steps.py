"""The next commands that a calibration prints at its end."""

import dataclasses
import pathlib
import shlex
from typing import Any

import pytest

from calm_beam.launch.calibrate.command import leaves_a_choice, next_commands
from calm_beam.launch.cli import main
from calm_beam.manifest import EarlierPlan
from tests.calm_beam.manifest.builders import (
    build_calibration,
    build_manifest,
    build_never_exit,
    build_path_entry,
    build_plan_record,
    build_planned_manifest,
    build_timed_manifest,
)
from tests.pipelines import SHORT_FLAGS


def test_they_run_as_printed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed commands run, for promises that differ in two ways and a folder whose name needs quotes.

    They answer under one of four promises, and a line says that this settles nothing.
    """
    monkeypatch.chdir(tmp_path)
    promises = ("--consistency=textual,risk", "--delta=0.3,0.9", "--metric=rouge_l_unicode")
    assert main(["calibrate", *SHORT_FLAGS, *promises, "--output=my run"]) == 0
    _, _, after = capsys.readouterr().out.partition("Next:\n")
    *printed, note = after.splitlines()
    assert "one of several promises, as an example" in note
    assert "--serve names it" in note
    commands = [shlex.split(line) for line in printed]
    assert [command[:2] for command in commands] == [["calm-beam", "inspect"], ["calm-beam", "generate"]]
    # The folder as it was given, not its absolute path.
    assert commands[0][2] == "my run"
    for _, *command in commands:
        assert main(command) == 0


def test_one_of_several_promises_is_an_example() -> None:
    """A choice is left among several proved promises, unless one was chosen before, all hold together, or none does."""
    first, second, unproved = build_calibration(), build_calibration(delta=0.2), build_never_exit(delta=0.05)
    assert leaves_a_choice(build_manifest(calibrations=(first, second)))
    assert not leaves_a_choice(build_manifest(calibrations=(first, unproved)))
    for settled, is_left in (({}, True), ({"serve": 1}, False), ({"joint_epsilon": 0.1}, False)):
        planned = build_planned_manifest(plan=build_plan_record(**settled))
        assert leaves_a_choice(planned) == is_left


def test_only_what_tells_entries_apart_is_named() -> None:
    """Only the flags that distinguish entries are printed: none for one entry, delta for those that differ in it."""
    first, second = build_calibration(), build_calibration(delta=0.2)
    *_, alone = next_commands(build_manifest(calibrations=(first,)), "out")
    assert alone == "calm-beam generate --manifest=out --prompt='Your prompt' --show_layers"
    *_, of_two = next_commands(build_manifest(calibrations=(first, second)), "out", prompt="Hi")
    assert of_two == "calm-beam generate --manifest=out --delta=0.1 --prompt=Hi --show_layers"


def test_nothing_is_answered_where_nothing_was_proved() -> None:
    """If nothing was proved, the second command says how many examples would do, unless no number would."""

    def printed(*risks: tuple[float, float]) -> list[str]:
        entries = [
            build_never_exit(delta=delta, path=(build_path_entry(risk=risk, p_value=0.3, rejected=False),))
            for delta, risk in risks
        ]
        inspect, *others = next_commands(build_manifest(calibrations=tuple(entries)), "out")
        assert inspect == "calm-beam inspect out"
        return others

    # 200 examples are enough for delta 0.02, and too few for 0.01.
    plan = "calm-beam plan --delta={} --epsilon=0.05 --risk_guess={} --p_value=hoeffding_bentkus"
    assert printed((0.02, 0.015)) == [plan.format(0.02, 0.015)]
    assert printed((0.02, 0.03), (0.1, 0.09)) == [plan.format(0.1, 0.09)]
    assert printed((0.01, 0.03)) == [plan.format(0.01, 0.005)]
    assert printed((0.02, 0.03)) == []


def test_more_examples_are_not_suggested_where_what_was_proved_does_not_pay() -> None:
    """A threshold that was proved and is no faster has no command for more examples."""
    timed = build_timed_manifest()
    first, second = timed.calibrations
    assert first.has_proved_exits(timed.model.layers)
    of_none: dict[str, Any] = dict.fromkeys(("threshold", "variant", "threshold_by_position", "rule"))
    unpaid = dataclasses.replace(first, pays=False, layers=timed.model.layers, risk=0.0, **of_none)
    slow = dataclasses.replace(timed, calibrations=(unpaid, second))
    assert not any(f"plan --delta={first.delta:g} " in command for command in next_commands(slow, "out"))


def test_nothing_is_answered_where_results_were_seen_before() -> None:
    """After results of an earlier plan on the same outputs were shown, no command serves what may not hold."""
    earlier = EarlierPlan(plan="sha256:70", command="calibrate", asked="2026-01-31T12:00:00Z", answered=True)
    manifest = build_manifest(calibrations=(build_calibration(),))
    unseen = dataclasses.replace(manifest, earlier_plans=(dataclasses.replace(earlier, answered=False),))
    assert len([*next_commands(unseen, "out")]) == 2
    assert [*next_commands(dataclasses.replace(manifest, earlier_plans=(earlier,)), "out")] == ["calm-beam inspect out"]


def test_measures_of_ones_own_are_named() -> None:
    """A user's metric is a flag of the printed commands, since a manifest alone does not decide what code runs."""
    manifest = build_manifest(calibrations=(build_calibration(),))
    name = "my_measures:certainty"
    decode = dataclasses.replace(manifest.decode, confidence=name)
    *_, command = next_commands(dataclasses.replace(manifest, decode=decode), "out")
    assert f"--confidence={name}" in command
