"""What is counted of every output at every threshold: whole numbers, so that sums over any part of a set are exact."""

import dataclasses
from collections.abc import Callable

import numpy as np

from calm_beam.evaluation.flops import DecoderSizes, flops_appendix_b, flops_calm_table, full_model_flops
from calm_beam.exits.rule import ExitRule
from calm_beam.metrics.corpus_bleu import NUM_COUNTS, bleu_counts
from calm_beam.outputs import Generation, Output

_BASIC = ("tokens", "layers", "cut")
_FLOPS = ("flops_appendix_b", "flops_calm_table", "flops_full")
BLEU_ROWS = tuple(f"bleu_{index}" for index in range(NUM_COUNTS))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputCounter:
    """Counts outputs: tokens, layers, outputs cut at the greatest length, and what else is asked for.

    Attributes:
      max_decode_length: Most tokens of an output.
      end_ids: Token ids of which each ends an output.
      rule: How exits are decided.
      sizes: Of the model; None leaves FLOPs out.
      with_bleu: Whether to count what BLEU is made of; all examples then have references.
    """

    max_decode_length: int
    end_ids: tuple[int, ...]
    rule: ExitRule
    sizes: DecoderSizes | None = None
    with_bleu: bool = False

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of what `counts` counts, in order. `flops_full` is what the same tokens cost at full depth."""
        return (*_BASIC, *(_FLOPS if self.sizes else ()), *(BLEU_ROWS if self.with_bleu else ()))

    def counts(self, generation: Generation, *, lanes: int, source_length: Callable[[], int]) -> np.ndarray:
        """Returns the counts of one example; all 0 if it failed, since then it has no outputs.

        Args:
          generation: Outputs of the full model and at each threshold.
          lanes: How many outputs that is.
          source_length: Gives the tokens of the prompt as the encoder saw it; called if FLOPs are counted.

        Returns:
          shape (rows, lanes), int64.
        """
        counts = np.zeros((len(self.rows), lanes), np.int64)
        if generation.failure is not None:
            return counts
        basic = [self._basic(output) for output in generation.outputs]
        counts[: len(_BASIC)] = np.array(basic).T
        start = len(_BASIC)
        if self.sizes:
            counts[start : start + len(_FLOPS)] = self._flops(generation, source_length())
            start += len(_FLOPS)
        if self.with_bleu:
            texts = [output.text for output in generation.outputs]
            # Many thresholds give the same text.
            found = {text: bleu_counts(text, generation.example.references) for text in dict.fromkeys(texts)}
            counts[start:] = np.stack([found[text] for text in texts], axis=1)
        return counts

    def _basic(self, output: Output) -> tuple[int, int, int]:
        is_cut = len(output.tokens) >= self.max_decode_length and output.tokens[-1] not in self.end_ids
        return len(output.tokens), sum(output.exit_layers), int(is_cut)

    def _flops(self, generation: Generation, source_length: int) -> np.ndarray:
        assert self.sizes is not None
        full, *early = (output.exit_layers for output in generation.outputs)
        complete = {
            tokens: full_model_flops(tokens, self.sizes, source_length=source_length).sum()
            for tokens in {len(exits) for exits in (full, *early)}
        }
        exits_found = {
            exits: tuple(
                count(exits, self.sizes, source_length=source_length, rule=self.rule).sum()
                for count in (flops_appendix_b, flops_calm_table)
            )
            for exits in dict.fromkeys(early)
        }
        # The full model tests nothing.
        columns = [(complete[len(full)],) * 3, *((*exits_found[exits], complete[len(exits)]) for exits in early)]
        return np.array(columns, np.int64).T
