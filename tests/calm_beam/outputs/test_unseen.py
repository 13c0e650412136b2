"""Examples with texts that a metric does not see are counted exactly, and too many of them end the run."""

import dataclasses
import functools
import random
import re
from collections.abc import Sequence

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from calm_beam.calibration.guarantee import Guarantee
from calm_beam.calibration.variants import whole_of
from calm_beam.manifest import Objective, UnseenRecord, unseen_in_words
from calm_beam.metrics.registry import METRICS, MetricError
from calm_beam.outputs import Generation
from calm_beam.outputs.metric_checks import Contrast, Unseen, UnseenText, largest_unseen, merged_unseen
from calm_beam.outputs.scoring import ScoredGeneration, score_by_policy
from calm_beam.outputs.totals import Layout
from calm_beam.risk.losses import LOSS_SCALE
from tests.calm_beam.calibration.builders import build_example, build_generation, build_totals

_LOSSES = {"textual": "dissimilarity", "risk": "signed"}
_SPEC = Guarantee("textual", "rouge_l", delta=0.1).planned()
_SEEN = ("the summer was hot", "the summer was hot", "the winter was cold")
_BREAKS = ("\n\nA:", "\n" * 24, "\n")
_RUSSIAN = ("В 2024 году лето было жарким", "В 2024 году лето было жарким", "В 2024 году зима была холодной")


def _objective(metric: str, consistency: str = "textual", *, loss: str | None = None) -> Objective:
    return Objective(consistency, metric, loss=loss or _LOSSES[consistency])


def _example(name: str, texts: Sequence[str], *references: str) -> Generation:
    return build_generation(texts, example=build_example(id=name, references=references))


def _scored(generation: Generation, objectives: Sequence[Objective]) -> ScoredGeneration:
    metrics = {objective.metric: METRICS[objective.metric] for objective in objectives}
    return score_by_policy(
        generation, objectives, metrics=metrics, num_thresholds=len(generation.outputs) - 1, on_error="fail"
    )


def _contrast(generations: Sequence[Generation], objectives: Sequence[Objective]) -> Contrast:
    return Contrast.merged(_scored(each, objectives).contrast for each in generations)


def _check(generations: Sequence[Generation], objectives: Sequence[Objective]) -> None:
    _contrast(generations, objectives).check(objectives, METRICS.__getitem__)


def _mixed(unseen: Sequence[str], *references: str, count: int, of: int) -> list[Generation]:
    """Returns the given number of examples with these outputs among others that every metric sees."""
    seen = [_example(f"s{index:03}", _SEEN, "the summer was hot") for index in range(of - count)]
    return [_example(f"u{index:03}", unseen, *references) for index in range(count)] + seen


@pytest.mark.parametrize(
    ("metric", "consistency", "texts", "references", "expected"),
    [
        # Texts that the metric sees, or that are equal.
        ("token_f1", "textual", _SEEN, (), (0, 0)),
        ("token_f1", "textual", ("...", "...", " ...\n"), (), (0, 0)),
        ("token_f1", "textual", ("cat", "...", "the"), (), (0, 0)),
        ("rouge_l", "textual", ("cat", "кот", "да"), (), (0, 0)),
        # Two texts without any token, at one threshold or at all.
        ("token_f1", "textual", _BREAKS, (), (1, 0)),
        ("token_f1", "textual", ("A", "A", "the"), (), (1, 0)),
        ("exact_match", "textual", ("The", "...", "cat"), (), (1, 0)),
        ("rouge_l_unicode", "textual", ("...", "!", "..."), (), (1, 0)),
        ("rouge_l", "textual", ("да", "нет", "да"), (), (1, 1)),
        # Most letters of the texts to compare with are dropped.
        ("rouge_l", "textual", _RUSSIAN, (), (0, 1)),
        ("rouge_l_unicode", "textual", _RUSSIAN, (), (0, 0)),
        ("token_f1", "textual", _RUSSIAN, (), (0, 0)),
        # Against references, one of which is enough.
        ("token_f1", "risk", ("...", "...", "..."), ("the",), (1, 0)),
        ("token_f1", "risk", ("...", "cat", "the"), ("cat", "the"), (1, 0)),
        ("token_f1", "risk", ("cat", "cat", "..."), ("...", "cat"), (0, 0)),
        ("token_f1", "risk", ("cat", "...", "cat"), ("cat",), (0, 0)),
        ("rouge_l", "risk", ("cat", "cat", "dog"), ("кот 1",), (0, 1)),
        ("rouge_l", "risk", ("кот 1", "cat", "dog"), ("cat",), (0, 1)),
        ("rouge_l", "risk", ("cat", "кот 1", "dog"), ("cat",), (0, 0)),
    ],
)
def test_what_counts_as_unseen(
    metric: str, consistency: str, texts: Sequence[str], references: Sequence[str], expected: tuple[int, int]
) -> None:
    """An example counts once if an output looks like its comparison text to the metric, or too little is read."""
    found = _contrast([_example("a", texts, *references)], [_objective(metric, consistency)]).unseen
    assert found == () if expected == (0, 0) else [(each.no_token, each.few_letters) for each in found] == [expected]


@pytest.mark.parametrize(
    ("metric", "texts", "seeing"),
    [
        ("token_f1", _BREAKS, "rouge_l, rouge_l_unicode, chrf, sentence_bleu, edit_distance"),
        ("exact_match", ("a", "the", "an"), "rouge_l, rouge_l_unicode, chrf, sentence_bleu, edit_distance"),
        ("rouge_l", ("да", "нет", "да"), "rouge_l_unicode, token_f1, exact_match, chrf, sentence_bleu, edit_distance"),
        (
            "rouge_l",
            ("日本", "中国", "!"),
            "rouge_l_unicode, token_f1, exact_match, chrf, sentence_bleu, edit_distance",
        ),
        ("rouge_l_unicode", ("🙂", "🙁", "?"), "token_f1, exact_match, chrf, sentence_bleu, edit_distance"),
        ("sentence_bleu", ("<skipped>", "", "-\n"), "rouge_l, rouge_l_unicode, token_f1, exact_match, chrf"),
    ],
)
def test_more_than_a_tenth_without_tokens_end_the_run(metric: str, texts: Sequence[str], seeing: str) -> None:
    """Ten of a hundred are counted; eleven end the run with a message that names one and the metrics that see it."""
    objectives = [_objective(metric)]
    _check(_mixed(texts, count=10, of=100), objectives)
    message = (
        f'^metric "{metric}" says nothing here: in 11 of 100 examples it sees no token of two texts that differ.*'
        f"Example 'u000': {re.escape(repr(texts[1]))} was compared with {re.escape(repr(texts[0]))}. "
        f"Metrics that see such texts: {seeing}"
    )
    with pytest.raises(MetricError, match=message):
        _check(_mixed(texts, count=11, of=100), objectives)


@pytest.mark.parametrize(
    ("texts", "references", "consistency"),
    [
        (_RUSSIAN, (), "textual"),
        (("Το 2024 έκανε ζέστη", "Το 2024", "2024"), (), "textual"),
        (("夏 1 は暑い", "冬 1", "1"), (), "textual"),
        (("it was hot in 2024", "2024", "2024"), ("В 2024 году лето было жарким",), "risk"),
    ],
)
def test_more_than_a_tenth_of_which_most_letters_are_dropped_end_the_run(
    texts: Sequence[str], references: Sequence[str], consistency: str
) -> None:
    """A metric that compares only the remainder of texts in another script is refused by its letters."""
    objectives = [_objective("rouge_l", consistency)]
    _check(_mixed(texts, *references, count=10, of=100), objectives)
    with pytest.raises(
        MetricError,
        match=r'^metric "rouge_l" says too little here: in 11 of 100 examples its tokeniser drops more than half of '
        r"the letters.*Metrics that see such texts: rouge_l_unicode, token_f1",
    ):
        _check(_mixed(texts, *references, count=11, of=100), objectives)
    _check(_mixed(texts, *references, count=100, of=100), [_objective("rouge_l_unicode", consistency)])


def test_no_metric_is_recommended_that_does_not_see_the_texts_either() -> None:
    """If none of our metrics sees the texts, the message says so; only characters separate empty texts from blanks."""
    text = UnseenText(id="a", text="", against="")
    with pytest.raises(MetricError, match=r"None of the metrics that come with calm-beam sees such texts\. Look at"):
        Unseen(metric="rouge_l", no_token=1, no_token_samples=(text,)).check(examples=1)


@pytest.mark.parametrize("loss", ["dissimilarity", "dissimilarity>0.3"])
@pytest.mark.parametrize("metric", ["token_f1", "exact_match"])
def test_unseen_texts_are_losses(metric: str, loss: str) -> None:
    """An output indistinguishable from the full model's has loss 1, in mean and tail; an equal one has 0."""
    scored = _scored(_example("a", ("\n\nA:", "\n" * 24, "A:\n")), [_objective(metric, loss=loss)])
    assert scored.losses.tolist() == [[LOSS_SCALE, 0]]


def test_an_example_counts_once_for_a_metric() -> None:
    """Mean and tail, textual and risk consistency of one metric count an example once."""
    objectives = [
        _objective("token_f1"),
        _objective("token_f1", loss="dissimilarity>0.3"),
        _objective("token_f1", "risk"),
        _objective("exact_match"),
        _objective("rouge_l"),
    ]
    found = _contrast([_example("a", _BREAKS, "the")], objectives).unseen
    assert [(each.metric, each.no_token, each.few_letters) for each in found] == [
        ("exact_match", 1, 0),
        ("token_f1", 1, 0),
    ]


def test_only_metrics_that_are_asked_about_are_checked() -> None:
    """At a round's look, objectives that are not settled yet end nothing."""
    objectives = [_objective("token_f1"), _objective("rouge_l_unicode")]
    contrast = _contrast(_mixed(_BREAKS, count=20, of=40), objectives)
    contrast.check(objectives, METRICS.__getitem__, among=objectives[1:])
    with pytest.raises(MetricError, match=r'^metric "token_f1" says nothing here'):
        contrast.check(objectives, METRICS.__getitem__, among=objectives[:1])


def test_variants_are_of_the_same_examples() -> None:
    """Of several variants the larger count is used, since their examples are the same."""
    one = (Unseen(metric="b", no_token=3), Unseen(metric="c", few_letters=2))
    other = (Unseen(metric="a", no_token=1), Unseen(metric="b", no_token=2, few_letters=4))
    counts = [(each.metric, each.no_token, each.few_letters) for each in largest_unseen([one, other])]
    assert counts == [("a", 1, 0), ("b", 3, 4), ("c", 0, 2)]
    layout = Layout.of([_SPEC], thresholds=2)
    variants = [
        dataclasses.replace(build_totals(np.zeros((3, 1, 2)), layout), contrast=Contrast(examples=3, unseen=unseen))
        for unseen in (one, other)
    ]
    whole = whole_of(variants).contrast
    assert (whole.examples, whole.unseen) == (3, largest_unseen([other, one]))


def test_manifests_say_what_was_not_seen() -> None:
    """Every metric has a record in the manifest, and every count a sentence."""
    found = Unseen(metric="rouge_l", no_token=1, few_letters=1200)
    assert found.record() == UnseenRecord(metric="rouge_l", no_token=1, few_letters=1200)
    assert unseen_in_words([found.record()]) == (
        "rouge_l saw no token of two different texts in 1 example: they score 0. rouge_l drops more than half of the "
        "letters of a text in 1,200 examples."
    )
    assert unseen_in_words([]) == ""


_TEXTS = st.sampled_from(["", "the", "...", "cat", "кот", "кот 1", "a", "2024"])


@st.composite
def _generations(draw: st.DrawFn) -> list[Generation]:
    names = draw(st.lists(st.text("abc", min_size=1, max_size=3), unique=True, max_size=12))
    return [_example(name, [draw(_TEXTS) for _ in range(3)], draw(_TEXTS)) for name in names]


@hypothesis.settings(deadline=None, max_examples=50)
@hypothesis.given(
    generations=_generations(), cuts=st.lists(st.integers(0, 12)), order=st.randoms(use_true_random=False)
)
def test_counts_merge_in_any_order(generations: list[Generation], cuts: list[int], order: random.Random) -> None:
    """In any division and merge order, counts are the numbers of examples, and samples the smallest."""
    objectives = [_objective("token_f1"), _objective("rouge_l", "risk")]
    count = functools.partial(_contrast, objectives=objectives)
    whole = count(generations)
    shuffled = generations.copy()
    order.shuffle(shuffled)
    ends = sorted({min(cut, len(shuffled)) for cut in cuts} | {len(shuffled)})
    parts = [count(shuffled[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    left = functools.reduce(lambda one, two: Contrast.merged((one, two)), parts, Contrast())
    right = functools.reduce(lambda one, two: Contrast.merged((two, one)), parts[::-1], Contrast())
    assert whole == left == right
    assert merged_unseen(each.unseen for each in parts) == whole.unseen
    for found in whole.unseen:
        single = [each for one in generations for each in count([one]).unseen if each.metric == found.metric]
        assert found.no_token == sum(each.no_token for each in single)
        assert found.few_letters == sum(each.few_letters for each in single)
        names = sorted(each.no_token_samples[0].id for each in single if each.no_token)
        assert [sample.id for sample in found.no_token_samples] == names[:8]
