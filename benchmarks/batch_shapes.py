"""How often another batch size changes an output, and how near a tie the decision was.

A float32 matrix product may add up in another order when its shape changes. Where a confidence lies within rounding of
the threshold, or two logits within rounding of each other, that can change a decision.

    python -m benchmarks.batch_shapes --checkpoint=model/ --data=validation.jsonl.gz --prompts=1000 --batch_sizes=8,32
"""

import argparse

from calm_beam.checkpoints import Checkpoint, load_checkpoint
from calm_beam.decoding.branches import sweep_branches
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.result import PromptResult
from calm_beam.decoding.settings import DecodeSettings, uniform_grid
from calm_beam.exits.rule import ExitRule

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
    parser.add_argument("--max_decode_length", type=int, default=64)
    flags = parser.parse_args()
    checkpoint = load_checkpoint(flags.checkpoint)
    settings = DecodeSettings(
        rule=ExitRule(),
        thresholds=uniform_grid(0.05),
        max_input_length=512,
        max_decode_length=flags.max_decode_length,
    )
    prompts = read_prompts(flags.data, checkpoint, settings=settings, count=flags.prompts)
    first, *others = (int(size) for size in flags.batch_sizes.split(","))
    print(describe_machine())
    reference = _decode(checkpoint, settings, prompts=prompts, batch_size=first)
    for size in others:
        results = _decode(checkpoint, settings, prompts=prompts, batch_size=size)
        compare(f"batch size {size} against {first}", reference, found=results, thresholds=settings.thresholds)


def _decode(
    checkpoint: Checkpoint, settings: DecodeSettings, *, prompts: list[tuple[int, ...]], batch_size: int
) -> dict[int, PromptResult]:
    decoder = Decoder(
        checkpoint,
        sweep_branches(settings.rule, settings.thresholds, max_decode_length=settings.max_decode_length),
        batch_size=batch_size,
    )
    return dict(decoder.decode(prompts))


if __name__ == "__main__":
    main()
