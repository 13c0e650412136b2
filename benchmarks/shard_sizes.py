"""The cost of a shard's size: the same prompts decoded in shards of several sizes, in seconds a prompt.

A shard that does not fill the decoder's slots runs emptier calls, as does the end of every shard, when the last long
outputs are alone. All programs are compiled before anything is timed.

    python -m benchmarks.shard_sizes --checkpoint=model/ --data=calibration.jsonl.gz --prompts=2000
"""

import argparse
import statistics
import time
from collections.abc import Sequence

from calm_beam.checkpoints import load_checkpoint
from calm_beam.decoding.branches import sweep_branches
from calm_beam.decoding.compilation import use_compilation_cache
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.memory import keep_freed_memory
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.thresholds import uniform_grid
from calm_beam.inputs.demo import embedded

from .machine import describe_machine
from .prompts import read_prompts


def main(argv: Sequence[str] | None = None) -> None:
    """Prints milliseconds a prompt for every size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", default=str(embedded.MODEL))
    parser.add_argument("--data", default=str(embedded.CALIBRATION_SET))
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--sizes", default="30,60,125,250,500,1000")
    parser.add_argument("--grid_step", type=float, default=0.05)
    parser.add_argument("--max_decode_length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    flags = parser.parse_args(argv)
    keep_freed_memory()
    use_compilation_cache()
    checkpoint = load_checkpoint(flags.checkpoint)
    settings = DecodeSettings(
        rule=ExitRule(),
        thresholds=uniform_grid(flags.grid_step),
        max_input_length=512,
        max_decode_length=flags.max_decode_length,
    )
    prompts = read_prompts(flags.data, checkpoint, settings=settings, count=flags.prompts)
    decoder = Decoder(
        checkpoint,
        sweep_branches(settings.rule, settings.thresholds, max_decode_length=settings.max_decode_length),
        exit_head="auto",
    )
    sizes = [int(size) for size in flags.sizes.split(",")]
    msecs: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(flags.rounds + 1):
        for size in sizes:
            start = time.perf_counter()
            for first in range(0, len(prompts), size):
                for _ in decoder.decode(prompts[first : first + size]):
                    pass
            # The first round compiles.
            if number:
                msecs[size].append(1000 * (time.perf_counter() - start) / len(prompts))
    print(describe_machine())
    print(f"{len(prompts)} prompts, median of {flags.rounds} rounds (least, most)")
    for size, found in msecs.items():
        print(f"{size:>7,} a shard  {statistics.median(found):8.2f} ms a prompt ({min(found):.2f}, {max(found):.2f})")


if __name__ == "__main__":
    main()
