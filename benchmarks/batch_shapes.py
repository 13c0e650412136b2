"""How often another batch size changes an output, and how near a tie the decision was.

A float32 matrix product may add up in another order when its shape changes. Where a confidence lies within rounding of
the threshold, or two logits within rounding of each other, that can change a decision. Sweeps of several sizes are
compared, and what serves: every threshold by itself, different ones side by side, in batches of several sizes.

    python -m benchmarks.batch_shapes --checkpoint=model/ --data=validation.jsonl.gz --prompts=1000 --batch_sizes=8,32
    python -m benchmarks.batch_shapes --checkpoint=model/ --data=validation.jsonl.gz --batch_sizes=256 --served=64,256
"""

import argparse
from collections.abc import Sequence

from calm_beam.checkpoints import load_checkpoint
from calm_beam.decoding.branches import Branch, PromptResult, Request, sweep_branches
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.engine_choice import ENGINE_CHOICES
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.thresholds import uniform_grid

from .differences import compare
from .machine import describe_machine
from .prompts import read_prompts


def main() -> None:
    """Prints the differences to the first batch size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--batch_sizes", default="8,32")
    parser.add_argument("--served", default="", help="sizes of served batches")
    parser.add_argument("--confidence", default="softmax")
    parser.add_argument("--engine", default="auto", choices=ENGINE_CHOICES)
    parser.add_argument("--max_decode_length", type=int, default=64)
    flags = parser.parse_args()
    checkpoint = load_checkpoint(flags.checkpoint)
    settings = DecodeSettings(
        rule=ExitRule(confidence=flags.confidence),
        thresholds=uniform_grid(0.05),
        max_input_length=512,
        max_decode_length=flags.max_decode_length,
    )
    prompts = read_prompts(flags.data, checkpoint, settings=settings, count=flags.prompts)
    first, *others = (int(size) for size in flags.batch_sizes.split(","))
    branches = sweep_branches(settings.rule, settings.thresholds, max_decode_length=settings.max_decode_length)

    def decoder(branches: Sequence[Branch], size: int) -> Decoder:
        return Decoder(checkpoint, branches, batch_size=size, engine=flags.engine)

    reference = dict(decoder(branches, first).decode(prompts))
    print(f"{describe_machine()}; engine {decoder(branches, first).engine.in_words()}")
    for size in others:
        results = dict(decoder(branches, size).decode(prompts))
        compare(f"batch size {size} against {first}", reference, found=results, thresholds=settings.thresholds)
    for size in map(int, filter(None, flags.served.split(","))):
        results = _served(decoder(branches[:1], size), prompts, branches=branches)
        compare(f"served in batches of {size}", reference, found=results, thresholds=settings.thresholds)


def _served(
    decoder: Decoder, prompts: Sequence[Sequence[int]], *, branches: Sequence[Branch]
) -> dict[int, PromptResult]:
    """Returns the outputs of every prompt by every branch, each decoded by itself, those of one prompt side by side."""
    requests = [Request(prompt, branches=[branch]) for prompt in prompts for branch in branches]
    found = [result for _, result in sorted(decoder.decode(requests), key=lambda pair: pair[0])]
    each = len(branches)
    return {index: PromptResult.joined(found[index * each : (index + 1) * each]) for index in range(len(prompts))}


if __name__ == "__main__":
    main()
