"""Options are declared once, checked when they are made, and named as the caller names them."""

import dataclasses
import pathlib
import re
from typing import Any, cast

import pytest

from calm_beam.calibration.guarantee import Guarantee
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs.reading import seqio_name
from calm_beam.options import OptionError, Options, option, options_of, switch
from calm_beam.options.groups import DataSource, Decoding, Engine, ExitGrid, Failures, Memory, OneRule, PrecisionOptions
from calm_beam.options.kinds import (
    Kind,
    confidences,
    integer,
    numbers,
    paths,
    share,
    texts,
    whole_number,
    whole_numbers,
)
from calm_beam.options.option import default_of, in_python, own_options_of, shared


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Coffee(Options):
    """A group of two."""

    size: int = option(2, "how large", kind=whole_number(1, 5))
    milk: bool = switch("with milk")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Order(_Coffee):
    """A request."""

    syrup: str | None = option(None, "which", choices=("nut", "vanilla"), belongs_to=("milk",))


def test_a_group_knows_its_own_options_and_all() -> None:
    """A group's options include inherited ones, which are listed with the group that declares them."""
    assert [name for name, _ in options_of(_Order)] == ["size", "milk", "syrup"]
    assert [name for name, _ in own_options_of(_Order)] == ["syrup"]
    assert default_of(_Order, "size") == 2
    assert shared(_Order(size=3), _Coffee) == {"size": 3, "milk": False}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": 0}, "--size: expected a whole number of at least 1, got 0."),
        ({"size": 9}, "--size: expected a whole number of at most 5, got 9."),
        ({"size": True}, "--size: expected a whole number of at least 1, got True."),
        ({"size": "many"}, "--size: expected a whole number of at least 1, got 'many'."),
        ({"size": [1]}, "--size: expected a whole number, got [1]."),
        ({"milk": 1}, "--milk: expected True or False, got 1."),
        ({"milk": True, "syrup": "tar"}, "--syrup: invalid choice: 'tar' (choose from 'nut', 'vanilla')."),
        ({"syrup": "nut"}, "--syrup belongs to --milk, which is missing."),
    ],
)
def test_values_are_checked_when_a_request_is_made(given: dict[str, Any], message: str) -> None:
    """The error names the option, what was expected, and what was given."""
    with pytest.raises(OptionError) as caught:
        _Order(**given)
    assert str(caught.value) == message
    assert caught.value.name in given


def test_a_partner_may_be_a_value() -> None:
    """A limit of failures needs the option that counts them, and no other."""
    assert Failures(on_error="worst_case", max_failures=3).max_failures == 3
    with pytest.raises(OptionError, match="--max_failures belongs to --on_error=worst_case, which is missing"):
        Failures(max_failures=3)


@pytest.mark.parametrize(
    ("kind", "text", "value", "kept"),
    [
        (texts, "a, b", ["a", "b"], ("a", "b")),
        (texts, "a", "a", ("a",)),
        (paths, "no/a,no/b", [pathlib.Path("no/a"), "no/b"], ("no/a", "no/b")),
        (numbers, "1,0.5", (1, 0.5), (1.0, 0.5)),
        (numbers, "0.5", 0.5, (0.5,)),
        (whole_numbers(1), "1,2", [1, 2], (1, 2)),
        (whole_numbers(1), "3", 3, (3,)),
        (share, "2%", 0.02, 0.02),
        (confidences, "softmax,state", ["softmax", "state"], ("softmax", "state")),
    ],
)
def test_texts_and_values_are_kept_alike(kind: Kind, text: str, value: object, kept: object) -> None:
    """A text from the command line and a value from Python are stored alike."""
    assert kind(text) == kept
    assert kind.taken(value) == kept


def test_a_path_of_pythons_is_one() -> None:
    """A text from Python is one path, with commas or not; the command line splits at commas."""
    assert DataSource(data="no/a,b").data == ("no/a,b",)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataSource(seqio_split="test"), "--seqio_split belongs to --seqio_task"),
        (lambda: DataSource(data_format="text"), "--data_format belongs to --data"),
        (lambda: DataSource(data="x", seqio_task="t"), "--seqio_task=t and --data both name the data"),
        (lambda: DataSource(data_format="seqio"), "--data_format=seqio needs --seqio_task"),
        (lambda: Engine(exit_head="int4"), "--exit_head: invalid choice: 'int4'"),
        (lambda: Engine(exit_head="bfloat16"), "--exit_head: bfloat16 is gone"),
        (lambda: OneRule(confidence="sure"), "--confidence: invalid choice: 'sure'"),
        (lambda: Memory(max_cache_tokens=0), "--max_cache_tokens: expected a whole number of at least 1, got 0"),
        (lambda: ExitGrid(grid_step=cast(Any, "x")), "--grid_step: expected float, got 'x'"),
    ],
)
def test_groups_check_what_concerns_them_alone(make: Any, message: str) -> None:
    """A group checks itself when it is made, and names its errors."""
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        make()


def test_what_groups_come_to() -> None:
    """SeqIO data have a name, and a precision is a value of its own."""
    assert DataSource(seqio_task="task").patterns == (seqio_name("task", "validation"),)
    assert DataSource(seqio_task="task", seqio_module=["m"]).reading(group_key="g").seqio_modules == ("m",)
    assert DataSource().patterns is None
    assert PrecisionOptions(dtype="bfloat16").precision.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        ("Pass --milk, or leave --syrup=nut out.", "Pass milk=True, or leave syrup='nut' out."),
        ("--size=3 is small.", "size=3 is small."),
        ("--size /a/b: is --other=2 --milks", "size /a/b: is --other=2 --milks"),
        ("--syrup: expected x, got y", "syrup: expected x, got y"),
        ("Name it: --syrup=my_syrups:maple.", "Name it: syrup='my_syrups:maple'."),
        ("--syrup=gs://b/nut,gs://b/oat: no such file", "syrup='gs://b/nut,gs://b/oat': no such file"),
        ("Name it: --syrup=nut (syrup= in Python).", "Name it: syrup='nut'."),
    ],
)
def test_messages_call_options_as_python_does(flags: str, arguments: str) -> None:
    """Options lose their dashes, and values are written as Python writes them; other flags stay."""
    assert in_python(flags, dict(options_of(_Order))) == arguments


def test_numbers_may_be_chosen_among() -> None:
    """Choices may be numbers."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Cups(Options):
        count: int = option(1, "how many", kind=integer, choices=(1, 2))

    assert Cups(count="2").count == 2  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"--count: invalid choice: 3 \(choose from 1, 2\)\."):
        Cups(count=3)


def test_a_decoder_is_told_all_of_one_group() -> None:
    """A decoder gets all five options of one group, of whatever else they are a part."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Task(Decoding, Failures):
        """More than that."""

    asked = {"batch_size": 4, "max_cache_tokens": None, "model_parallelism": 1, "engine": "xla", "exit_head": "exact"}
    assert Task(batch_size=4, engine="xla", exit_head="exact").asked_of_decoder() == asked


def test_a_function_in_place_of_its_name() -> None:
    """A function given as a metric or a measure is answered with the name to give instead."""
    named = re.escape(f"got the function itself. Name it: '{__name__}:test_groups_check_what_concerns_them_alone'.")
    function = cast(Any, test_groups_check_what_concerns_them_alone)
    with pytest.raises(ValueError, match=f"^metric must be a name, {named}"):
        Guarantee("textual", function, delta=0.1)
    with pytest.raises(ValueError, match=f"^confidence must be a name, {named}"):
        ExitRule(confidence=function)
    with pytest.raises(OptionError, match=f"^--confidence: .*{named}"):
        OneRule(confidence=function)
