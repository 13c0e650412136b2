"""A calibration that was prepared, run to its end: one pipeline for each block of the grid."""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Self

from calm_beam.calibration.provenance import RunProvenance
from calm_beam.calibration.publish import EarlierResult
from calm_beam.launch.runners import PipelineError, Workers, run_pipeline
from calm_beam.launch.runners.metrics import (
    RunMetrics,
    clipped_in_words,
    empty_references_in_words,
    metrics_in_words,
    work_in_words,
)
from calm_beam.launch.runners.what_is_left import what_is_left_told
from calm_beam.launch.terminal import say, say_detail
from calm_beam.manifest import MANIFEST, Manifest, Plan, read_manifest
from calm_beam.outputs import OutputsError
from calm_beam.outputs.folder import SweepHome
from calm_beam.outputs.scoring import Scoring
from calm_beam.storage import is_file, joined, make_folder
from calm_beam.transforms import CalibrateGenerations, WriteManifest

from .sources import Block, Source

UNCONFIRMED = "unconfirmed"
"""Folder in an output directory of what was chosen, until it is confirmed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationRun:
    """A calibration, all of which has been found good that can be before a worker starts.

    Attributes:
      source: Where generations come from.
      plan: What is tested.
      provenance: What else the manifest says.
      output: Output directory.
      earlier: The result that was there.
      overwrites: Whether that is taken away.
      scoring: How losses are made.
      workers: Of the pipelines.
      is_unconfirmed: Whether what it finds is still to be confirmed, and so is no result yet.
    """

    source: Source
    plan: Plan
    provenance: RunProvenance
    output: str
    earlier: EarlierResult
    overwrites: bool
    scoring: Scoring
    workers: Workers
    is_unconfirmed: bool = False

    @property
    def result(self) -> str:
        """Directory of what it finds."""
        return joined(self.output, UNCONFIRMED) if self.is_unconfirmed else self.output

    def execute(self, first: Block) -> tuple[Manifest, str] | None:
        """Runs pipelines until no test goes on.

        Args:
          first: The first block, whose folder is ready.

        Returns:
          The manifest and the folder of its generations; None if the pipeline was only written down as a template.

        Raises:
          PipelineError: If a pipeline fails; says what is left, and how to go on.
          KeyboardInterrupt: If it is interrupted; says the same.
        """
        start = time.monotonic()
        block = first
        with self.what_is_left_told(lambda: block.stored.directory):
            make_folder(self.result)
            for number in range(self.source.blocks):
                block = self.source.next_block() if number else first
                metrics = self._run_pipeline(block)
                if self.workers.template:
                    return None
                self.tell(metrics, seconds=time.monotonic() - start)
                if is_file(joined(self.result, MANIFEST)):
                    break
            manifest = self.published()
            self.source.finish()
        return manifest, block.stored.directory

    def _run_pipeline(self, block: Block) -> RunMetrics | None:
        is_part = self.source.blocks > 1
        if is_part:
            say(f"thresholds down to {block.thresholds[-1]:g} of {self.plan.thresholds[-1]:g}")
        pipeline = self.workers.new_pipeline()
        with self.workers.shown_progress() as progress:
            _ = (
                block.make(pipeline, progress)
                | "CalibrateGenerations"
                >> CalibrateGenerations(
                    plan=self.plan,
                    # Taken before any example is decoded, and compared with what was tested at the end.
                    plan_digest=self.plan.digest,
                    provenance=self.provenance,
                    stored=block.stored,
                    tested=len(block.thresholds) if is_part else len(self.plan.thresholds),
                    scoring=self.scoring,
                )
                | "WriteManifest" >> WriteManifest(self.result, self.replaced())
            )
            return run_pipeline(pipeline)

    def replaced(self) -> EarlierResult:
        """Returns what the result replaces: what decodes has taken an earlier one away before."""
        return self.earlier if self.source.is_stored or not self.overwrites else EarlierResult()

    def tell(self, metrics: RunMetrics | None, *, seconds: float | None) -> None:
        """Says what a pipeline has counted; `seconds` is None for one that has decoded nothing."""
        if seconds is not None and not self.source.is_stored:
            say(metrics_in_words(metrics, seconds=seconds))
            if work := work_in_words(metrics):
                say_detail(work)
        for sentence in (clipped_in_words(metrics), empty_references_in_words(metrics)):
            if sentence:
                say(sentence)

    def published(self) -> Manifest:
        """Returns the manifest that this run has published.

        Raises:
          PipelineError: If another run has. Between two blocks of the grid, nothing of this one is there to be in its
            way.
        """
        path = joined(self.result, MANIFEST)
        manifest = read_manifest(path)
        if (manifest.created, manifest.plan) != (self.provenance.created, self.plan):
            raise PipelineError(
                f"{path}: another run has published it meanwhile. Choose another --output, or pass --overwrite."
            )
        return manifest

    def what_is_left_told(self, folder: Callable[[], str]) -> contextlib.AbstractContextManager[None]:
        """Adds to whatever ends a block what is left in the folder, and how to go on; of what was stored, nothing."""
        return what_is_left_told(lambda: "" if self.source.is_stored else self._left(folder()), but=OutputsError)

    def that_chooses(self) -> Self:
        """Returns the run of what is then confirmed."""
        return dataclasses.replace(
            self, plan=self.plan.that_chooses(), earlier=EarlierResult(), overwrites=False, is_unconfirmed=True
        )

    def _left(self, folder: str) -> str:
        return SweepHome(self.output).after_failure(folder, is_over=self.workers.are_here)
