"""The workers of a command: their runner, their devices, and the folders that all of them can write to.

Our own function builds pipelines, in any process that calls it. A shared folder holds what workers decode and this
machine reads back; it is removed once it was read.
"""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import apache_beam as beam
from apache_beam import pipeline as beam_pipeline
from apache_beam.options.pipeline_options import DirectOptions, GoogleCloudOptions, PipelineOptions

from calm_beam.launch.flags import UsageError, naming
from calm_beam.launch.flags.shared_options import Accelerator
from calm_beam.launch.terminal import say
from calm_beam.launch.terminal.progress import STARTING, shown_progress
from calm_beam.storage import absolute, check_writable, is_cloud_path, is_folder, joined, parent, remove_folder
from calm_beam.transforms.decode import ANY_DEVICES, Devices
from calm_beam.transforms.metrics import ProgressLog

from .dataflow import prepare_job, template_location
from .run import check_runner_flags, is_local, make_runner, may_report_progress, tell_open_ports


class OwnPipeline(beam.Pipeline):
    """A pipeline whose steps are not those of a notebook's cell, and that leaves no folder behind.

    In IPython, Beam puts the number of the cell before the names of the steps that are applied in it. It looks for the
    pipelines of all cells at every step of any pipeline, and imports for that what interactive pipelines need, pandas
    first: `calibrate` would fail in a notebook where that is not installed.

    Beam also makes a folder for temporary files of every pipeline, and removes it only once the pipeline has run. Only
    transforms of other languages use it, and nothing here has any.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        """Makes a pipeline; arguments are those of Beam."""
        super().__init__(*arguments, **settings)
        with contextlib.suppress(OSError):
            os.rmdir(self.local_tempdir)

    def apply(self, transform: Any, pvalueish: Any = None, label: str | None = None) -> Any:
        """Applies a step under its own name; arguments and what is returned are those of Beam."""
        named = beam_pipeline.alter_label_if_ipython
        beam_pipeline.alter_label_if_ipython = _keep_name
        try:
            return super().apply(transform, pvalueish, label)
        finally:
            beam_pipeline.alter_label_if_ipython = named


def _keep_name(transform: Any, pvalueish: Any) -> None:
    """Leaves the name of a step as it is."""


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
        """Returns the workers that flags name; arguments are those of `prepare_job`, errors also of runner flags."""
        # Also in `make_runner`, but by then the model was loaded, and costs were measured.
        check_runner_flags(options)
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
        """The devices of the workers that decode."""
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
        """Raises `UsageError` for a template, if a command reads back the results of its jobs."""
        if self.template:
            raise UsageError(
                f"--template_location: {command} reads back what its workers have done, which a template cannot. "
                "Leave it out."
            )

    def shown_progress(self, **settings: str) -> contextlib.AbstractContextManager[ProgressLog]:
        """Shows how far they are while a block runs, if they may be on this machine; gives where they report.

        Settings as of `launch.terminal.progress.shown_progress`.
        """
        in_processes = self.options.view_as(DirectOptions).direct_running_mode == "multi_processing"
        begins = {"first": STARTING} if in_processes else {}
        return shown_progress(enabled=may_report_progress(self.options), **{**begins, **settings})


def shared_place(workers: Workers, *, next_to: str | None = None) -> str:
    """Returns a folder in which workers and this machine can both make files, as far as flags tell.

    Workers on this machine need no cloud for that, and workers elsewhere no disk of it. Those that run elsewhere and
    are told of a folder here refuse to decode (`check_folder`).

    Args:
      workers: The workers that decode.
      next_to: The file that is made from their outputs, and that may be written; None if there is none. Then
        `--temp_location` names the place, and this machine's folder for temporary files is taken where it is left out.

    Raises:
      UsageError: If nothing can be written to `--temp_location`.
    """
    if next_to is not None:
        place = parent(next_to)
    else:
        given = workers.options.view_as(GoogleCloudOptions)
        # As Beam does.
        place = given.temp_location or given.staging_location
    if place is None or (workers.are_here and is_cloud_path(place)):
        return tempfile.gettempdir()
    if next_to is None:
        with naming("--temp_location"):
            if not is_cloud_path(place) and not is_folder(place):
                raise UsageError(f"--temp_location {place}: no such folder.")
            check_writable(joined(place, _random_name("calm-beam")))
    return absolute(place)


@contextlib.contextmanager
def passing_folder(place: str, *, name: str) -> Iterator[str]:
    """Gives an empty folder, and removes it with all that is in it when the block ends, however it ends.

    Only what a job elsewhere may still write to stays, and the interrupt that ends the block then says so.

    Args:
      place: Of `shared_place`.
      name: What the name of the folder begins with.

    Raises:
      KeyboardInterrupt: If the block is interrupted.
    """
    if not is_cloud_path(place):
        with tempfile.TemporaryDirectory(prefix=name, dir=place) as folder:
            yield folder
        return
    folder = joined(place, _random_name(name))
    is_left = False
    try:
        yield folder
    except KeyboardInterrupt as interrupt:
        # It says what goes on elsewhere.
        is_left = bool(interrupt.args)
        if is_left:
            raise KeyboardInterrupt(
                f"{interrupt}; nobody will read what it decodes: cancel it, and remove {folder}"
            ) from interrupt
        raise
    finally:
        if not is_left:
            _remove(folder, place)


def _random_name(name: str) -> str:
    return f"{name}{os.urandom(6).hex()}"


def _remove(folder: str, place: str) -> None:
    try:
        remove_folder(folder, inside=place)
    except OSError as error:
        # The result is complete, or the error that ended the run is more important.
        say(f"caution: {folder} could not be removed, and is of no more use: {error}")
