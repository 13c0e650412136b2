"""What early exits save in floating point operations, at some thresholds."""

from collections.abc import Iterable, Sequence

from calm_beam.decoding.prompts import encode_prompt
from calm_beam.evaluation.flops import DecoderSizes, flops_appendix_b, flops_calm_table, full_model_flops
from calm_beam.outputs import Generation
from calm_beam.vocabularies.vocabulary import Vocabulary

from .stored import StoredOutputs


def counted_savings(
    generations: Iterable[Generation],
    thresholds: Sequence[float],
    *,
    stored: StoredOutputs,
    sizes: DecoderSizes,
    vocabulary: Vocabulary | None,
) -> tuple[int, dict[float, tuple[float, ...]]]:
    """Returns the factors by which operations fall.

    Args:
      generations: The examples to count.
      thresholds: Where to count; each was decoded.
      stored: Where they come from.
      sizes: Of the decoder.
      vocabulary: Needed where prompts are text.

    Returns:
      How many examples were counted, and for each threshold the operations of the full model for the same tokens
      divided by those with exits, by `flops_appendix_b` and by `flops_calm_table`.
    """
    job = stored.job
    lanes = [1 + job.settings.thresholds.index(threshold) for threshold in thresholds]
    full = [0] * len(lanes)
    early = [[0, 0] for _ in lanes]
    examples = 0
    for generation in generations:
        if generation.failure is not None:
            continue
        examples += 1
        prompt = encode_prompt(
            generation.example, vocabulary, settings=job.settings, vocab_size=sizes.vocab_size, on_long=job.on_long
        )
        length = len(prompt.ids)
        for index, lane in enumerate(lanes):
            exits = generation.outputs[lane].exit_layers
            full[index] += int(full_model_flops(len(exits), sizes, source_length=length).sum())
            for count, formula in enumerate((flops_appendix_b, flops_calm_table)):
                spent = formula(exits, sizes, source_length=length, rule=job.settings.rule)
                early[index][count] += int(spent.sum())
    # Without a single token nothing is saved.
    factors = [
        tuple(whole / spent if spent else 1.0 for spent in both) for whole, both in zip(full, early, strict=True)
    ]
    return examples, dict(zip(thresholds, factors, strict=True))
