"""Flags: ours and Beam's together, and no others."""

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence

import pytest
from apache_beam.options.pipeline_options import DirectOptions, GoogleCloudOptions, PipelineOptions, WorkerOptions

from calm_beam.launch.cli import main
from calm_beam.launch.flags import FlagParser, UsageError, parse_flags, parse_own_flags, request_parser
from calm_beam.launch.flags.parser import _nearest
from calm_beam.options.groups import DataSource, Engine, Lengths, Memory, ModelSource, OneRule, Replacing, Spread
from calm_beam.options.kinds import numbers, texts, whole_number


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Asked(ModelSource, DataSource, Lengths, Memory, Engine, OneRule, Spread, Replacing):
    """Groups that most commands have."""


def _parser() -> FlagParser:
    return request_parser("test", _Asked, doc=None)


def _parse(*flags: str) -> tuple[argparse.Namespace, PipelineOptions]:
    return parse_flags(_parser(), flags)


def test_beams_flags_pass_through() -> None:
    """Our flags and Beam's mix freely, in either spelling."""
    ours, beams = _parse(
        "--direct_num_workers=2",
        "--data=a.jsonl",
        "--project",
        "p",
        "--batch_size=7",
        "--worker_machine_type=n1-standard-4",
        "--experiments=one",
        "--experiments=two",
    )
    assert (ours.data, ours.batch_size) == (("a.jsonl",), 7)
    assert beams.view_as(DirectOptions).direct_num_workers == 2
    assert beams.view_as(GoogleCloudOptions).project == "p"
    assert beams.view_as(WorkerOptions).machine_type == "n1-standard-4"
    assert beams.get_all_options()["experiments"] == ["one", "two"]


@pytest.mark.parametrize(
    ("command", "flag", "meant"),
    [
        ("generate", "--manifst=x", "--manifest"),
        ("verify", "--manifset=x", "--manifest"),
        # Its value is a text of its own.
        ("serve", "--mani", "--manifest"),
    ],
)
def test_a_misspelt_required_flag_is_not_said_to_be_missing(
    command: str, flag: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the flag that was meant, and does not call it missing."""
    assert main([command, flag, "x"]) == 2
    assert f"unknown flag {flag.split('=')[0]}. Did you mean {meant}? See" in capsys.readouterr().err


def test_our_flags_are_not_given_to_beam() -> None:
    """Beam sees none of our flags."""
    _, beams = _parse("--data=a.jsonl", "--batch_size=7")
    assert not {"data", "batch_size"} & beams.get_all_options().keys()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        # Beam's --zone is as near.
        (["--confid=softmax"], "unknown flag --confid. Did you mean --confidence?"),
        (["--checkpint=x"], "unknown flag --checkpint. Did you mean --checkpoint?"),
        (["--batch-size=4"], "unknown flag --batch-size. Did you mean --batch_size?"),
        (["--num_shard=4"], "unknown flag --num_shard. Did you mean --num_shards?"),
        (["--num_worker=4"], "unknown flag --num_worker. Did you mean --num_workers?"),
        (["--regio=x"], "unknown flag --regio. Did you mean --region?"),
        (["--thresold=0.5"], "unknown flag --thresold. Did you mean --thresholds?"),
        (["--direct_num_worker=2"], "unknown flag --direct_num_worker. Did you mean --direct_num_workers?"),
        (["--projet", "p"], "unknown flag --projet. Did you mean --project?"),
        (["--threshold=0.5"], "unknown flag --threshold. Did you mean --thresholds?"),
        (["--batch=3"], "unknown flag --batch. Did you mean"),
        (["--qqq_zzz=3"], "unknown flag --qqq_zzz. See calm-beam test --help."),
        (["rows.jsonl"], "unknown argument rows.jsonl."),
        (["--overwrite", "yes"], "unknown argument yes."),
        (["-x"], "unknown flag -x."),
    ],
)
def test_unknown_flags_are_refused(flags: Sequence[str], message: str) -> None:
    """An unknown flag is refused with the nearest known one; Beam alone would ignore it."""
    with pytest.raises(UsageError) as caught:
        _parse(*flags)
    assert message in str(caught.value)
    assert str(caught.value).endswith("See calm-beam test --help.")


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [
        ("--inputs", "--input"),
        ("--inputs_f", "--inputs_field"),
        ("--round", "--round_examples"),
        ("--max_examples", None),
    ],
)
def test_hints_name_what_is_near(flag: str, nearest: str | None) -> None:
    """A letter too many is nearer than half a name; a name that shares one word of two is not near."""
    assert _nearest(flag, ours=["--inputs_field", "--input", "--round_examples"], beams=()) == nearest


def test_beam_alone_would_drop_them() -> None:
    """Without our check, a misspelled flag is silently lost (the twin of the test above)."""
    assert PipelineOptions(["--direct_num_worker=2"]).view_as(DirectOptions).direct_num_workers == 1


@pytest.mark.parametrize("flag", ["--thresh=0.5", "--chec=x", "--direct_num=2", "--over"])
def test_abbreviations_are_refused(flag: str) -> None:
    """A prefix of a flag is not that flag: a later flag might make it mean another."""
    with pytest.raises(UsageError, match=f"unknown flag {flag.split('=')[0]}"):
        _parse(flag)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--direct_num_workers=two", "argument --direct_num_workers: invalid int value: 'two'"),
        ("--confidence=sure", "argument --confidence: invalid choice: 'sure' (choose from"),
        ("--overwrite=yes", "argument --overwrite: ignored explicit argument 'yes'"),
        ("--data", "argument --data: expected one argument"),
        ("--batch_size=0", "argument --batch_size: expected a whole number of at least 1, got '0'"),
        ("--thresholds=", "argument --thresholds: expected values separated by commas, got ''"),
        ("--exit_head=int4", "argument --exit_head: invalid choice: 'int4' (choose from 'auto', 'exact', 'int8')"),
        ("--exit_head=bfloat16", "argument --exit_head: bfloat16 is gone: certified heads gain by native code alone, "),
    ],
)
def test_bad_values_are_refused(flag: str, message: str) -> None:
    """A bad value of one of our flags or Beam's raises an exception and does not end the process."""
    with pytest.raises(UsageError) as caught:
        _parse(flag)
    assert message in str(caught.value)
    assert str(caught.value).endswith("See calm-beam test --help.")


def test_commands_without_beam_refuse_its_flags() -> None:
    """A command that runs no pipeline knows its own flags only."""
    assert parse_own_flags(_parser(), ["--batch_size=7"]).batch_size == 7
    with pytest.raises(UsageError, match="unknown flag --project"):
        parse_own_flags(_parser(), ["--project=p"])
    with pytest.raises(UsageError, match=r"unknown flag --batch_sise\. Did you mean --batch_size\?"):
        parse_own_flags(_parser(), ["--batch_sise=7"])


def test_lists() -> None:
    """Lists are split at commas, and spaces around values do not count."""
    assert texts("a") == ("a",)
    assert texts("a, b,c d") == ("a", "b", "c d")
    assert numbers("0.5") == (0.5,)
    assert numbers("1, 1e-2,0") == (1.0, 0.01, 0.0)


@pytest.mark.parametrize("value", ["", ",", "a,", ",a", "a,,b", " "])
def test_lists_have_no_holes(value: str) -> None:
    """An empty value in a list is refused with the list."""
    with pytest.raises(argparse.ArgumentTypeError, match=f"expected values separated by commas, got '{value}'"):
        texts(value)


@pytest.mark.parametrize("value", ["half", "0.5;0.6", "0.5 0.6", "0,5x"])
def test_lists_of_numbers_hold_numbers(value: str) -> None:
    """A list of numbers with a value that is not one is refused with the whole list."""
    with pytest.raises(argparse.ArgumentTypeError, match=f"expected numbers separated by commas, got '{value}'"):
        numbers(value)


def test_whole_numbers() -> None:
    """A whole number of at least the bound is taken; anything else is refused with the bound."""
    assert whole_number(0)("0") == 0
    assert whole_number(1)("12") == 12
    for value in ("0", "-3", "1.5", "many", ""):
        with pytest.raises(argparse.ArgumentTypeError, match=f"expected a whole number of at least 1, got '{value}'"):
            whole_number(1)(value)


_FLAGS_OF_COMMANDS = {
    "calibrate": ("--output", "--checkpoint", "--vocabulary", "--data", "--generations", "--bleurt_checkpoint"),
    "calibrate --resume": ("--seqio_task", "--cluster_key", "--temp_location", "--template_location", "--runner"),
    "convert --layout=t5x --checkpoint=x": ("--output",),
    "convert --layout=t5x --output=x": ("--checkpoint",),
    "decode": ("--output", "--checkpoint", "--data"),
    "evaluate": ("--output", "--generations", "--checkpoint"),
    "evaluate --experiment=tradeoff": ("--output", "--checkpoint"),
    "generate --manifest=x": ("--manifest", "--output", "--input", "--checkpoint", "--vocabulary", "--prompt"),
    "inspect x": ("--checkpoint",),
    "monitor --manifest=x --losses=x": ("--manifest", "--losses", "--state"),
    "plan --delta=0.1": ("--output", "--pilot"),
    "report": ("--calibration", "--output", "--speedup", "--generations", "--checkpoint", "--vocabulary"),
    "train --output=x": ("--output", "--checkpoint", "--data", "--validation_data"),
    "train --stage=classifier --output=x": ("--output", "--checkpoint", "--data"),
    "verify --manifest=x": ("--manifest", "--checkpoint", "--vocabulary", "--data"),
}


@pytest.mark.parametrize("value", ["", " "], ids=["empty", "blank"])
@pytest.mark.parametrize(
    ("command", "flag"), [(command, flag) for command, flags in _FLAGS_OF_COMMANDS.items() for flag in flags]
)
def test_an_empty_path_is_refused(
    command: str,
    flag: str,
    value: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No command takes an empty path for the current folder: status 2, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    assert main([*command.split(), f"{flag}={value}"]) == 2
    printed = capsys.readouterr()
    assert f"{flag} is empty; leave it out" in printed.err or f"{flag}: expected values separated by" in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert list(tmp_path.iterdir()) == []


def test_texts_that_may_be_empty() -> None:
    """A flag whose default is no text may be given that, and spaces too."""
    assert _parse("--task_prefix=")[0].task_prefix == ""
    assert _parse("--task_prefix= ")[0].task_prefix == " "
