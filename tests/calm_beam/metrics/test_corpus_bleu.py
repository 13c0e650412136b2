"""BLEU of a set from the counts of its examples, against sacrebleu's own."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import sacrebleu

from calm_beam.metrics.corpus_bleu import NUM_COUNTS, bleu_counts, bleu_of

_WORDS = st.lists(st.sampled_from(["le", "chat", "noir", "dort", "été,", "œuf", "l'an", "."]), max_size=12).map(
    " ".join
)
_EXAMPLES = st.lists(st.tuples(_WORDS, st.lists(_WORDS, min_size=2, max_size=2)), min_size=1, max_size=8)


@hypothesis.settings(deadline=None, derandomize=True, max_examples=25)
@hypothesis.given(_EXAMPLES)
def test_summed_counts_give_sacrebleus_score(examples: list[tuple[str, list[str]]]) -> None:
    """Counts added example by example give sacrebleu's score of the whole set, with several references each."""
    total = sum((bleu_counts(text, references) for text, references in examples), np.zeros(NUM_COUNTS, np.int64))
    texts = [text for text, _ in examples]
    streams = [[references[place] for _, references in examples] for place in range(2)]
    assert bleu_of(total) == pytest.approx(sacrebleu.corpus_bleu(texts, streams).score, abs=1e-9)


def test_a_known_score() -> None:
    """An output equal to its reference has BLEU 100, and one without a common word 0."""
    assert bleu_of(bleu_counts("le chat noir dort bien", ["le chat noir dort bien"])) == pytest.approx(100)
    assert bleu_of(np.zeros(NUM_COUNTS, np.int64)) == 0
