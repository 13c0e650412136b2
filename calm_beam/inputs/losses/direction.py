"""Whether a higher or a lower score is better: as a run's files say, as --direction says, or as the metric's name does.

A score that is read the wrong way round proves the opposite of what is true. So nothing is assumed: where neither the
files nor the name says it, the user has to.
"""

import re
from collections.abc import Mapping

from calm_beam.errors import UsageError
from calm_beam.risk.setting_sums import LossesError

from . import HIGHER, LOWER


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Names that mean the same wherever they are used, as `_plain` writes them.
_HIGHER = _names(
    """
    acc acc_norm acc_norm_nospace acc_mutual_info acc_bytes accuracy balanced_accuracy exact exact_match em qem pem
    quasi_exact_match prefix_exact_match quasi_prefix_exact_match inst_level_strict_acc inst_level_loose_acc
    prompt_level_strict_acc prompt_level_loose_acc strict_match flexible_match extractive_match math_equiv
    f1 f1_score token_f1 macro_f1 micro_f1 precision recall mcc matthews_corrcoef mrr ndcg auc roc_auc
    bleu bleu_1 bleu_4 sacrebleu chrf rouge1 rouge2 rougel rougelsum rouge_1 rouge_2 rouge_l rouge_lsum rouge_score
    meteor bertscore bert_score bleurt comet
    pass pass_1 pass_at_1 maj likely_correct correct correctness match includes choice answer pattern
    win_rate winrate success success_rate solved resolved truthfulness faithfulness helpfulness
    """
)
_LOWER = _names(
    """
    error error_rate errors wer cer ter mer wil word_error_rate character_error_rate
    perplexity ppl word_perplexity byte_perplexity token_perplexity bits_per_byte bpb nll loss cross_entropy
    negative_log_likelihood brier brier_score ece ece_10_bin ece_1_bin calibration_error expected_calibration_error
    mae mse rmse mean_absolute_error mean_squared_error
    toxicity toxic toxic_frac toxicity_score expected_max_toxicity max_toxicity any_toxic toxicity_rate
    hallucination hallucination_rate stereotype stereotype_score harm harmfulness harmful
    edit_distance levenshtein levenshtein_distance
    inference_runtime inference_denoised_runtime latency runtime
    """
)


def known_direction(metric: str) -> str | None:
    """Returns which scores of a metric are better, by its name alone; None where that leaves it open.

    >>> known_direction("exact_match,strict-match"), known_direction("toxicity"), known_direction("quality")
    ('higher', 'lower', None)
    """
    plain = _plain(metric)
    return HIGHER if plain in _HIGHER else LOWER if plain in _LOWER else None


def settled_direction(metric: str, *, said: Mapping[str, bool], asked: str | None) -> str:
    """Returns which scores of a metric are better, one of `DIRECTIONS`.

    Args:
      metric: As the logs call it.
      said: By log, whether it or a file beside it says that higher is better; of those that say it.
      asked: What the user says; None for nothing.

    Raises:
      LossesError: If two of these say the opposite of each other.
      UsageError: If nothing says it.
    """
    first = next(iter(said.items()), None)
    if first is not None:
        path, is_higher = first
        found = HIGHER if is_higher else LOWER
        if (other := next((name for name, each in said.items() if each != is_higher), None)) is not None:
            raise LossesError(
                f"{path}: says that a {found} {metric} is better, and {other} says the opposite. Find out which of the "
                "two is right, and evaluate both alike."
            )
        if asked is not None and asked != found:
            raise LossesError(
                f"{path}: says that a {found} {metric} is better, and --direction={asked} says the opposite. Leave the "
                "flag out, or mend what the framework says of the metric."
            )
        return found
    found_or_none = asked or known_direction(metric)
    if found_or_none is None:
        raise UsageError(
            f"nothing says whether a higher or a lower {metric} is better: the logs do not, nor the files beside them, "
            "and the name is not known. Say it: --direction=higher or --direction=lower."
        )
    return found_or_none


def _plain(metric: str) -> str:
    """Returns the name of a metric without filter (after a comma), scorer (before a slash) and parameters.

    >>> _plain("grader/Exact-Match"), _plain("rougeL,none"), _plain("pass@1:8_samples")
    ('exact_match', 'rougel', 'pass')
    """
    name = metric.partition(",")[0].rpartition("/")[2]
    return re.sub(r"[\s-]+", "_", re.split("[@:]", name, maxsplit=1)[0].strip().lower())
