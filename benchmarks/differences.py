"""Where the outputs of two decoders differ, and how near a tie the decision was."""

from collections.abc import Mapping, Sequence

import numpy as np

from calm_beam.decoding.branches import PromptResult


def compare(
    title: str, expected: Mapping[int, PromptResult], *, found: Mapping[int, PromptResult], thresholds: Sequence[float]
) -> None:
    """Prints how many outputs differ, and the confidences at each first differing decision.

    Args:
      title: What is compared.
      expected: Results by prompt.
      found: Results of the same prompts.
      thresholds: Of lanes 1, 2, ...; lane 0 is the full model.
    """
    differing = tokens = 0
    largest_change = 0.0
    for index, reference in expected.items():
        result = found[index]
        tokens += int(reference.lengths.sum())
        for lane in range(len(thresholds) + 1):
            exits_differ = reference.exit_layers[lane] != result.exit_layers[lane]
            unequal = np.flatnonzero((reference.tokens[lane] != result.tokens[lane]) | exits_differ)
            equal_until = unequal[0] if unequal.size else reference.lengths[lane]
            changes = np.abs(reference.confidences[lane, :equal_until] - result.confidences[lane, :equal_until])
            largest_change = max(largest_change, float(changes.max(initial=0)))
            if unequal.size:
                differing += 1
                step = unequal[0]
                threshold = "never" if lane == 0 else thresholds[lane - 1]
                confidences = float(reference.confidences[lane, step]), float(result.confidences[lane, step])
                exits = int(reference.exit_layers[lane, step]), int(result.exit_layers[lane, step])
                print(
                    f"  prompt {index}, threshold {threshold}, step {step}: confidences {confidences} at layers {exits}"
                )
    outputs = len(expected) * (len(thresholds) + 1)
    print(
        f"{title}: {differing} of {outputs} outputs ({tokens} tokens) differ; "
        f"confidences elsewhere move by at most {largest_change:.1e}",
        flush=True,
    )
