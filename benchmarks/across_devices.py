"""Whether a device decodes as another one does, and whether its sweep is what it serves.

    python -m benchmarks.across_devices --checkpoint=model/ --data=validation.jsonl.gz --save=host.npz
    python -m benchmarks.across_devices --checkpoint=model/ --data=validation.jsonl.gz --against=host.npz
    python -m benchmarks.across_devices --prompts=20

Prompts are swept at 20 thresholds, and then every output is decoded again as it is served: in batches of several sizes,
and some one at a time by the loop that stays on the device. Tokens and exit layers that differ from the sweep's are
counted, and confidences that differ in any bit up to the first such difference. `--save` keeps the outputs of the
sweep, and `--against` compares with those that another machine kept. Without a checkpoint, random weights of the
paper's dimensions decode random prompts.
"""

import argparse
import functools
import pathlib
import time
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np

from calm_beam.checkpoints import load_checkpoint
from calm_beam.decoding.branches import BranchResult, Request, sweep_branches
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.early_exit import EarlyExitDecoder
from calm_beam.decoding.engine_choice import ENGINE_CHOICES
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.thresholds import uniform_grid
from calm_beam.precision import DTYPES, Precision

from .machine import describe_machine
from .paper_model import build_paper_model, draw_prompts
from .prompts import read_prompts

_NAMES = ("tokens", "exit_layers", "confidences")
_BATCHES = (1, 7, 64, 256)
# Prompts that are decoded alone: one at a time, each is as many calls as a batch.
_ALONE = 20
_LONGEST = 64
# Tokens of a prompt that is drawn.
_DRAWN = 40

_Result = TypeVar("_Result")

# Of each prompt and branch, one after the other: tokens, exit layers and confidences, each of shape (outputs, steps).
_Outputs = dict[str, np.ndarray]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a line for every comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", help="weights of the paper's dimensions are drawn without")
    parser.add_argument("--data", help="file of prompts for the checkpoint")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max_decode_length", type=int, default=48)
    parser.add_argument("--confidence", default="softmax")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--engine", choices=ENGINE_CHOICES, default="auto")
    parser.add_argument("--save", type=pathlib.Path, help="file for the outputs of the sweep")
    parser.add_argument("--against", type=pathlib.Path, help="file of another machine's outputs")
    flags = parser.parse_args(argv)
    if (flags.checkpoint is None) != (flags.data is None):
        parser.error("--checkpoint and --data belong together: a model, and prompts for it")
    checkpoint = load_checkpoint(flags.checkpoint) if flags.checkpoint else build_paper_model()
    rule, thresholds, steps = ExitRule(confidence=flags.confidence), uniform_grid(0.05), flags.max_decode_length
    settings = DecodeSettings(rule=rule, thresholds=thresholds, max_input_length=_LONGEST, max_decode_length=steps)
    if flags.data:
        prompts = read_prompts(flags.data, checkpoint, settings=settings, count=flags.prompts)
    else:
        prompts = draw_prompts(flags.prompts, length=_DRAWN, vocab_size=checkpoint.config.vocab_size)
    branches = sweep_branches(rule, thresholds, max_decode_length=steps)
    precision = Precision(dtype=flags.dtype)
    made = functools.partial(
        Decoder, checkpoint, engine=flags.engine, precision=precision, max_input_length=_LONGEST, exit_head="exact"
    )
    alone = functools.partial(
        EarlyExitDecoder, checkpoint, precision=precision, max_input_length=_LONGEST, exit_head="exact"
    )
    start = time.perf_counter()
    sweep = made(branches)
    results = _in_order(sweep.decode(prompts))
    swept = _stacked(result.branch(place) for result in results for place in range(len(branches)))
    print(
        f"{describe_machine()}\n{len(prompts)} prompts, {len(branches)} outputs of each, {flags.confidence} in "
        f"{flags.dtype}, engine {sweep.engine}: swept in {time.perf_counter() - start:.0f} s",
        flush=True,
    )
    if flags.save:
        np.savez_compressed(flags.save, *(swept[name] for name in _NAMES))
    if flags.against:
        kept = np.load(flags.against)
        others = {name: kept[f"arr_{place}"] for place, name in enumerate(_NAMES)}
        _compare("the other machine's sweep", swept, others)
    requests = [Request(prompt, branches=[branch]) for prompt in prompts for branch in branches]
    for size in _BATCHES:
        asked = requests if size > 1 else requests[: _ALONE * len(branches)]
        decoder = made(branches[:1], batch_size=size)
        served = _stacked(result.branch(0) for result in _in_order(decoder.decode(asked)))
        _compare(f"batches of {size}", served, swept)
    of_each = [_in_order(alone(branch).decode(prompts[:_ALONE])) for branch in branches]
    looped = _stacked(result for of_prompt in zip(*of_each, strict=True) for result in of_prompt)
    _compare("one at a time, loop on the device", looped, swept)


def _in_order(pairs: Iterable[tuple[int, _Result]]) -> list[_Result]:
    return [result for _, result in sorted(pairs, key=lambda pair: pair[0])]


def _stacked(results: Iterable[BranchResult]) -> _Outputs:
    """Returns arrays of shape (outputs, steps)."""
    listed = list(results)
    return {name: np.stack([getattr(result, name) for result in listed]) for name in _NAMES}


def _compare(title: str, found: _Outputs, expected: _Outputs) -> None:
    """Prints how many of the outputs differ, of as many as were found, and how many of the confidences before that."""
    count = len(found["tokens"])
    expected = {name: expected[name][:count] for name in _NAMES}
    unequal = (found["tokens"] != expected["tokens"]) | (found["exit_layers"] != expected["exit_layers"])
    before = np.cumsum(unequal, axis=1) == 0
    moved = np.where(before, np.abs(found["confidences"] - expected["confidences"]), 0.0)
    compared = before & (expected["exit_layers"] > 0)
    print(
        f"  {title}: {int(unequal.any(axis=1).sum())} of {count} outputs differ; "
        f"{int((moved > 0).sum())} of {int(compared.sum())} confidences, by at most {float(moved.max()):.1e}",
        flush=True,
    )


if __name__ == "__main__":
    main()
