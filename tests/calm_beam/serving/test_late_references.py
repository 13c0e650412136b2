"""Losses whose references arrive later are all written, in the order of the answers."""

import dataclasses
import itertools
import json
import pathlib
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from calm_beam.launch.cli import main
from calm_beam.manifest import write_manifest
from calm_beam.serving import Answer, Generator, LateReferences, LossProbe, OutputError
from tests.builders import build_checkpoint
from tests.calm_beam.serving.builders import build_entry, build_served_manifest
from tests.pipelines import CONFIG

_CHECKPOINT = build_checkpoint(CONFIG)
_PROMPTS = [[5, 9, 12, 1], [7, 3, 1], [40, 2, 1]]
_REFERENCES = [[[9, 9, 9]], [[7, 7]], [[12]]]


@pytest.fixture(scope="module")
def generator() -> Generator:
    """A generator with a promise of risk consistency."""
    entry = build_entry(0.2, consistency="risk", loss="relu")
    return Generator.from_manifest(build_served_manifest(_CHECKPOINT, (entry,)), _CHECKPOINT)


@pytest.fixture(scope="module")
def answers(generator: Generator) -> list[Answer]:
    """The answers to the prompts."""
    return [generator.generate(prompt) for prompt in _PROMPTS]


def _probe(generator: Generator, path: pathlib.Path) -> LossProbe:
    return LossProbe(generator, path, share=1, salt="")


def _rows(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
def test_the_order_in_which_references_come_changes_nothing(
    order: Sequence[int], generator: Generator, answers: Sequence[Answer], tmp_path: pathlib.Path
) -> None:
    """In any order of references, the file is to the byte what `observe` writes for the same requests in sequence."""
    at_once = _probe(generator, tmp_path / "at_once")
    losses = [
        at_once.observe(str(place), _PROMPTS[place], answer=answers[place], references=_REFERENCES[place])
        for place in range(3)
    ]
    late = LateReferences(_probe(generator, tmp_path / "late"))
    for place in range(3):
        late.remember(str(place), _PROMPTS[place], answer=answers[place])
    missing = set(range(3))
    for place in order:
        assert late.observe(str(place), _REFERENCES[place]) == losses[place]
        missing.remove(place)
        written = min(missing, default=3)
        assert late.waiting == tuple(map(str, sorted(missing)))
        assert late.held_back == 3 - len(missing) - written
        assert [row["id"] for row in _rows(tmp_path / "late")] == list(map(str, range(written)))
    assert (tmp_path / "late").read_bytes() == (tmp_path / "at_once").read_bytes()


def test_an_answer_of_another_group_is_not_remembered(
    generator: Generator, answers: Sequence[Answer], tmp_path: pathlib.Path
) -> None:
    """An answer of another group is refused at once: if it waited, it would count with loss 1."""
    late = LateReferences(_probe(generator, tmp_path / "losses"))
    with pytest.raises(ValueError, match="request a: was answered for group 'fr', but the probe is about all prompts"):
        late.remember("a", _PROMPTS[0], answer=dataclasses.replace(answers[0], group="fr"))
    assert late.waiting == ()


def test_what_never_comes_is_counted(generator: Generator, answers: Sequence[Answer], tmp_path: pathlib.Path) -> None:
    """Requests given up, displaced by later ones, without an output, or still waiting have loss 1 with the reason."""
    path = tmp_path / "losses"
    with LateReferences(_probe(generator, path), most=3) as late:
        for name in ("a", "b"):
            late.remember(name, _PROMPTS[0], answer=answers[0])
        late.remember_failure("c", OutputError("broken"))
        assert late.waiting == ("a", "b")
        late.give_up("b", "deleted on request")
        assert _rows(path) == []
        # It displaces the first, and all that waited for that follow.
        late.remember("d", _PROMPTS[1], answer=answers[1])
        late.remember("e", _PROMPTS[1], answer=answers[1])
        late.observe("e", [list(answers[1].tokens)])
        assert (late.waiting, late.held_back) == (("d",), 1)
    assert late.waiting == ()
    assert [(row["id"], row["loss"], row["failure"]) for row in _rows(path)] == [
        ("a", 1, "no references: none had come 3 requests later"),
        ("b", 1, "no references: deleted on request"),
        ("c", 1, "OutputError: broken"),
        ("d", 1, "no references: none had come when the probe was closed"),
        ("e", _rows(path)[4]["loss"], None),
    ]


def test_monitor_reads_the_rows(
    generator: Generator, answers: Sequence[Answer], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`calm-beam monitor` reads them as losses of the manifest's entry; those given up are missing."""
    write_manifest(generator.manifest, tmp_path / "manifest.json")
    with LateReferences(_probe(generator, tmp_path / "losses")) as late:
        for number in range(40):
            late.remember(str(number), _PROMPTS[0], answer=answers[0])
    assert main(["monitor", f"--manifest={tmp_path}", f"--losses={tmp_path / 'losses'}"]) == 4
    assert (
        "40 losses, 40 of them missing.\nALARM at loss 3: the risk exceeds delta 0.1, or losses are missing."
        in capsys.readouterr().out
    )


def test_what_does_not_wait_is_refused(generator: Generator, answers: Sequence[Answer], tmp_path: pathlib.Path) -> None:
    """Unknown and settled requests, repeated ids and unfit references are refused; the latter may be sent again."""
    late = LateReferences(_probe(generator, tmp_path / "losses"))
    late.remember("first", _PROMPTS[0], answer=answers[0])
    late.remember("a", _PROMPTS[0], answer=answers[0])
    with pytest.raises(ValueError, match="request a: is remembered already"):
        late.remember("a", _PROMPTS[0], answer=answers[0])
    for references, message in (([], "needs references to measure a loss, got none"), (["text"], "has no vocabulary")):
        with pytest.raises(ValueError, match=f"request a: .*{message}"):
            late.observe("a", references)
    late.observe("a", [[9]])
    calls: list[Callable[[str], object]] = [lambda name: late.observe(name, [[9]]), lambda name: late.give_up(name, "")]
    for name, call in itertools.product(("a", "unknown"), calls):
        with pytest.raises(ValueError, match=rf"request {name}: does not wait for references\. It was never"):
            call(name)
    assert (late.waiting, late.held_back) == (("first",), 1)
    with pytest.raises(ValueError, match="most must be at least 1, got 0"):
        LateReferences(_probe(generator, tmp_path / "losses"), most=0)
    textual = Generator.from_manifest(build_served_manifest(_CHECKPOINT, (build_entry(0.2),)), _CHECKPOINT)
    with pytest.raises(ValueError, match="is of textual consistency, whose losses need no references: call observe"):
        LateReferences(_probe(textual, tmp_path / "losses"))


def test_a_file_that_cannot_be_written_loses_no_loss(
    generator: Generator, answers: Sequence[Answer], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that could not be written is written with the next one, in order."""
    late = LateReferences(_probe(generator, tmp_path / "losses"))
    for name in "ab":
        late.remember(name, _PROMPTS[0], answer=answers[0])

    def full(path: object, line: str) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("calm_beam.serving.probe.append_line", full)
        with pytest.raises(OSError, match="no space left"):
            late.observe("a", [[9]])
    assert late.held_back == 1
    late.observe("b", [[9]])
    assert [row["id"] for row in _rows(tmp_path / "losses")] == ["a", "b"]


def test_giving_up_what_is_being_measured(
    generator: Generator, answers: Sequence[Answer], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request has one loss: the measured one, or that of giving up, whichever is first."""
    probe = _probe(generator, tmp_path / "losses")
    late = LateReferences(probe)
    late.remember("a", _PROMPTS[0], answer=answers[0])
    measure, begun, may_end = probe.measure, threading.Event(), threading.Event()

    def slowly(*arguments: Any, **options: Any) -> Any:
        begun.set()
        assert may_end.wait(60)
        return measure(*arguments, **options)

    monkeypatch.setattr(probe, "measure", slowly)
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(late.observe("a", [list(answers[0].tokens)])))
    thread.start()
    assert begun.wait(60)
    with pytest.raises(ValueError, match=re.escape("request a: does not wait")):
        late.observe("a", [[9]])
    late.close()
    may_end.set()
    thread.join(60)
    assert found == [1.0]
    assert [row["loss"] for row in _rows(tmp_path / "losses")] == [1.0]
