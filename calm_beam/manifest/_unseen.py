"""What a manifest says of texts that a metric did not see."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from calm_beam.text.counted import counted

from ._checks import ManifestError, shown
from ._record import Record
from ._values import Count, Text


@dataclass(frozen=True, kw_only=True)
class UnseenRecord(Record):
    """Examples with texts of which a metric saw nothing, or too little; at most a tenth of them, else there is no run.

    Attributes:
      metric: Name of the metric.
      no_token: Examples with two different texts that were compared and in which the metric saw no token: they score 0.
      few_letters: Examples where the metric's tokeniser drops more than half of the letters and digits of the full
        model's output, or of a reference that it is held against.
    """

    metric: Text
    no_token: Count
    few_letters: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.no_token and not self.few_letters:
            raise ManifestError("no_token or few_letters must be above 0, got 0 and 0: leave the metric out")


def check_unseen(records: tuple[UnseenRecord, ...] | None, *, examples: int) -> None:
    """Refuses records that are not by metric in ascending order, or of more examples than there are."""
    if records is None:
        return
    names = [record.metric for record in records]
    if not names or any(after <= before for before, after in pairwise(names)):
        raise ManifestError(f"unseen must have one or more metrics, ascending, each once, got {shown(names)}")
    for index, record in enumerate(records):
        for key, count in (("no_token", record.no_token), ("few_letters", record.few_letters)):
            if count > examples:
                raise ManifestError(f"unseen[{index}].{key} must be at most examples, which is {examples}, got {count}")


def unseen_in_words(records: Sequence[UnseenRecord]) -> str:
    """Returns what metrics did not see, in a sentence for each finding; empty where there is none.

    >>> print(unseen_in_words([UnseenRecord(metric="token_f1", no_token=3, few_letters=0)]))
    token_f1 saw no token of two different texts in 3 examples: they score 0.
    """
    sentences = []
    for record in records:
        if record.no_token:
            sentences.append(
                f"{record.metric} saw no token of two different texts in {counted(record.no_token, 'example')}: they "
                "score 0."
            )
        if record.few_letters:
            sentences.append(
                f"{record.metric} drops more than half of the letters of a text in "
                f"{counted(record.few_letters, 'example')}."
            )
    return " ".join(sentences)
