"""The workers of a command: on which runner its pipelines run, with what devices, and where all of them can write."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import Self

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from calm_beam.launch.flags import UsageError
from calm_beam.launch.flags.accelerators import Accelerator
from calm_beam.launch.terminal.progress import shown_progress
from calm_beam.transforms.devices import ANY_DEVICES, Devices
from calm_beam.transforms.progress import ProgressLog

from .dataflow import prepare_job, template_location
from .pipeline import OwnPipeline
from .run import is_local, make_runner, may_report_progress, tell_open_ports


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workers:
    """Workers that a command may use, once its flags were found good.

    Attributes:
      options: Beam's flags, with what they left open filled in.
      accelerator: Of those that decode; None where there is none, or JAX takes what it finds.
    """

    options: PipelineOptions
    accelerator: Accelerator | None = None

    @classmethod
    def prepared(
        cls,
        options: PipelineOptions,
        *,
        accelerator: Accelerator | None,
        paths: Iterable[tuple[str, str | None]],
        num_shards: Callable[[], int],
    ) -> Self:
        """Returns the workers that flags name; arguments and errors are those of `prepare_job`."""
        prepare_job(options, accelerator=accelerator, paths=paths, num_shards=num_shards)
        tell_open_ports(options)
        return cls(options=options, accelerator=accelerator)

    @property
    def are_here(self) -> bool:
        """Whether they are this process or its children, so that this machine's memory and disks have to do."""
        return is_local(self.options)

    @property
    def template(self) -> str | None:
        """Where a job is only written down, instead of being run; None where it is run."""
        return template_location(self.options)

    @property
    def devices(self) -> Devices:
        """What those decode on that decode."""
        if self.accelerator is None:
            return ANY_DEVICES
        return Devices(hint=self.accelerator.hint(), are_accelerators=True)

    def new_pipeline(self) -> beam.Pipeline:
        """Returns an empty pipeline that will run on them.

        Raises:
          UsageError: As `make_runner`.
          ValueError: If Beam refuses the runner or its flags.
        """
        return OwnPipeline(runner=make_runner(self.options), options=self.options)

    def refuse_template(self, *, command: str) -> None:
        """Raises `UsageError` for a template, if a command reads back what becomes of its jobs."""
        if self.template:
            raise UsageError(
                f"--template_location: {command} reads back what its workers have done, which a template cannot. "
                "Leave it out."
            )

    def shown_progress(self) -> contextlib.AbstractContextManager[ProgressLog]:
        """Shows how far they are while a block runs, if they may be on this machine; gives where they report."""
        return shown_progress(enabled=may_report_progress(self.options))
