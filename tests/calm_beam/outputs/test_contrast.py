"""A constant metric ends the run; one that varies little does not."""

import functools
import random
import re
from collections.abc import Sequence

import hypothesis
import pytest
from hypothesis import strategies as st

from calm_beam.manifest import Objective
from calm_beam.metrics.registry import METRICS, Metric, MetricError
from calm_beam.outputs import Generation
from calm_beam.outputs.metric_checks import Contrast, Sample
from calm_beam.outputs.scoring import score_by_policy
from tests.calm_beam.calibration.builders import build_example, build_generation

_TEXTUAL = Objective("textual", "m", loss="dissimilarity")
_RISK = Objective("risk", "m", loss="signed")


def _example(name: str, references: Sequence[str], *texts: str) -> Generation:
    return build_generation(texts, example=build_example(id=name, references=tuple(references)))


def _contrast(generations: Sequence[Generation], objectives: Sequence[Objective], metric: Metric) -> Contrast:
    return Contrast.merged(
        score_by_policy(
            each, objectives, metrics={"m": metric}, num_thresholds=max(1, len(each.outputs) - 1), on_error="worst_case"
        ).contrast
        for each in generations
    )


def _check(generations: Sequence[Generation], objective: Objective, metric: Metric) -> None:
    _contrast(generations, [objective], metric).check([objective], {"m": metric}.__getitem__)


def _by_references(candidate: str, references: Sequence[str]) -> float:
    return 1 / len(references[0])


def _distance(candidate: str, references: Sequence[str]) -> float:
    return float(candidate not in references)


def _by_latin_letters(candidate: str, references: Sequence[str]) -> float:
    """Returns exact match as a careless metric sees other scripts: not at all."""
    return float("".join(filter(str.isascii, candidate)) in ["".join(filter(str.isascii, text)) for text in references])


_EXACT = METRICS["exact_match"]
_IDS = [_example("b", ["a cat"], "12 5", "12 5", "9"), _example("a", ["a dog"], "7 5", "7", "9")]
_WORDS = [_example("b", ["a cat"], "a cat", "a cat", "cats"), _example("a", ["a dog"], "a dog", "dog", "a")]
_CYRILLIC = [_example("b", ["кот"], "кот", "кот", "пёс"), _example("a", ["пёс"], "пёс", "кот", "ёж")]


@pytest.mark.parametrize(
    ("generations", "objective", "metric", "message"),
    [
        # The case of ids against words, with a correct metric.
        (_IDS, _RISK, _EXACT, "gives the full model 0 on all 2 examples, its outputs compared with the references"),
        (_IDS, _RISK, _EXACT, "Example 'a': output '7 5' was compared with 'a dog'. Check the references"),
        (_WORDS, _RISK, lambda *_: 0, "gives the full model 0 on all 2 examples, its outputs compared with the ref"),
        (_WORDS, _TEXTUAL, lambda *_: 0, "gives the full model 0 on all 2 examples, its outputs compared with thems"),
        # With a distance in place of a similarity, worse outputs would be certified.
        (_WORDS, _TEXTUAL, _distance, "Example 'a': output 'a dog' was compared with itself. Take another metric"),
        (_WORDS, _RISK, lambda *_: 1, "on all 2 examples every output scores as the full model's does"),
        (_WORDS, _RISK, lambda *_: 1, "Example 'a': outputs 'a dog' and 'dog', compared with 'a dog', both score 1."),
        (_WORDS, _RISK, lambda *_: 0.3, "compared with 'a dog', both score 0.3."),
        (
            _WORDS,
            _TEXTUAL,
            lambda *_: 1,
            "outputs 'a dog' and 'dog', compared with 'a dog', both score 1. Take another",
        ),
        (_WORDS, _TEXTUAL, lambda *_: 0.3, "compared with 'a dog', both score 0.3. Take another metric"),
        (_WORDS, _RISK, _by_references, "compared with 'a dog', both score 0.2."),
        (_CYRILLIC, _RISK, _by_latin_letters, "outputs 'пёс' and 'кот', compared with 'пёс', both score 1."),
        (_CYRILLIC, _TEXTUAL, _by_latin_letters, "outputs 'пёс' and 'кот', compared with 'пёс', both score 1."),
        # If all outputs of the full model are equal, nothing shows that the metric works.
        (_WORDS[:1], _TEXTUAL, lambda *_: 1, "Example 'b': outputs 'a cat' and 'cats', compared with 'a cat', both"),
    ],
)
def test_metrics_that_tell_nothing(
    generations: Sequence[Generation], objective: Objective, metric: Metric, message: str
) -> None:
    """A metric that cannot see any difference on the data is refused, with one example of the compared texts."""
    with pytest.raises(MetricError, match=f'^metric "m" says nothing here: .*{re.escape(message)}'):
        _check(generations, objective, metric)


_SAME = [_example("a", ["a dog"], "a dog", "a dog"), _example("b", ["a cat"], "a cat", "a cat")]
_COMMAS = [_example("a", ["a dog"], "a dog", "A dog!"), _example("b", ["a cat"], "a cat", "a cat")]
_ANSWERS = [_example("a", ["dog", "hound"], "dog", "hound"), _example("b", ["cat"], "cat", "cat")]
_WRONG = [_example(f"{i}", ["right"], f"wrong {i}", f"wrong {i}!", f"still wrong {i}") for i in range(99)]


@pytest.mark.parametrize("objective", [_TEXTUAL, _RISK])
@pytest.mark.parametrize(
    ("generations", "metric"),
    [
        (_WORDS, _EXACT),
        (_WORDS, METRICS["rouge_l"]),
        # A model that never changes keeps every promise, with any metric.
        (_SAME, _EXACT),
        (_SAME, lambda *_: 1),
        (_SAME[:1], lambda *_: 0.3),
        # All scores are 1, and rightly so.
        (_COMMAS, _EXACT),
        (_COMMAS, METRICS["rouge_l"]),
        # The smallest ids are all wrong at every threshold; one example shows that the metric works.
        ([*_WRONG, _example("99", ["right"], "right", "right", "right")], _EXACT),
        ([], _EXACT),
        ([build_generation(failure="too long", outputs=())], _EXACT),
    ],
)
def test_metrics_that_tell_something(generations: Sequence[Generation], objective: Objective, metric: Metric) -> None:
    """A metric that could have seen a loss is accepted, also if there is none."""
    _check(generations, objective, metric)


def test_several_right_answers() -> None:
    """A model that is always right may change from one right answer to another."""
    _check(_ANSWERS, _RISK, _EXACT)


def test_the_metric_is_asked_for_where_it_is_in_doubt_only() -> None:
    """If scores differ, no metric is looked up and nothing is scored again."""

    def never(name: str) -> Metric:
        raise AssertionError(name)

    _contrast(_WORDS, [_TEXTUAL, _RISK], _EXACT).check([_TEXTUAL, _RISK], never)


def test_every_objective_is_checked() -> None:
    """One objective with a constant metric ends the run, whatever the others are."""
    contrast = _contrast(_IDS, [_TEXTUAL, _RISK], _EXACT)
    with pytest.raises(MetricError, match="compared with the references"):
        contrast.check([_TEXTUAL, _RISK], {"m": _EXACT}.__getitem__)


def test_long_and_strange_texts_are_shown_cut_and_escaped() -> None:
    """Shown texts have one line and a limited length."""
    generation = _example("a\n", ["\x1b[31m" + "r" * 500], "o\u202e" * 200, "x")
    with pytest.raises(MetricError, match="says nothing") as caught:
        _check([generation], _RISK, _EXACT)
    said = str(caught.value)
    assert said.isprintable()
    assert len(said) < 1200


_NAMES = st.text("abc", min_size=1, max_size=3)


@st.composite
def _generations(draw: st.DrawFn) -> list[Generation]:
    names = draw(st.lists(_NAMES, unique=True, max_size=20))
    texts = st.sampled_from(["a cat", "cat", "dog", "a dog", "owl", "hen", "fox", "the fox", "elk", "ant", "bee"])
    return [_example(name, [draw(texts)], *(draw(texts) for _ in range(3))) for name in names]


@hypothesis.settings(deadline=None)
@hypothesis.given(
    generations=_generations(), cuts=st.lists(st.integers(0, 20)), order=st.randoms(use_true_random=False)
)
def test_sharding_does_not_matter(generations: list[Generation], cuts: list[int], order: random.Random) -> None:
    """However examples are divided and merged, the contrast is the same; the shown examples have the smallest ids."""
    contrast = functools.partial(_contrast, objectives=[_TEXTUAL, _RISK], metric=_EXACT)
    whole = contrast(generations)
    shuffled = generations.copy()
    order.shuffle(shuffled)
    ends = sorted({min(cut, len(shuffled)) for cut in cuts} | {len(shuffled)})
    parts = [contrast(shuffled[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    left = functools.reduce(lambda one, two: Contrast.merged((one, two)), parts, Contrast())
    right = functools.reduce(lambda one, two: Contrast.merged((two, one)), parts[::-1], Contrast())
    assert whole == left == right
    by_id = sorted(generations, key=lambda each: each.example.id)
    assert whole.samples == tuple(_first_of_each_output(by_id))[:8]
    changed = (each for each in by_id if len({output.text for output in each.outputs}) > 1)
    assert (whole.changed and whole.changed.id) == next((each.example.id for each in changed), None)


def _first_of_each_output(generations: Sequence[Generation]) -> list[Sample]:
    first: dict[str, Sample] = {}
    for each in generations:
        texts = [output.text for output in each.outputs]
        first.setdefault(texts[0], Sample.of(each.example, texts))
    return list(first.values())
