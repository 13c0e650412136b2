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
      thresholds: Of branches 1, 2, ...; branch 0 is the full model.
    """
    differing = tokens = 0
    largest_change = 0.0
    for index, reference in expected.items():
        result = found[index]
        tokens += int(reference.lengths.sum())
        for place in range(len(thresholds) + 1):
            exits_differ = reference.exit_layers[place] != result.exit_layers[place]
            unequal = np.flatnonzero((reference.tokens[place] != result.tokens[place]) | exits_differ)
            equal_until = unequal[0] if unequal.size else reference.lengths[place]
            changes = np.abs(reference.confidences[place, :equal_until] - result.confidences[place, :equal_until])
            largest_change = max(largest_change, float(changes.max(initial=0)))
            if unequal.size:
                differing += 1
                step = unequal[0]
                threshold = "never" if place == 0 else thresholds[place - 1]
                confidences = float(reference.confidences[place, step]), float(result.confidences[place, step])
                exits = int(reference.exit_layers[place, step]), int(result.exit_layers[place, step])
                print(
                    f"  prompt {index}, threshold {threshold}, step {step}: confidences {confidences} at layers {exits}"
                )
    outputs = len(expected) * (len(thresholds) + 1)
    print(
        f"{title}: {differing} of {outputs} outputs ({tokens} tokens) differ; "
        f"confidences elsewhere move by at most {largest_change:.1e}",
        flush=True,
    )
