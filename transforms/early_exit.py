"""Answering prompts in a pipeline: a model handler for Beam's `RunInference`.

    import apache_beam as beam
    from apache_beam.ml.inference.base import RunInference
    from calm_beam import transforms

    handler = transforms.EarlyExitModelHandler("demo/manifest.json", consistency="textual", delta=0.05)
    with beam.Pipeline() as pipeline:
        _ = pipeline | beam.Create(["Do they want to repair their car?"]) | RunInference(handler) | beam.Map(print)

A worker finds the host of its model here: in its process, or in one process for all of the machine.
"""

import functools
import logging
import math
import os
import threading
import uuid
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from apache_beam.metrics import Metrics
from apache_beam.ml.inference.base import ModelHandler, PredictionResult
from apache_beam.utils.multi_process_shared import MultiProcessShared

from calm_beam.inputs.examples import prompt_size
from calm_beam.manifest import ANY_ENTRY, EntryWords, Manifest, SettingManifest, read_manifest, with_words
from calm_beam.options.option import naming_arguments
from calm_beam.serving.questions import AnyElement, HostedModel, NamedPrompt, Question, Reply, Sampling

from .metrics import NAMESPACE, DecodeMetrics

if TYPE_CHECKING:
    from calm_beam.checkpoints import Declared
    from calm_beam.serving.host import ModelHost


# Pickled with what is made here: workers of one launcher share hosts, those of another have their own.
_LAUNCHER = uuid.uuid4().hex

_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"


class _Answers(Protocol):
    """A host, or what stands for one that lives elsewhere."""

    def answer(self, question: "Question") -> "Reply":
        """Returns the result of every prompt."""


class HostHandle:
    """Asks the host of a model, which is loaded at the first question.

    Not before, since Beam may make a handle while it holds the lock that a shared object is made under.
    """

    def __init__(self, model: "HostedModel", *, tag: str | None) -> None:
        """Keeps what to load.

        Args:
          model: The model.
          tag: Names the host that all processes of a machine share; None for one of this process's own.
        """
        self._model = model
        self._tag = tag
        self._lock = threading.Lock()
        self._host: _Answers | None = None

    def answer(self, question: "Question") -> "Reply":
        """Returns the result of every prompt; errors are those of `ModelHost`."""
        host = self._found(instead_of=None)
        try:
            return host.answer(question)
        except (ConnectionError, EOFError):
            # The process that held the model has ended. The next request loads it again.
            return self._found(instead_of=host).answer(question)

    def _found(self, *, instead_of: _Answers | None) -> _Answers:
        with self._lock:
            if self._host is None or self._host is instead_of:
                load = functools.partial(load_host, self._model)
                self._host = (
                    _own_host(self._model) if self._tag is None else MultiProcessShared(load, tag=self._tag).acquire()
                )
            return self._host


def machine_tag(model: "HostedModel") -> str:
    """Returns the name under which processes of a machine share a model's host, if this process has launched them."""
    return f"calm-beam-{_LAUNCHER}-{model.digest()}"


def load_host(model: "HostedModel") -> "ModelHost":
    """Returns a host, with the model loaded."""
    keep_memory_free()
    # Imported only in processes that compute: JAX must not be initialised in a process that forks or pickles.
    from calm_beam.serving.host import ModelHost

    return ModelHost(model)


def keep_memory_free() -> None:
    """Has JAX take memory of a device as it needs it, unless the environment says otherwise.

    By default it takes three quarters at its start, which other processes, and measurements of a model's memory, take
    for the model's.
    """
    os.environ.setdefault(_PREALLOCATE, "false")


_own_hosts: weakref.WeakValueDictionary[str, "ModelHost"] = weakref.WeakValueDictionary()
_own_lock = threading.Lock()


def _own_host(model: "HostedModel") -> "ModelHost":
    """Returns this process's host of a model, which lives as long as a handle of it."""
    with _own_lock:
        host = _own_hosts.get(model.digest())
        if host is None:
            host = _own_hosts[model.digest()] = load_host(model)
        return host


_LOGGER = logging.getLogger(__name__)

# Prompts are padded to multiples of this; one such width is the unit that batches are measured in.
_UNIT = 32
# Batches are refilled from within: small ones would run with empty slots at their ends.
_MOST_UNITS = 4096
_BUDGETS_A_BATCH = 8
_FEWEST_UNITS = 16
_BATCH_SECONDS = 60
# Most elements of a batch of Beam's, unless it is told otherwise.
_BEAMS_MOST = 10_000
# Of English text in common vocabularies.
_BYTES_A_TOKEN = 4


class EarlyExitModelHandler(ModelHandler[AnyElement, PredictionResult, HostHandle]):
    """Answers prompts as the calibration decoded them, at the threshold that it found safe.

    Takes texts, token ids, or either as a `NamedPrompt`; gives a `PredictionResult` for each, whose `inference` is its
    `Answer`, and whose `model_id` names the manifest and the entry that it was answered by. A prompt that has no answer
    has `Unanswered` there, with the reason, and takes no other along: `require_answer` makes dead letters of them.

    All processes of a machine share one model, whatever the number of handlers, manifests and keys. `update_model_path`
    takes another manifest for the same model.
    """

    def __init__(
        self,
        manifest: str | os.PathLike[str],
        model: str | os.PathLike[str] | None = None,
        *,
        declared: "Declared | None" = None,
        vocabulary: str | os.PathLike[str] | None = None,
        batch_size: int | None = None,
        max_cache_tokens: int | None = None,
        exit_head: str = "auto",
        engine: str = "auto",
        exact_engine: bool = False,
        probe_share: float | None = None,
        probe_salt: str | None = None,
        share_model_across_processes: bool = True,
        model_copies: int = 1,
        model_parallelism: int = 1,
        min_batch_size: int | None = None,
        max_batch_size: int | None = None,
        max_batch_duration_secs: int | None = None,
        **words: Unpack[EntryWords],
    ) -> None:
        """Checks all that can be checked without the model, which workers hold against the manifest before they answer.

        Args:
          manifest: File of the manifest, where the launcher and workers can read it.
          model: Folder of the model that was calibrated, where workers can read it; by default the one that the
            manifest names.
          declared: Facts of the model that the checkpoint's files do not contain, if the calibration declared some.
          vocabulary: SentencePiece model; by default the one in or next to the checkpoint.
          batch_size: Most prompts that are decoded together; None for as many as memory and speed recommend.
          max_cache_tokens: Most positions whose keys and values are held at a time; None for a share of the memory.
          exit_head: Form of the output head that decides, one of `EXIT_HEADS`. It changes answers at near ties alone.
          engine: `native`, `xla` or `auto`, as in `Generator.from_manifest`. With `auto`, workers on different machines
            may use different engines; with `exact_engine`, they refuse instead.
          exact_engine: Whether to refuse any other engine than the calibrated one.
          probe_share: Share of the prompts, in (0, 1], that the full model answers as well, to measure what the answers
            lose; `SampledLosses` takes these losses out. None for none. Prompts need ids then.
          probe_salt: Decides which they are. Keep it secret if clients choose the ids.
          share_model_across_processes: Whether the processes of a machine share the model; else each loads its own.
          model_copies: How many processes of a machine hold the model, if they share it.
          model_parallelism: Devices that share one model, each with a part of it.
          min_batch_size: Fewest prompts that Beam hands over together, but at the end of a bundle. This and the next
            are chosen by the widths of prompts and the size of the KV cache, unless one of them is given. At most the
            next.
          max_batch_size: Most prompts that Beam hands over together. How many are decoded side by side is `batch_size`.
          max_batch_duration_secs: Longest time that a stream's prompts wait for others, at least 0.
          words: As in `Generator.from_manifest`: `consistency`, `metric`, `loss`, `delta`, `epsilon` and `group` of the
            entry, and `confidence`.

        Raises:
          ManifestError: If the manifest cannot be trusted, no entry or several match, or nobody can serve them; with
            `probe_share`, if losses of prompts tell nothing about the promise.
          MeasureError: If the confidence measure is code of the user's that was not named.
          OSError: If the manifest cannot be read.
          ValueError: If a number is out of range.
        """
        super().__init__()
        # Of the core's modules that compute, for checks only: importing this module must not load JAX.
        from calm_beam.checkpoints import Declared

        if isinstance(manifest, Manifest | SettingManifest):
            raise TypeError("manifest must be the path of a manifest, which workers read; got a manifest.")
        if model_copies < 1:
            raise ValueError(f"model_copies must be at least 1, got {model_copies}.")
        if model_copies > 1 and not share_model_across_processes:
            raise ValueError("model_copies is for processes that share the model: leave it out, each has its own.")
        if (probe_share is None) != (probe_salt is None):
            raise ValueError("probe_share and probe_salt belong together: pass both or none.")
        self._choice = with_words(ANY_ENTRY, words, function=EarlyExitModelHandler)
        self._sampling = None
        if probe_share is not None and probe_salt is not None:
            self._sampling = Sampling(share=probe_share, salt=probe_salt)
        self._first = self._wanted = self._taken = os.fspath(manifest)
        read = read_manifest(self._first)
        with naming_arguments(HostedModel):
            self._model = HostedModel(
                checkpoint=read.model.uri if model is None else os.fspath(model),
                fingerprint=read.model.fingerprint,
                declared=declared or Declared(),
                vocabulary=None if vocabulary is None else os.fspath(vocabulary),
                batch_size=batch_size,
                max_cache_tokens=max_cache_tokens,
                exit_head=exit_head,
                engine=engine,
                exact_engine=exact_engine,
                model_parallelism=model_parallelism,
            )
        batches = {
            "min_batch_size": min_batch_size,
            "max_batch_size": max_batch_size,
            "max_batch_duration_secs": max_batch_duration_secs,
        }
        _check_batches(min_batch_size, max_batch_size, seconds=max_batch_duration_secs)
        self._batches = {name: value for name, value in batches.items() if value is not None}
        self._tag = machine_tag(self._model) if share_model_across_processes else None
        self._copies = model_copies
        self._check(read)
        # Copies of a handler, one for each thread that answers, have the same.
        self._name = uuid.uuid4().hex
        self._told: set[str] = set()
        self._metrics = DecodeMetrics()
        self._refused = Metrics.counter(NAMESPACE, "refused-manifests")
        self._no_answers = Metrics.counter(NAMESPACE, "unanswered-prompts")
        self._measured = Metrics.counter(NAMESPACE, "measured-losses")
        # With `generated-tokens` and `decode-call-msec`, what was promised is seen as it is served.
        self._layers = Metrics.counter(NAMESPACE, "served-layers")
        self._full_layers = Metrics.counter(NAMESPACE, "full-model-layers")
        self._tests = Metrics.counter(NAMESPACE, "exit-tests")

    def _check(self, manifest: Manifest) -> None:
        """Refuses what can be refused here."""
        from calm_beam.serving.agreement import servable_settings
        from calm_beam.serving.loss_meter import check_share
        from calm_beam.serving.watched import check_exits, check_sampled

        entry = manifest.calibration(self._choice)
        self._width = servable_settings(manifest, entry, confidence=self._choice.confidence).max_input_length
        if self._sampling is not None:
            check_share(self._sampling.share)
            check_sampled(manifest, entry)
            if all(each.threshold is None for each in manifest.of_same_promise(entry)):
                check_exits(entry)

    def load_model(self) -> HostHandle:
        """Returns what asks for answers; the model is loaded at the first question."""
        tag = None if self._tag is None else f"{self._tag}-{os.getpid() % self._copies}"
        return HostHandle(self._model, tag=tag)

    def run_inference(
        self,
        batch: Sequence[AnyElement],
        model: HostHandle,
        inference_args: dict[str, Any] | None = None,
    ) -> list[PredictionResult]:
        """Returns the result of every prompt of a batch, in their order.

        Args:
          batch: The prompts.
          model: As `load_model` returns it.
          inference_args: None.

        Raises:
          CalmBeamError: If model or vocabulary are not those that were calibrated.
          ValueError: If prompts are sampled, and one has no id.
        """
        manifests = tuple(dict.fromkeys((self._wanted, self._taken, self._first)))
        prompts = tuple(named(element) for element in batch)
        reply = model.answer(
            Question(
                asker=self._name,
                manifests=manifests,
                choice=self._choice,
                prompts=prompts,
                sampling=self._sampling,
            )
        )
        self._note(reply)
        return [
            PredictionResult(element, outcome.inference, f"{reply.digest}#{outcome.calibration}")
            for element, outcome in zip(batch, reply.outcomes, strict=True)
        ]

    def _note(self, reply: Reply) -> None:
        """Counts what a reply tells, and says once which manifests were not taken."""
        from calm_beam.serving import Answer, ProbedAnswer, Unanswered

        self._taken = reply.manifest
        for path, reason in reply.refused.items():
            if path not in self._told:
                self._told.add(path)
                self._refused.inc()
                _LOGGER.error("manifest %s is not taken, %s stays: %s", path, reply.manifest, reason)
        self._metrics.count_call(reply.work, seconds=reply.decode_seconds)
        self._metrics.count_loads(reply.load_msecs)
        inferences = [outcome.inference for outcome in reply.outcomes]
        self._no_answers.inc(sum(isinstance(inference, Unanswered) for inference in inferences))
        answers = [inference for inference in inferences if isinstance(inference, Answer)]
        self._layers.inc(sum(answer.layers_used for answer in answers))
        self._full_layers.inc(sum(answer.layers_used + answer.layers_saved for answer in answers))
        self._tests.inc(reply.exit_tests)
        self._measured.inc(
            sum(
                isinstance(inference, ProbedAnswer | Unanswered) and inference.loss is not None
                for inference in inferences
            )
        )

    def update_model_path(self, model_path: str | None = None) -> None:
        """Takes the manifest in another file from the next batch on, if it belongs to the model.

        If not, the one before stays, the log says why, and the counter `refused-manifests` grows.

        Args:
          model_path: Its path, which must not have been another manifest's; None or nothing for the one before.
        """
        if model_path:
            self._wanted = model_path

    def batch_elements_kwargs(self) -> Mapping[str, Any]:
        """Returns how Beam makes batches: as the caller says, in prompts; else by width, up to several budgets full."""
        if {"min_batch_size", "max_batch_size"} & self._batches.keys():
            return self._batches
        budget = self._model.max_cache_tokens
        most = _MOST_UNITS if budget is None else max(_FEWEST_UNITS, _BUDGETS_A_BATCH * budget // _UNIT)
        return {
            **self._batches,
            "min_batch_size": _FEWEST_UNITS,
            "max_batch_size": most,
            "target_batch_duration_secs": _BATCH_SECONDS,
            "element_size_fn": PromptUnits(self._width),
        }

    def get_num_bytes(self, batch: Sequence[AnyElement]) -> int:
        """Returns the size of prompts: bytes of UTF-8, or four for a token."""
        return sum(_bytes_of(named(element).prompt) for element in batch)

    def get_metrics_namespace(self) -> str:
        """Returns the namespace of what `RunInference` counts, which is that of all our counters."""
        return NAMESPACE

    def validate_inference_args(self, inference_args: dict[str, Any] | None) -> None:
        """Raises ValueError for any: what is decoded, and how, is the manifest's."""
        if inference_args:
            raise ValueError(
                f"inference_args must be left out, got {sorted(map(str, inference_args))}. The manifest says how to "
                "decode; choose its entry by the handler's arguments."
            )

    def set_environment_vars(self) -> None:
        """Has JAX take memory as it needs it."""
        super().set_environment_vars()
        keep_memory_free()

    def share_model_across_processes(self) -> bool:
        """Returns False: what `load_model` returns is small, and stands for a model that is shared as was asked.

        Were Beam to share it, it would keep a model for each manifest, and load the weights again for each.
        """
        return False


def _check_batches(fewest: int | None, most: int | None, *, seconds: float | None) -> None:
    """Refuses sizes and times that Beam would accept silently, or refuse on workers."""
    for name, size in (("min_batch_size", fewest), ("max_batch_size", most)):
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, got {size!r:.60}.")
    limit = _BEAMS_MOST if most is None else most
    if fewest is not None and fewest > limit:
        default = " where it is left out" if most is None else ""
        raise ValueError(f"min_batch_size must be at most max_batch_size, {limit}{default}; got {fewest}.")
    if seconds is not None and (
        isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf
    ):
        raise ValueError(f"max_batch_duration_secs must be a number of at least 0, got {seconds!r:.60}.")


class PromptUnits:
    """The weight of a prompt in a batch: how often a narrow one would fit into the width that it is padded to."""

    def __init__(self, max_input_length: int) -> None:
        """Keeps the width that nothing exceeds."""
        self._max_input_length = max_input_length

    def __call__(self, element: Any) -> int:
        """Returns the weight of an element, at least 1; a key before it weighs nothing."""
        if isinstance(element, tuple) and len(element) == 2 and not isinstance(element[1], int):
            element = element[1]
        prompt = named(element).prompt
        tokens = (
            len(prompt.encode(errors="replace")) // _BYTES_A_TOKEN if isinstance(prompt, str) else prompt_size(prompt)
        )
        return max(1, -(-min(tokens, self._max_input_length) // _UNIT))


def named(element: AnyElement) -> NamedPrompt:
    """Returns an element as a prompt that may have a name."""
    return element if isinstance(element, NamedPrompt) else NamedPrompt(prompt=element)


def _bytes_of(prompt: Any) -> int:
    # Invalid prompts are refused when they are answered, with a message.
    return len(prompt.encode(errors="replace")) if isinstance(prompt, str) else 4 * prompt_size(prompt)
