"""Tests of ROUGE-L against a longest common subsequence written here."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calm_beam.metrics.rouge_l import rouge_l, rouge_l_score

_WORDS = st.lists(st.sampled_from("abcd"), max_size=8)


def longest_common_subsequence(ours: tuple[str, ...], theirs: tuple[str, ...]) -> int:
    """Returns the length of the longest common subsequence, by its definition."""
    if not ours or not theirs:
        return 0
    if ours[0] == theirs[0]:
        return 1 + longest_common_subsequence(ours[1:], theirs[1:])
    return max(longest_common_subsequence(ours[1:], theirs), longest_common_subsequence(ours, theirs[1:]))


def expected_f_measure(ours: list[str], theirs: list[str]) -> float:
    """Returns 2 P R / (P + R) of the two token lists."""
    common = longest_common_subsequence(tuple(ours), tuple(theirs))
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0


@settings(deadline=None)  # The first example imports nltk.
@given(ours=_WORDS, theirs=_WORDS)
def test_agrees_with_brute_force(ours: list[str], theirs: list[str]) -> None:
    """The score is the F-measure of the longest common subsequence; two empty texts are identical and score 1."""
    expected = expected_f_measure(ours, theirs) if ours or theirs else 1.0
    assert rouge_l(" ".join(ours), [" ".join(theirs)]) == pytest.approx(expected, rel=1e-12)


@given(ours=_WORDS, theirs=_WORDS)
def test_is_symmetric(ours: list[str], theirs: list[str]) -> None:
    """Exchanging the texts exchanges precision and recall, so their F-measure is unchanged."""
    one, two = " ".join(ours), " ".join(theirs)
    assert rouge_l(one, [two]) == pytest.approx(rouge_l(two, [one]), rel=1e-12)


def test_known_value() -> None:
    """Lin's example: "police kill the gunman" shares 2 of 4 words in order with "police killed the gunman" + 1."""
    assert rouge_l("police kill the gunman", ["police killed the gunman"]) == 0.75
    assert rouge_l("the gunman kill police", ["police killed the gunman"]) == 0.5


def test_case_and_punctuation_do_not_count() -> None:
    """The default tokeniser lowercases and drops all characters but [a-z0-9]."""
    assert rouge_l("The cat -- sat!", ["the CAT sat"]) == 1.0


def test_default_tokeniser_breaks_accents() -> None:
    """Accented letters are lost, which is why there is another ROUGE-L: these words differ and score 1."""
    assert rouge_l("pâte", ["pête"]) == 1.0


@pytest.mark.parametrize(("candidate", "reference"), [("...", "!"), ("", "..."), ("日本", "中国"), ("...", "word")])
def test_different_texts_without_tokens_score_zero(candidate: str, reference: str) -> None:
    """Different texts of which one has no token score 0."""
    assert rouge_l(candidate, [reference]) == 0.0


def test_rouge_score_itself_gives_zero_to_identical_texts_without_tokens() -> None:
    """The package gives identical texts without tokens 0, which is the reason for our exception."""
    from rouge_score import rouge_scorer

    assert rouge_scorer.RougeScorer(["rougeL"]).score("...", "...")["rougeL"].fmeasure == 0
    assert rouge_l("...", ["..."]) == 1.0


def test_shortcut_agrees_with_the_scorer() -> None:
    """For identical texts with tokens the scorer gives exactly 1 as well."""
    from rouge_score import rouge_scorer

    scorer = rouge_scorer.RougeScorer(["rougeL"])
    for length in range(1, 60):
        text = " ".join(map(str, range(length)))
        assert scorer.score(text, text)["rougeL"].fmeasure == 1.0


def test_tokenizer_argument_is_used() -> None:
    """A given tokeniser decides what the tokens are."""

    class Letters:
        def tokenize(self, text: str) -> list[str]:
            return list(text)

    assert rouge_l_score("abcd", "abed", tokenizer=Letters()) == 0.75
    assert rouge_l_score("abcd", "abed") == 0.0
