"""Whether what is served is what was calibrated: a generator against the stored generations of a calibration's sweep.

Every stored prompt is answered at the threshold of one entry of the manifest, and tokens and exit layers are compared
with those that the sweep stored for it there. The two decoders multiply matrices of other shapes, and float32 rounds
differently in each: a confidence that all but equals its threshold can fall on either side. So every difference is
listed with the distance of the confidences to the threshold at the first step that differs, or, where the layer is the
same and another token was the likeliest there, as a tie of tokens. The exit status is 1 if a distance is larger than
rounding explains.

    python -m benchmarks.serving_parity --calibration=calibration --checkpoint=model/ --delta=0.05
"""

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np

from calm_beam.exits.thresholds import scheduled_thresholds
from calm_beam.manifest import MANIFEST, EntryChoice, read_manifest
from calm_beam.outputs import DecodeJob, FinishedSweep, Generation, Output, read_generations
from calm_beam.serving import Answer, Generator
from calm_beam.storage import joined

from .machine import describe_machine

# Above what rounding did to any confidence of the models that were measured.
_LARGEST_MARGIN = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """An answer that is not the stored output.

    Attributes:
      id: Of the example.
      step: First that differs, from 0.
      tokens: Stored and served there; None after an output's end.
      exit_layers: Stored and served there.
      confidences: Stored and served there.
      threshold: Of this step; None if nothing exits.
      margin: How far above the threshold the confidence was at which one of the two left, and the other did not; None
        where both left at the same layer, with other tokens.
    """

    id: str
    step: int
    tokens: tuple[int | None, int | None]
    exit_layers: tuple[int, int]
    confidences: tuple[float, float]
    threshold: float | None
    margin: float | None

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.margin is None or abs(self.margin) <= _LARGEST_MARGIN

    def in_words(self) -> str:
        """Returns a line that says what differs."""
        what = "tie of tokens" if self.margin is None else f"margin {self.margin:.1e}"
        return (
            f"  {self.id}, step {self.step}: tokens {self.tokens}, layers {self.exit_layers}, confidences "
            f"{self.confidences}, threshold {self.threshold}: {what}"
        )


def difference(
    name: str, stored: Output, *, served: Answer | Output, thresholds: Sequence[float] | None
) -> Difference | None:
    """Returns where an answer first differs from the stored output, or None if it does not.

    Args:
      name: Id of the example.
      stored: What the sweep gave.
      served: What the generator gave.
      thresholds: Of every step; None if nothing exits.
    """
    if (stored.tokens, stored.exit_layers) == (served.tokens, served.exit_layers):
        return None
    steps = itertools.zip_longest(
        zip(stored.tokens, stored.exit_layers, stored.confidences, strict=True),
        zip(served.tokens, served.exit_layers, served.confidences, strict=True),
        fillvalue=(None, 0, 0.0),
    )
    step, (ours, theirs) = next((place, pair) for place, pair in enumerate(steps) if pair[0][:2] != pair[1][:2])
    threshold = None if thresholds is None else float(thresholds[step])
    margin = None
    if ours[1] != theirs[1] and threshold is not None:
        # The one that left lower is the one that reached the threshold.
        margin = min((ours, theirs), key=lambda outcome: outcome[1])[2] - threshold
    return Difference(
        id=name,
        step=step,
        tokens=(ours[0], theirs[0]),
        exit_layers=(ours[1], theirs[1]),
        confidences=(ours[2], theirs[2]),
        threshold=threshold,
        margin=margin,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the differences and their number; returns 1 if rounding does not explain all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--calibration", required=True, help="output directory of calibrate")
    parser.add_argument("--checkpoint", help="default: where the manifest says that it was")
    parser.add_argument("--consistency")
    parser.add_argument("--metric")
    parser.add_argument("--delta", type=float)
    parser.add_argument("--epsilon", type=float)
    parser.add_argument("--prompts", type=int, help="default: all")
    parser.add_argument("--batch_size", type=int, default=1)
    flags = parser.parse_args(argv)
    manifest = read_manifest(joined(flags.calibration, MANIFEST))
    generator = Generator.from_manifest(
        manifest,
        flags.checkpoint or manifest.model.uri,
        choice=EntryChoice.named_by(flags),
        batch_size=flags.batch_size,
    )
    assert manifest.plan is not None
    pareto, variant = manifest.plan.pareto, generator.entry.variant
    place = pareto.variants.index(variant) if pareto and variant else 0
    folder = joined(flags.calibration, "generations", manifest.plan.outputs.split(",")[place])
    job = DecodeJob.read(folder)
    FinishedSweep.read(folder, job)
    threshold = generator.entry.threshold
    settings = job.settings
    place = 0 if threshold is None else 1 + settings.thresholds.index(threshold)
    thresholds = None
    if threshold is not None:
        thresholds = scheduled_thresholds(settings.rule, (threshold,), max_decode_length=settings.max_decode_length)[
            :, 0
        ].tolist()
    print(f"{describe_machine()}\nthreshold {threshold}, batch size {flags.batch_size}", flush=True)
    generator.warm_up()
    start = time.perf_counter()
    found: list[Difference] = []
    prompts = tokens = failed = 0
    largest_change = 0.0
    for batch in _batches(_generations(folder), flags.batch_size, count=flags.prompts):
        failed += sum(generation.failure is not None for generation in batch)
        stored = [generation for generation in batch if generation.failure is None]
        answers = generator.generate_batch(
            [generation.example.input or generation.example.input_ids or "" for generation in stored]
        )
        for generation, answer in zip(stored, answers, strict=True):
            output = generation.outputs[place]
            prompts += 1
            tokens += len(output.tokens)
            differs = difference(generation.example.id, output, served=answer, thresholds=thresholds)
            if differs is not None:
                found.append(differs)
                print(differs.in_words(), flush=True)
            elif answer.text != output.text or answer.truncated != generation.truncated:
                raise AssertionError(f"{generation.example.id}: the same tokens, and another text or another cut")
            else:
                changes = np.abs(np.subtract(output.confidences, answer.confidences))
                largest_change = max(largest_change, float(changes.max(initial=0)))
    seconds = time.perf_counter() - start
    far = sum(not differs.is_near_tie for differs in found)
    print(
        f"{len(found)} of {prompts} outputs ({tokens} tokens) differ, {far} of them by more than {_LARGEST_MARGIN:g} "
        f"from the threshold; confidences elsewhere move by at most {largest_change:.1e}. {failed} stored failures "
        f"left out. {seconds:.0f} s, {seconds / max(1, prompts) * 1e3:.1f} ms per prompt."
    )
    return 1 if far else 0


def _generations(folder: str) -> Iterator[Generation]:
    for path in DecodeJob.shard_files(folder):
        yield from read_generations(path)


def _batches(generations: Iterator[Generation], size: int, *, count: int | None) -> Iterator[list[Generation]]:
    wanted = itertools.islice(generations, count)
    while batch := list(itertools.islice(wanted, size)):
        yield batch


if __name__ == "__main__":
    sys.exit(main())
