"""A host answers under any manifest of its model, and loads each once."""

import dataclasses
import pathlib
from typing import Any

import pytest

from calm_beam.checkpoints import Declared, load_checkpoint
from calm_beam.errors import CalmBeamError
from calm_beam.manifest import ANY_ENTRY, read_manifest, write_manifest
from calm_beam.serving import Answer, Generator, ProbedAnswer, Unanswered
from calm_beam.serving import host as hosts
from calm_beam.serving.host import ModelHost
from calm_beam.serving.questions import HostedModel, NamedPrompt, Question, Reply, Sampling
from tests.calm_beam.serving.builders import build_entry, build_served_manifest
from tests.pipelines import write_model

_PROMPTS = tuple(NamedPrompt(prompt=prompt, id=str(prompt)) for prompt in ([5, 9, 12, 1], [7, 3, 1], [99], [40, 2, 1]))


class _Place:
    """A model in a folder, with manifests."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.model = str(write_model(folder / "model"))
        self.host = ModelHost(
            HostedModel(
                checkpoint=self.model,
                fingerprint="",
                declared=Declared(),
                vocabulary=None,
                batch_size=None,
                max_cache_tokens=None,
                exit_head="exact",
            )
        )

    def manifest(self, name: str, *thresholds: float | None, **changes: Any) -> str:
        """Writes a manifest, and returns its path."""
        entries = [build_entry(threshold, **changes) for threshold in thresholds]
        write_manifest(build_served_manifest(load_checkpoint(self.model), entries), self.folder / name)
        return str(self.folder / name)

    def ask(self, *manifests: str, **changes: Any) -> Reply:
        """Asks the host about all prompts."""
        question = Question(asker="a", manifests=manifests, choice=ANY_ENTRY, prompts=_PROMPTS, sampling=None)
        return self.host.answer(dataclasses.replace(question, **changes))


@pytest.fixture
def place(tmp_path: pathlib.Path) -> _Place:
    """A host of a tiny model."""
    return _Place(tmp_path)


def test_answers_come_in_order(place: _Place) -> None:
    """Answers have the order of the question and are the generator's; the model's load is reported once."""
    path = place.manifest("a.json", 0.2)
    reply = place.ask(path)
    generator = Generator.from_manifest(path, place.model)
    for prompt, outcome in zip(_PROMPTS, reply.outcomes, strict=True):
        if prompt.prompt == [99]:
            assert isinstance(outcome.inference, Unanswered)
            assert str(outcome.inference.error).startswith("prompt [99]: token ids must be")
        else:
            assert isinstance(outcome.inference, Answer)
            expected = generator.generate(prompt.prompt)
            assert outcome.inference.tokens == expected.tokens
            assert outcome.inference.exit_layers == expected.exit_layers
    assert (reply.manifest, reply.digest, reply.refused) == (path, read_manifest(path).digest, {})
    assert reply.work.prompts == 3
    assert len(reply.load_msecs) == 1
    assert place.ask(path).load_msecs == ()


def test_what_was_taken_last_stands_in(place: _Place) -> None:
    """A manifest without the entry is refused with the reason, and the last accepted one answers."""
    first, second = place.manifest("first.json", 0.2), place.manifest("second.json", 0.9)
    wrong = place.manifest("wrong.json", 0.2, delta=0.3)
    choice = dataclasses.replace(ANY_ENTRY, delta=0.1)
    assert place.ask(second, first, choice=choice).manifest == second
    reply = place.ask(wrong, first, choice=choice)
    assert reply.manifest == second
    assert list(reply.refused) == [wrong]
    assert "delta" in reply.refused[wrong]
    assert place.ask(wrong, first, choice=choice, asker="another").manifest == first
    with pytest.raises(CalmBeamError, match="delta"):
        place.ask(wrong, choice=choice, asker="a third")


def test_what_cannot_be_read_is_tried_again(place: _Place) -> None:
    """A missing file is tried again; a refused one is not."""
    first, late = place.manifest("first.json", 0.2), str(place.folder / "late.json")
    assert place.ask(late, first).manifest == first
    place.manifest("late.json", 0.9)
    assert place.ask(late, first).manifest == late
    broken = place.folder / "broken.json"
    broken.write_text("{}")
    assert place.ask(str(broken), first).manifest == late
    broken.unlink()
    place.manifest("broken.json", 0.9)
    assert place.ask(str(broken), first).manifest == late


def test_few_manifests_are_kept(place: _Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest that was used longest ago is dropped, and loaded again when it is requested."""
    monkeypatch.setattr(hosts, "_MOST_KEPT", 2)
    paths = [place.manifest(f"{number}.json", 0.1 * number) for number in range(1, 5)]
    for path in (*paths, paths[0]):
        assert place.ask(path).manifest == path
        assert len(place.host._kept) <= 2


def test_samples_are_measured(place: _Place) -> None:
    """With sampling, answers have losses, and prompts need ids; losses that cannot be measured are refused."""
    path = place.manifest("a.json", 0.2)
    sampling = Sampling(share=1, salt="a")
    reply = place.ask(path, sampling=sampling)
    assert [type(outcome.inference) for outcome in reply.outcomes] == [
        Unanswered if prompt.prompt == [99] else ProbedAnswer for prompt in _PROMPTS
    ]
    with pytest.raises(ValueError, match="prompts are sampled by their ids, and one has none"):
        place.ask(path, sampling=sampling, prompts=(NamedPrompt(prompt=[5, 1]),))
    risk = place.manifest("risk.json", 0.2, consistency="risk", loss="relu")
    assert place.ask(risk, path).manifest == risk
    refused = place.ask(risk, path, sampling=sampling, asker="b").refused
    assert "the entry is of risk consistency, whose losses need references" in refused[risk]


def test_the_salt_is_not_printed() -> None:
    """The log of a question does not reveal which prompts are measured."""
    assert "secret" not in repr(Sampling(share=1, salt="secret"))
