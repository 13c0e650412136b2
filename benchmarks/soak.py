r"""Whether long runs stay within their memory: what is resident after every part of many prompts, and the most so far.

    python -m benchmarks.soak --checkpoint=model/ --data=train.jsonl.gz --prompts=20000 --max_cache_tokens=60000
    python -m benchmarks.soak --through=continuous --calibration=build/demo-calibration --consistency=textual \
        --delta=0.05 --checkpoint=calm_beam/inputs/demo/model --data=calm_beam/inputs/demo/calibration.jsonl.gz \
        --prompts=20000

`--through` says what the prompts go through: the sweep; `Generator.generate_batch`, a part at a time; or a
`ContinuousGenerator`, of whose prompts some are waited for together and a tenth is cancelled. The latter two serve an
entry of a manifest. Data that have too few prompts are read again from the first.
"""

import argparse
import itertools
import os
import pathlib
import time
from collections.abc import Iterator, Sequence

from calm_beam.checkpoints import Checkpoint, load_checkpoint
from calm_beam.decoding.branches import sweep_branches
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.memory import keep_freed_memory
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.thresholds import uniform_grid
from calm_beam.manifest import MANIFEST, EntryChoice
from calm_beam.serving import ContinuousGenerator, Generator
from calm_beam.storage import joined

from .machine import describe_machine
from .process import peak_memory_bytes
from .prompts import read_prompts

_PART = 1000
_CANCELLED_OF = 10

_Prompts = Sequence[Sequence[int]]


def main() -> None:
    """Prints a line after every part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--through", choices=("sweep", "generate_batch", "continuous"), default="sweep")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--prompts", type=int, default=20_000)
    parser.add_argument("--max_decode_length", type=int, default=64, help="of the sweep; a manifest has its own")
    parser.add_argument(
        "--max_cache_tokens", type=int, help="positions held at a time; default: of the memory that is free"
    )
    parser.add_argument("--calibration", help="folder of the manifest to serve under; so the next two")
    parser.add_argument("--consistency")
    parser.add_argument("--delta", type=float)
    parser.add_argument("--batch_size", type=int)
    flags = parser.parse_args()
    if (flags.through == "sweep") == bool(flags.calibration):
        parser.error("pass --calibration exactly if the prompts do not go through the sweep")
    keep_freed_memory()
    checkpoint = load_checkpoint(flags.checkpoint)
    config = checkpoint.config
    settings = DecodeSettings(
        rule=ExitRule(),
        thresholds=uniform_grid(0.05),
        max_input_length=512,
        max_decode_length=flags.max_decode_length,
    )
    read = read_prompts(flags.data, checkpoint, settings=settings, count=flags.prompts)
    prompts = list(itertools.islice(itertools.cycle(read), flags.prompts))
    tokens_by_part = (
        _swept(checkpoint, settings, prompts, flags)
        if flags.through == "sweep"
        else _served(checkpoint, prompts, flags)
    )
    position = config.num_decoder_layers * 2 * config.num_heads * config.head_dim * 4
    print(describe_machine())
    if flags.max_cache_tokens:
        held = flags.max_cache_tokens * position / 2**20
        print(f"budget: {flags.max_cache_tokens} positions, {held:.0f} MiB of keys and values")
    print(f"before the first prompt: {_resident_mib():.0f} MiB resident", flush=True)
    start, tokens = time.perf_counter(), 0
    for part, of_part in enumerate(tokens_by_part, start=1):
        tokens += of_part
        print(
            f"{min(part * _PART, len(prompts))} prompts, {tokens} tokens, {time.perf_counter() - start:.0f} s: "
            f"{_resident_mib():.0f} MiB resident, {peak_memory_bytes() / 2**20:.0f} MiB at most so far",
            flush=True,
        )


def _parts(prompts: _Prompts) -> Iterator[_Prompts]:
    for begin in range(0, len(prompts), _PART):
        yield prompts[begin : begin + _PART]


def _swept(
    checkpoint: Checkpoint, settings: DecodeSettings, prompts: _Prompts, flags: argparse.Namespace
) -> Iterator[int]:
    """Sweeps part by part, and yields how many tokens of the full model each has."""
    decoder = Decoder(
        checkpoint,
        sweep_branches(settings.rule, settings.thresholds, max_decode_length=settings.max_decode_length),
        max_cache_tokens=flags.max_cache_tokens,
    )
    for part in _parts(prompts):
        yield sum(int(result.lengths[0]) for _, result in decoder.decode(part))


def _served(checkpoint: Checkpoint, prompts: _Prompts, flags: argparse.Namespace) -> Iterator[int]:
    """Answers part by part, and yields how many tokens each has."""
    generator = Generator.from_manifest(
        joined(flags.calibration, MANIFEST),
        checkpoint,
        choice=EntryChoice.named_by(flags),
        batch_size=flags.batch_size,
        max_cache_tokens=flags.max_cache_tokens,
    )
    if flags.through == "generate_batch":
        for part in _parts(prompts):
            yield sum(len(answer.tokens) for answer in generator.generate_batch(part))
        return
    with ContinuousGenerator(generator, most_waiting=_PART) as continuous:
        for part in _parts(prompts):
            futures = [continuous.submit(prompt) for prompt in part]
            cancelled = {future for future in futures[::_CANCELLED_OF] if future.cancel()}
            yield sum(len(future.result().tokens) for future in futures if future not in cancelled)


def _resident_mib() -> float:
    pages = int(pathlib.Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
