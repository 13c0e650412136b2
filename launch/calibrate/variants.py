"""A calibration of several variants: one sweep of all that can share it, and one pipeline that tests all of them."""

import dataclasses
import time
from collections.abc import Sequence

import apache_beam as beam

from calm_beam.calibration.variants import variants_together
from calm_beam.launch.runners import run_pipeline
from calm_beam.launch.terminal import say
from calm_beam.manifest import Manifest
from calm_beam.outputs import DecodeJob, FinishedSweep
from calm_beam.storage import make_folder
from calm_beam.transforms import CalibrateVariants, WriteManifest

from .run import CalibrationRun
from .sources import Block, VariantsSource


@dataclasses.dataclass(frozen=True)
class VariantsRun:
    """A calibration of several variants.

    Attributes:
      run: What is calibrated; every block of its source is a variant, in the plan's order.
    """

    run: CalibrationRun

    def execute(self, first: Block) -> tuple[Manifest, str]:
        """Decodes every variant and publishes the result; returns it, and the generations that the first entry chose.

        Args:
          first: The first variant, whose folder is ready.

        Raises:
          PipelineError: As `CalibrationRun.execute`.
          KeyboardInterrupt: Likewise.
        """
        run, blocks = self.run, [first]
        pareto = run.plan.pareto
        assert pareto is not None
        with run.what_is_left_told(lambda: _last_with_shards(blocks)):
            make_folder(run.result)
            blocks += [run.source.next_block() for _ in pareto.variants[1:]]
            for together in variants_together(pareto.variants, run.source.settings):
                say(f"one sweep of {'; '.join(pareto.variants[place].in_words() for place in together)}")
                self._decode([blocks[place] for place in together])
            self._calibrate(blocks)
            manifest = run.published()
        chosen = manifest.calibrations[0].variant or pareto.variants[0]
        return manifest, blocks[pareto.variants.index(chosen)].stored.directory

    def _decode(self, blocks: Sequence[Block]) -> None:
        run, start = self.run, time.monotonic()
        pipeline = run.workers.new_pipeline()
        assert isinstance(run.source, VariantsSource)
        with run.workers.shown_progress() as progress:
            _ = run.source.decode_together(blocks, pipeline, progress)
            metrics = run_pipeline(pipeline)
        run.tell(metrics, seconds=time.monotonic() - start)

    def _calibrate(self, blocks: Sequence[Block]) -> None:
        run, stored = self.run, [block.stored for block in blocks]
        pipeline = run.workers.new_pipeline()
        sweeps = tuple(
            pipeline | f"TakeVariant{index}" >> beam.Create([FinishedSweep.read(each.directory, each.job)])
            for index, each in enumerate(stored)
        )
        _ = (
            sweeps
            | "CalibrateVariants"
            >> CalibrateVariants(
                plan=run.plan,
                # Taken before any example is decoded, and compared with what was tested at the end.
                plan_digest=run.plan.digest,
                provenance=run.provenance,
                stored=stored,
                scoring=run.scoring,
            )
            | "WriteManifest" >> WriteManifest(run.result, run.replaced())
        )
        run.tell(run_pipeline(pipeline), seconds=None)


def _last_with_shards(blocks: Sequence[Block]) -> str:
    """Returns the folder that has been come to; an earlier one where no shard of the last was finished."""
    folders = [block.stored.directory for block in blocks]
    return next((folder for folder in reversed(folders) if DecodeJob.shard_files(folder)), folders[-1])
