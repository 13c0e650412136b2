"""Texts that metrics see, and the rule for texts of which they see nothing."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from calm_beam.metrics import Sight, best_over_references, sight_of
from calm_beam.metrics.registry import METRICS

# Pairs of texts that differ and of which a metric sees nothing.
_UNSEEN = [
    ("rouge_l", "да", "нет"),
    ("rouge_l", "日本", "中国"),
    ("rouge_l", "...", "!"),
    ("rouge_l", "αβγ", "\n\n"),
    ("rouge_l_unicode", "...", "?!"),
    ("rouge_l_unicode", "🙂", "🙁"),
    ("rouge_l_unicode", "", "—"),
    ("token_f1", "\n\nA:", "\n" * 24),
    ("token_f1", "", "an a the"),
    ("token_f1", "The.", "..."),
    ("exact_match", "The", "..."),
    ("exact_match", "a", "An"),
    ("exact_match", "-", "!"),
    ("sentence_bleu", "<skipped>", ""),
    ("sentence_bleu", "-\n", "<skipped>"),
]


@pytest.mark.parametrize(("name", "one", "other"), _UNSEEN)
def test_different_texts_without_tokens_score_zero(name: str, one: str, other: str) -> None:
    """Two different texts of which a metric sees neither score 0, in either order."""
    metric = METRICS[name]
    assert not metric.sight.sees(one)
    assert not metric.sight.sees(other)
    for candidate, reference in ((one, other), (other, one)):
        assert metric(candidate, [reference]) == 0
        assert metric(candidate, [reference, "other words"]) == 0
        assert metric.sight.is_blind(candidate, [reference])
        assert metric.sight.is_blind(candidate, ["other words", reference])
        assert not metric.sight.is_blind(candidate, [reference, f" {candidate}\n"])
        assert metric(candidate, [reference, f" {candidate}\n"]) == 1


@pytest.mark.parametrize("name", METRICS)
def test_texts_that_are_equal_when_stripped_score_one(name: str) -> None:
    """Texts that differ only in surrounding white space are equal, seen or not."""
    metric = METRICS[name]
    for text in ("...", "the", "кот", "\n"):
        assert metric(text, [text]) == 1
        if not metric.sight.sees(text):
            assert metric(text, [f"{text}\n"]) == metric(f"\t{text}", [text]) == 1


@pytest.mark.parametrize("name", METRICS)
@settings(max_examples=40, deadline=None)
@given(one=st.text(alphabet="aA.,<\n кé5-", max_size=6), other=st.text(alphabet="aA.,<\n кé5-", max_size=6))
@example(one="the", other=".")
def test_the_rule_holds_for_every_metric(name: str, one: str, other: str) -> None:
    """If neither text is seen, the score is 1 for equal texts and else 0, in either order."""
    metric = METRICS[name]
    if not metric.sight.sees(one) and not metric.sight.sees(other):
        expected = float(one.strip() == other.strip())
        assert metric(one, [other]) == metric(other, [one]) == expected
        assert metric.sight.is_blind(one, [other]) == metric.sight.is_blind(other, [one]) == (expected == 0)
    elif not (metric.sight.sees(one) and metric.sight.sees(other)):
        assert metric(one, [other]) == metric(other, [one]) == 0
        assert not metric.sight.is_blind(one, [other])


def test_seen_texts_are_left_to_the_metric() -> None:
    """The rule applies to unseen texts alone, and a score by another reference still counts."""
    words = Sight(tokens=str.split)
    assert best_over_references(lambda one, other: 0.25, "one", references=["other"], sight=words) == 0.25
    assert best_over_references(lambda one, other: 0.25, "", references=["other"], sight=words) == 0.25
    assert best_over_references(lambda one, other: 0.25, "", references=[" "], sight=words) == 1
    assert best_over_references(lambda one, other: 0.25, "one", references=["", "two"], sight=words) == 0.25


@pytest.mark.parametrize(
    ("text", "dropped_by"),
    [
        ("В 2024 году лето было жарким", {"rouge_l"}),
        ("Το καλοκαίρι του 2024", {"rouge_l"}),
        ("夏は暑い in", {"rouge_l"}),
        ("Лето hot day", set()),
        ("l'été à Évry", set()),
        ("The A.", set()),
        ("a", set()),
        ("... !", set()),
        ("", set()),
        ("٣٤٥", {"rouge_l"}),
    ],
)
def test_letters_that_tokenisers_drop(text: str, dropped_by: set[str]) -> None:
    """`rouge_l` drops letters that are not a-z; dropped articles do not count, since they are left out on purpose."""
    assert {name for name, metric in METRICS.items() if metric.sight.drops_letters(text)} == dropped_by


def test_half_of_the_letters_is_not_most() -> None:
    """Two of four letters may be dropped; three of five may not."""
    assert not METRICS["rouge_l"].sight.drops_letters("ab же")
    assert METRICS["rouge_l"].sight.drops_letters("ab жеф")


def test_metrics_of_a_user_say_nothing() -> None:
    """A user's function does not say how it sees a text, so nothing is counted."""
    assert sight_of(lambda candidate, references: 1.0) is None
    assert all(sight_of(metric) is metric.sight for metric in METRICS.values())
