"""Generates English sentences with their correct French translations.

Every sentence comes from one distribution: a template drawn by weight, then its words. English does not say what
French must (tu or vous, which synonym), so a sentence has several references, and the canonical one, which training
uses, is sometimes another than the usual: no model can be right about it every time.
"""

import dataclasses
import random
import re

from tools.demo_task import amounts, compound, descriptions, english, french, questions
from tools.demo_task.clauses import Draft, Template
from tools.demo_task.phrases import VOICES

MAX_REFERENCES = 6
# Shorter English sentences ("Run!") are left out.
MIN_WORDS = 3
# How often the canonical reference is drawn from all of them instead of being the usual one.
_UNUSUAL_RATE = 0.3
_CONTRACTED_RATE = 0.4
# Repeated draws in a row without a new sentence after which the space counts as exhausted.
_MAX_MISSES = 2000
_NOT_A_WORD = re.compile(r"[^\w\s]")

TEMPLATES: dict[Template, int] = descriptions.TEMPLATES | compound.TEMPLATES | amounts.TEMPLATES | questions.TEMPLATES


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentencePair:
    """An English sentence and its French references.

    Attributes:
      english: With capital and final punctuation.
      french: From one to six distinct translations, the canonical one first.
    """

    english: str
    french: tuple[str, ...]


def generate_pairs(*, seed: int, count: int) -> list[SentencePair]:
    """Returns sentence pairs whose English sentences differ by more than case and punctuation.

    Args:
      seed: Determines the result.
      count: How many, at least 1.

    Raises:
      ValueError: If `count` is below 1, or too large for the grammar.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}.")
    rng = random.Random(seed)
    kinds, weights = list(TEMPLATES), list(TEMPLATES.values())
    pairs: list[SentencePair] = []
    seen: set[str] = set()
    misses = 0
    while len(pairs) < count:
        draft = rng.choices(kinds, weights=weights)[0](rng)
        text = _english(rng, draft)
        key = normalized(text)
        if key in seen or len(key.split()) < MIN_WORDS:
            misses += 1
            if misses > _MAX_MISSES:
                raise ValueError(f"count must be at most the distinct sentences of the grammar, got {count}.")
            continue
        misses = 0
        seen.add(key)
        pairs.append(SentencePair(english=text, french=_references(rng, draft)))
    return pairs


def training_and_calibration(
    *, seed: int, training: int, calibration: int
) -> tuple[list[SentencePair], list[SentencePair]]:
    """Returns two disjoint random draws from the same distribution of distinct sentences.

    The sentences of `generate_pairs` are distinct even without case and punctuation, so none of the calibration set
    is in the training set; and they are shuffled before the split, so the two are exchangeable.

    Args:
      seed: Determines the result.
      training: Size of the first list, at least 1.
      calibration: Size of the second list, at least 1.

    Raises:
      ValueError: If a size is below 1, or their sum too large for the grammar.
    """
    for name, size in (("training", training), ("calibration", calibration)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}.")
    pairs = generate_pairs(seed=seed, count=training + calibration)
    # Distinct draws are not exchangeable in order: common sentences come early. Shuffling makes them so.
    random.Random(f"split {seed}").shuffle(pairs)
    return pairs[:training], pairs[training:]


def normalized(sentence: str) -> str:
    """Returns the sentence in lower case without punctuation, the form in which sentences are compared."""
    return " ".join(_NOT_A_WORD.sub("", sentence.lower()).split())


def _english(rng: random.Random, draft: Draft) -> str:
    text = english.contract(draft.english) if rng.random() < _CONTRACTED_RATE else draft.english
    text = " ".join(text.split())
    return f"{text[0].upper()}{text[1:]}{draft.mark}"


def _references(rng: random.Random, draft: Draft) -> tuple[str, ...]:
    renderings: dict[str, None] = {}
    for voice, speakers in VOICES:
        if not speakers or speakers & draft.speakers:
            renderings |= dict.fromkeys(draft.render(voice))
    usual, *others = renderings
    chosen = [usual, *rng.sample(others, min(len(others), 2 * MAX_REFERENCES))]
    # Two renderings may be spelt alike.
    references = list(dict.fromkeys(french.punctuate(text, draft.mark) for text in chosen))[:MAX_REFERENCES]
    if rng.random() < _UNUSUAL_RATE:
        references.insert(0, references.pop(rng.randrange(len(references))))
    return tuple(references)
