"""The calibration of a user's decoder from Python: sweeps it under every setting, and certifies the outputs.

It joins what `transforms.SweepWith` and `calm_beam.certify` do, so that a mistake in the request is found before
anything is decoded, and failures are reported in one line.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, cast, overload

from apache_beam.options.pipeline_options import PipelineOptions

from calm_beam.errors import UsageError
from calm_beam.inputs.preview import count_examples
from calm_beam.launch.certify.request import CertifyRequest, Guarantees, Output, Tests, WhichScores
from calm_beam.launch.flags.requests import calling
from calm_beam.launch.flags.shared_options import find_files
from calm_beam.launch.runners import Workers, run_pipeline
from calm_beam.launch.runners.dataflow import paths_by_flag
from calm_beam.manifest import Manifest, SettingManifest
from calm_beam.options import again, switch
from calm_beam.options.groups import DataSource, Failures, Spread, Telling
from calm_beam.options.option import shared
from calm_beam.outputs.hosted_decoder import Setting, SettingDecoder
from calm_beam.outputs.sharding import default_shards
from calm_beam.transforms import ReadExamples, SweepWith
from calm_beam.transforms.metrics import NOWHERE, ProgressLog

from .prepare import warn_of_too_few


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderCall(DataSource, Failures, Guarantees, Tests, Output, Telling):
    """A calibration of a user's decoder, as Python asks for it.

    Attributes:
      decoder: A function of prompts and settings, a class or an object, as `transforms.SweepWith` describes it.
      settings: Texts or numbers, the safest first: the others are compared with it, and tested in their order.
      decoder_name: Name and version of the decoder; the name of the function or class if omitted.
      batch_size: Most prompts of a call; all of a shard if omitted.
      decode_timeout: Most seconds of a call; without a limit if omitted.
      resource_hints: Beam's hints for the step that decodes.
      options: Options of the pipeline, including the runner; the default runs in this process.
    """

    decoder: SettingDecoder | Callable[[], SettingDecoder]
    settings: Sequence[Setting]
    decoder_name: str | None = None
    batch_size: int | None = None
    decode_timeout: float | None = None
    resource_hints: Mapping[str, Any] | None = None
    options: PipelineOptions | None = dataclasses.field(default=None, compare=False)
    num_shards: int | None = again(Spread, "num_shards")
    metric: str | None = again(WhichScores, "metric", sentence="metric that scores the outputs", belongs_to=())
    consistency: str = again(WhichScores, "consistency", belongs_to=())
    resume: bool = switch("go on with what an unfinished run has left there")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patterns is None:
            raise UsageError("--data is missing: files with the examples, or --seqio_task.")
        # Errors in these are reported before anything is decoded.
        _ = self.certification, self.sweep(NOWHERE)

    @functools.cached_property
    def certification(self) -> CertifyRequest:
        """The request that certifies the outputs, once they are there."""
        asked = shared(self, CertifyRequest)
        # The sweep takes an earlier result away, and goes on with unfinished outputs.
        return CertifyRequest(**{**asked, "outputs": self.output, "overwrite": False, "resume": False})

    def sweep(self, progress: ProgressLog) -> SweepWith:
        """Returns the transform that sweeps the decoder, given where it reports."""
        asked = shared(self, SweepWith)
        hints = self.resource_hints or {}
        return SweepWith(**{**asked, "output": os.fspath(self.output), "resource_hints": hints, "progress": progress})


@calling(DecoderCall)
def calibrate_decoder(request: DecoderCall) -> SettingManifest:
    """Sweeps a decoder of yours, proves which settings lose at most delta, and returns the manifest of kind `settings`.

        manifest = calm.calibrate(decoder=answer, settings=(4096, 1024, 256), data="questions.jsonl", delta=0.05)

    The same as `transforms.SweepWith` and then `certify(outputs=)`, in one call.

    Raises:
      UsageError: If anything in the request is wrong; nothing has been decoded.
      PipelineError: If the decoder fails; finished shards are kept, and `resume=True` continues from them.
    """
    # Imported here, since calibrating a model does not need them.
    from calm_beam.launch.certify.run import run_certification
    from calm_beam.launch.certify.sources import scoring_metric

    assert request.patterns is not None, "checked when the request was made"
    # Its errors, too, come before anything is decoded.
    scoring_metric(request.metric)
    options = request.options if request.options is not None else PipelineOptions([])
    reading = request.reading(
        cluster_key=request.cluster_key,
        group_key=request.group_key,
        needs_references=request.consistency == "risk",
    )
    data = find_files("--data", request.patterns, reading=reading)
    workers = Workers.prepared(
        options,
        accelerator=None,
        paths=paths_by_flag({"data": request.patterns, "output": os.fspath(request.output)}),
        num_shards=lambda: request.num_shards or default_shards(data),
    )
    workers.refuse_template(command="calibrate(decoder=)")
    warn_of_too_few(request.certification.tests(), functools.partial(count_examples, data))
    with workers.shown_progress() as progress:
        pipeline = workers.new_pipeline()
        read = ReadExamples(data, num_shards=request.num_shards, progress=progress)
        _ = pipeline | read | request.sweep(progress)
        run_pipeline(pipeline)
    manifest = run_certification(request.certification).manifest
    assert manifest is not None, "only a sequential certification may have none yet"
    return manifest


_OfModel = ParamSpec("_OfModel")
_OfDecoder = ParamSpec("_OfDecoder")


class _Calibrates(Protocol[_OfModel, _OfDecoder]):
    """The types of a function that calibrates a model, or a user's decoder."""

    @overload
    def __call__(self, *args: _OfModel.args, **given: _OfModel.kwargs) -> Manifest: ...
    @overload
    def __call__(self, *args: _OfDecoder.args, **given: _OfDecoder.kwargs) -> SettingManifest: ...


def or_decoder(
    of_decoder: Callable[_OfDecoder, SettingManifest],
) -> Callable[[Callable[_OfModel, Manifest]], _Calibrates[_OfModel, _OfDecoder]]:
    """Lets a function that calibrates models take the argument `decoder`, and then call `of_decoder`."""

    def decorate(of_model: Callable[_OfModel, Manifest]) -> _Calibrates[_OfModel, _OfDecoder]:
        @functools.wraps(of_model)
        def calibrate(*args: Any, **given: Any) -> Any:
            chosen: Callable[..., Any] = of_decoder if "decoder" in given else of_model
            return chosen(*args, **given)

        return cast(_Calibrates[_OfModel, _OfDecoder], calibrate)

    return decorate
