"""A few prompts of a calibration set, by which time is measured before and after it is calibrated."""

import itertools
from collections.abc import Collection, Sequence

import numpy as np

from calm_beam.calibration.pareto import part_of
from calm_beam.errors import UsageError
from calm_beam.evaluation.sample import encoded_prompts, sampled
from calm_beam.inputs import read_examples
from calm_beam.inputs.set_parts import salt_of
from calm_beam.outputs.prepared import PreparedSweep

from .request import CalibrateRequest

# Rows that they are drawn from, by a hash of their ids.
_DRAWN_FROM = 2000
# As many tokens as short prompts have; those before the first id are T5's own: padding, the end, what is unknown.
_MADE_TOKENS, _FIRST_ID = 24, 3


def first_prompts(
    request: CalibrateRequest,
    sweep: PreparedSweep,
    *,
    count: int,
    parts: Collection[str],
    selection_share: float | None,
) -> list[Sequence[int]]:
    """Returns prompts of the first rows, as the model sees them.

    Args:
      request: Says which examples confirm, and of them none is taken.
      sweep: Says what data there are, and how prompts are encoded.
      count: How many, at most.
      parts: Of those that choose and test, from which prompts are taken.
      selection_share: The share of examples that chooses; None where none does.

    Raises:
      UsageError: If there is no example.
    """
    salt = salt_of(request.seed)
    examples = itertools.chain.from_iterable(
        read_examples(path, sweep.reading, file_index=index) for index, path in enumerate(sweep.paths)
    )
    found = [
        example
        for example in itertools.islice(examples, _DRAWN_FROM)
        if (request.part is None or request.part.takes(example))
        and (
            selection_share is None
            or part_of(example.cluster or example.id, salt=salt, selection_share=selection_share) in parts
        )
    ]
    if not found:
        raise UsageError("--exits=auto: no example chooses. Take more examples.")
    return [prompt.ids for prompt in encoded_prompts(sweep, sampled(found, count))]


def made_prompts(sweep: PreparedSweep, *, count: int) -> list[Sequence[int]]:
    """Returns so many prompts of random token ids, always the same: to be timed where every example tests."""
    width = min(_MADE_TOKENS, sweep.settings.max_input_length)
    ids = np.random.default_rng(0).integers(_FIRST_ID, sweep.checkpoint.config.vocab_size, size=(count, width))
    return [tuple(map(int, row)) for row in ids]
