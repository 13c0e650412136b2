"""A plot of quality at fewer layers and less time, from `--experiment=tradeoff` and the timed serving decoder."""

import csv
import dataclasses
import math
import pathlib
import time
from typing import TYPE_CHECKING

import numpy as np

from calm_beam.checkpoints import load_checkpoint
from calm_beam.decoding.branches import Branch
from calm_beam.decoding.compilation import use_compilation_cache
from calm_beam.decoding.single_prompts import SinglePromptDecoder, single_prompt_decoder
from calm_beam.evaluation.performance import sampled
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs import Reading, read_examples
from calm_beam.inputs.vocabularies.vocabulary import EOS_ID, Vocabulary
from calm_beam.manifest import Manifest
from calm_beam.report.line_chart import BLACK, draw_line, measure_line, saved_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The commands' defaults.
_LONGEST_INPUT, _LONGEST_OUTPUT = 512, 64
# Decoders are made several times: where weights lie in memory moves a decoder's time by up to a seventh.
_BUILDS, _ROUNDS = 3, 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """A measure at one threshold.

    Attributes:
      confidence: Name of the measure; empty for the full model.
      min_exit_layer: Lowest layer that may exit.
      exit_interval: Distance to the next layer that may exit.
      threshold: Exit threshold; None for the full model.
      layers: Decoder layers per token.
      quality: Mean score against the references.
      standard_error: Standard error of `quality`.
    """

    confidence: str
    min_exit_layer: int = 1
    exit_interval: int = 1
    threshold: float | None
    layers: float
    quality: float
    standard_error: float

    @property
    def rule(self) -> ExitRule:
        """The exit rule of its tokens."""
        return ExitRule(
            confidence=self.confidence, min_exit_layer=self.min_exit_layer, exit_interval=self.exit_interval
        )

    @property
    def series(self) -> str:
        """The name of its line in the plot."""
        if self.exit_interval == 1:
            return self.confidence
        return f"{self.confidence}, every {self.exit_interval} layers"


def read_points(table: pathlib.Path, *, min_exit_layer: int = 1, exit_interval: int = 1) -> list[Point]:
    """Returns the rows of a tradeoff.csv for exits at some layers, the full model first."""
    with table.open(encoding="utf-8", newline="") as file:
        return [
            Point(
                confidence=row["confidence"],
                min_exit_layer=min_exit_layer,
                exit_interval=exit_interval,
                threshold=float(row["threshold"]) if row["threshold"] else None,
                layers=float(row["layers"]),
                quality=float(row["quality"]),
                standard_error=float(row["quality_standard_error"]),
            )
            for row in csv.DictReader(file)
        ]


def measure_times(points: list[Point], *, model: str, data: str, prompts: int) -> dict[Point, float]:
    """Returns the time of each servable point, relative to the full model.

    Prompts are decoded one at a time, encoder included, on this machine. The fastest of several rounds counts for each
    prompt: the first compiles, and other work on the machine only slows down. Each decoder is made several times.
    """
    use_compilation_cache()
    checkpoint = load_checkpoint(model)
    assert checkpoint.vocabulary_path is not None
    vocabulary = Vocabulary(checkpoint.vocabulary_path)
    examples = sampled(list(read_examples(data, Reading(), file_index=0)), prompts)

    def decoder(rule: ExitRule, threshold: float | None) -> SinglePromptDecoder:
        branch = Branch.at(rule, threshold, max_decode_length=_LONGEST_OUTPUT)
        return single_prompt_decoder(checkpoint, branch, max_input_length=_LONGEST_INPUT)

    served = [point for point in points if point.confidence not in ("", "oracle")]
    # Static confidence needs no computation.
    ways = [(ExitRule(confidence="static"), None), *((point.rule, point.threshold) for point in served)]
    ids = [(*vocabulary.encode(example.input or ""), EOS_ID) for example in examples]
    builds = [_fastest([decoder(*way) for way in ways], ids) for _ in range(_BUILDS)]
    reference, *times = (sum(of_prompt) for of_prompt in np.min(builds, axis=0).tolist())
    return {point: seconds / reference for point, seconds in zip(served, times, strict=True)}


def _fastest(decoders: list[SinglePromptDecoder], prompts: list[tuple[int, ...]]) -> list[list[float]]:
    """Returns each prompt's fastest time by every decoder; decoders take turns."""
    best = [[math.inf] * len(prompts) for _ in decoders]
    for _ in range(_ROUNDS):
        for place, prompt in enumerate(prompts):
            for decoder, seconds in zip(decoders, best, strict=True):
                start = time.perf_counter()
                list(decoder.decode([prompt]))
                seconds[place] = min(seconds[place], time.perf_counter() - start)
    return best


def proved_threshold(manifest: Manifest, *, consistency: str, delta: float) -> float:
    """Returns the threshold of a manifest's guarantee, which must be proved."""
    (entry,) = [entry for entry in manifest.calibrations if (entry.consistency, entry.delta) == (consistency, delta)]
    assert entry.threshold is not None
    return entry.threshold


def draw(
    points: list[Point], times: dict[Point, float], *, proved: tuple[str, list[Point]], path: pathlib.Path
) -> None:
    """Writes two panels: quality over layers, and quality over time relative to the full model.

    Args:
      points: The full model first.
      times: Times of the servable points.
      proved: Names of the proofs, and their points.
      path: Path of the plot.
    """
    full, *others = points
    words, ringed = proved
    with saved_figure(str(path), height=3.6) as figure:
        by_layers, by_time = figure.subplots(1, 2, sharey=True)
        for axes, places in ((by_layers, {point: point.layers for point in others}), (by_time, times)):
            _draw_panel(axes, full, points=others, places=places)
            rings = [places[point] for point in ringed], [point.quality for point in ringed]
            axes.plot(*rings, "o", label=words, markersize=11, mfc="none", color=BLACK)
        # No one serves points far below this, and the others become distinguishable.
        by_layers.set_ylim(bottom=full.quality - 0.2)
        by_layers.set_xlabel("decoder layers per token")
        by_layers.set_ylabel("ROUGE-L against the references")
        by_time.axvline(1.0, color=BLACK, linewidth=0.8, linestyle=":")
        by_time.set_xlabel("time per sentence; full model = 1")
        handles, labels = by_layers.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)


def _draw_panel(axes: "Axes", full: Point, *, points: list[Point], places: dict[Point, float]) -> None:
    for name in dict.fromkeys(point.series for point in points):
        found = [point for point in points if point.series == name and point in places]
        if found:
            line = measure_line(
                name,
                [(places[point], point.quality) for point in found],
                spreads=[point.standard_error for point in found],
            )
            draw_line(axes, line)
    axes.axhline(full.quality, color=BLACK, linewidth=0.8, linestyle=":", label="full model")
    tidy(axes)
