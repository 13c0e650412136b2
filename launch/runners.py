"""Which Beam runner executes a pipeline, and what its failures say."""

import re
import traceback

import apache_beam as beam
from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions, StandardOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.runner import PipelineRunner, create_runner

# Beam's own DirectRunner tries to download a binary at every start and behaves by what it finds; ours is explicit.
_LOCAL_RUNNERS = ("", "directrunner", "fnapirunner", "bundlebaseddirectrunner")


class PipelineError(RuntimeError):
    """A pipeline ended without a result; its message is the first cause in words."""


def is_local(options: PipelineOptions) -> bool:
    """Returns whether the pipeline runs on this machine's disks, in this process or its children."""
    return (options.view_as(StandardOptions).runner or "").lower() in _LOCAL_RUNNERS


def make_runner(options: PipelineOptions) -> PipelineRunner:
    """Returns the runner that options name; the in-process one by default.

    Several workers mean worker processes, unless `--direct_running_mode` says otherwise.
    """
    if not is_local(options):
        return create_runner(options.view_as(StandardOptions).runner)
    direct = options.view_as(DirectOptions)
    if direct.direct_num_workers != 1 and direct.direct_running_mode == "in_memory":
        direct.direct_running_mode = "multi_processing"
    return FnApiRunner()


def run_pipeline(pipeline: beam.Pipeline) -> None:
    """Runs a pipeline to its end.

    Raises:
      PipelineError: If it did not succeed.
    """
    try:
        pipeline.run().wait_until_finish()
    except Exception as error:
        # Runners wrap what a worker raised in types of their own, with its traceback as text.
        trace = "".join(traceback.format_exception_only(error))
        name, message = _last_error(trace)
        if message == "KeyboardInterrupt":
            raise KeyboardInterrupt from error
        if name not in _OWN_ERRORS:
            # Nothing that the user did is known to cause this: what helps is where it happened.
            traceback.print_exception(error)
        raise PipelineError(first_cause(trace)) from error


_ERROR_LINE = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt)): ", re.MULTILINE)
_STEP_SUFFIX = re.compile(r" \[while running .*$", re.DOTALL)
_OWN_ERRORS = (
    "DataError",
    "DecodeError",
    "MetricError",
    "CheckpointError",
    "VocabularyError",
    "ManifestError",
    "EvidenceError",
    "GenerationsError",
)


def first_cause(trace: str) -> str:
    r"""Returns what a runner's text says of the error it ends with: our own in its words alone, others with their type.

    >>> first_cause("Traceback (most recent call last):\n  ...\na.DataError: bad line [while running 'Parse']")
    'bad line'
    """
    name, message = _last_error(trace)
    return message if name in _OWN_ERRORS or not name else f"{name}: {message}"


def _last_error(trace: str) -> tuple[str, str]:
    """Returns type and message of the last error, without Beam's additions; no type if there is no such line."""
    plain = _STEP_SUFFIX.sub("", trace.strip())
    # Lines of a traceback are indented; the last error that is not begins the message, which may have several lines.
    starts = list(_ERROR_LINE.finditer(plain))
    if not starts:
        return "", plain or "the pipeline failed without a message"
    return starts[-1].group(1), plain[starts[-1].end() :].strip()
