"""The model as it is served: one threshold of a manifest, layers really skipped.

A log line says what a first prompt waits for: a compiler prints nothing for half a minute or longer.
"""

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Self, Unpack

import jax

from calm_beam.checkpoints import Checkpoint, Declared, load_checkpoint
from calm_beam.decoding.batch import OnShape
from calm_beam.decoding.branches import Branch, BranchResult, Request
from calm_beam.decoding.compilation import bucket_width, widths_up_to
from calm_beam.decoding.decoder import BranchDecoder, Decoder
from calm_beam.decoding.device_groups import device_groups, placed
from calm_beam.decoding.engine_choice import Machine, takes_one_call
from calm_beam.decoding.memory import Demand, check_memory, memory_in_words
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.decoding.single_prompts import SinglePromptDecoder, single_prompt_decoder
from calm_beam.inputs.examples import AnyPrompt
from calm_beam.inputs.prompts import ONE_TURN, Prompt, encode_prompt
from calm_beam.inputs.vocabularies.vocabulary import EOS_ID, Vocabulary, ends_output, output_text
from calm_beam.manifest import (
    ANY_ENTRY,
    Calibration,
    EngineRecord,
    EntryChoice,
    EntryWords,
    Manifest,
    SettingManifest,
    about_settings,
    read_manifest,
    with_words,
)
from calm_beam.precision import Precision

from .agreement import (
    ServedEngine,
    agreed_settings,
    check_exact,
    other_engine_in_words,
    recorded_vocabulary,
    served_engine,
)
from .answer import Answer, OutputError, PromptError, ServedRequest, example_of

_PATIENCE_SECONDS = 2.0
_SECONDS_BETWEEN = 10.0
_LOGGER = logging.getLogger(__name__)


@contextlib.contextmanager
def named_while_waiting(phase: str) -> Iterator[None]:
    """Logs the reason of a long wait, as a warning: it is seen without any configuration of logging."""
    timer = threading.Timer(_PATIENCE_SECONDS, _LOGGER.warning, ("%s", phase))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def log_shapes() -> OnShape:
    """Returns what logs, as a warning every few seconds, how much is compiled while a caller waits."""
    last = time.monotonic()

    def log(done: int, total: int) -> None:
        nonlocal last
        if done < total and time.monotonic() - last >= _SECONDS_BETWEEN:
            last = time.monotonic()
            _LOGGER.warning("calm-beam: compiled %d of %d shapes", done, total)

    return log


_NOTHING = Declared()
_COMPILING = (
    "calm-beam: compiling for prompts of this length, once; the next ones do not wait (generator.warm_up() does it for "
    "all lengths)"
)


class Generator:
    """Answers prompts as the calibration decoded them, at the threshold that it found safe.

    Threads may share a generator: single prompts are decoded side by side, batches one after the other, and so are
    single prompts that are batches of one (`decodes_as_batches`). Concurrent calls share the cores, and each needs the
    memory of what it decodes, so a service bounds their number.

    Under a manifest with groups, a prompt may name its group, and is answered by the entry of that. One without a group
    is answered by the generator's own entry; one of a group that the manifest does not know, by the safest of all.

    Attributes:
      manifest: What was promised.
      entry: Of it, by which prompts of no group are answered.
      vocabulary: Of the model; None for prompts of token ids.
      memory: A sentence on what the model takes, and the room that was left when it was loaded.
      engine: What decodes, and whether it is what was calibrated.
      decodes_as_batches: Whether a prompt by itself is decoded as a batch of one, by the decoder of batches. Native
        code does so where it does not take all steps of an output in one call; XLA only if no other engine may serve.
    """

    def __init__(
        self,
        manifest: Manifest,
        entry: Calibration,
        *,
        checkpoint: Checkpoint,
        vocabulary: Vocabulary | None,
        settings: DecodeSettings,
        batch_size: int | None,
        max_cache_tokens: int | None,
        engine: ServedEngine,
        memory: str,
        model_parallelism: int = 1,
        is_full_model: bool = False,
        exact_engine: bool = False,
    ) -> None:
        """Prepares decoders; `from_manifest` checks first that all this belongs together."""
        self.manifest = manifest
        self.entry = entry
        self.vocabulary = vocabulary
        self.memory = memory
        self._checkpoint = checkpoint
        self._settings = settings
        self._batch_size = batch_size
        self._max_cache_tokens = max_cache_tokens
        self.engine = engine
        self._exact_engine = exact_engine
        # Once, since every prompt by itself asks.
        self.decodes_as_batches = (
            not takes_one_call(engine.single, settings.rule, checkpoint.config)
            if engine.single.name == "native"
            else exact_engine and engine.is_other(engine.single)
        )
        self._model_parallelism = model_parallelism
        self._is_full_model = is_full_model
        self._by_group = {each.group: each for each in manifest.of_same_promise(entry)}
        settings.rule.check_served()
        settings.rule.check_model(self.num_layers, has_classifier=bool(checkpoint.config.exit_classifier))
        entries = () if is_full_model else (entry, *self._by_group.values())
        # By threshold, of which None is the full model: the entries of groups may share one.
        self._branches = {
            threshold: Branch.at(settings.rule, threshold, by_position, max_decode_length=settings.max_decode_length)
            for threshold, by_position in {
                None: None,
                **{each.threshold: each.threshold_by_position for each in entries},
            }.items()
        }
        self._said: set[EngineRecord] = set()
        self._lock = threading.Lock()
        self._single: dict[float | None, SinglePromptDecoder] = {}
        self._answered: set[tuple[float | None, int]] = set()
        self._batch: Decoder | None = None
        self._batch_turn = threading.Lock()

    @classmethod
    def from_manifest(
        cls,
        manifest: Manifest | str | os.PathLike[str],
        checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
        *,
        declared: Declared = _NOTHING,
        vocabulary: str | os.PathLike[str] | None = None,
        choice: EntryChoice = ANY_ENTRY,
        batch_size: int | None = None,
        max_cache_tokens: int | None = None,
        exit_head: str = "auto",
        engine: str = "auto",
        exact_engine: bool = False,
        model_parallelism: int = 1,
        **words: Unpack[EntryWords],
    ) -> Self:
        """Returns a generator for one entry of a manifest.

        Args:
          manifest: The manifest, or its file.
          checkpoint: The model that was calibrated, or its folder; by default the folder that the manifest names.
          declared: What the checkpoint's files do not say of the model, if it was calibrated with more than T5's.
          vocabulary: SentencePiece model; by default the one in or next to the checkpoint.
          choice: Which entry, as one value.
          batch_size: Most prompts that `generate_batch` decodes together; None for as many as memory and speed
            recommend.
          max_cache_tokens: Most positions whose keys and values it holds at a time; None for a share of the memory.
          exit_head: Form of the output head that decides, one of `EXIT_HEADS`. It moves answers at near ties alone.
          engine: What decodes: `native`, `xla`, or `auto` for the engine that was calibrated where this machine has it,
            and else for native code where it has that. Another engine moves answers at near ties; that is logged once.
            Single prompts of large models are decoded by XLA in any case.
          exact_engine: Whether to refuse any other engine than was calibrated. Single prompts are then decoded as
            batches of one, if batches are what was calibrated.
          model_parallelism: Devices that share one model, each with a part of it; the number of devices of this process
            must be a multiple of it.
          words: Which entry, word by word, which counts before `choice`:
            consistency: Of the entry. This and the next four may be left out where the manifest has one entry that
              matches the rest.
            metric: Of the entry.
            loss: Of the entry, such as `signed` or `dissimilarity>0.3`.
            delta: Of the entry.
            epsilon: Of the entry.
            group: Of the entry: the group of prompts that name none. None takes the entry about all prompts.
            confidence: The confidence measure, if the manifest names code of the user's, `module:function`: a file
              alone does not decide what runs here.

        Returns:
          The generator. Where the entry's threshold is None, no threshold was found safe: it then runs the full model.

        Raises:
          ManifestError: If the manifest cannot be trusted, no entry or several match, model or vocabulary are not those
            that were calibrated, or nobody can serve what was; or with `exact_engine`, if the engine is another.
          CheckpointError: If the model cannot be read.
          VocabularyError: If the vocabulary cannot be read.
          OSError: If a file cannot be read.
          ValueError: If `batch_size` or `max_cache_tokens` is too low, this machine has no memory for the model or its
            devices cannot share it so, or the rule asks for an exit classifier and the model has none.

        Source: ours; what is decoded is CALM's, "Decoding with early exiting".
        """
        if isinstance(manifest, SettingManifest):
            raise about_settings()
        if not isinstance(manifest, Manifest):
            manifest = read_manifest(manifest)
        choice = with_words(choice, words, function=cls.from_manifest)
        entry = manifest.calibration(choice)
        if not isinstance(checkpoint, Checkpoint):
            folder = manifest.model.uri if checkpoint is None else os.fspath(checkpoint)
            checkpoint = load_checkpoint(folder, declared=declared)
        loaded = recorded_vocabulary(manifest.vocabulary, checkpoint, path=vocabulary)
        settings = agreed_settings(
            manifest, entry, checkpoint=checkpoint, vocabulary=loaded, confidence=choice.confidence
        )
        served = served_engine(
            manifest,
            settings,
            config=checkpoint.config,
            engine=engine,
            exit_head=exit_head,
            machine=Machine.of(jax.local_devices()[0]),
            model_parallelism=model_parallelism,
        )
        if exact_engine:
            check_exact(served.batch, served.calibrated)
        demand = Demand(
            num_branches=1,
            steps=settings.max_decode_length,
            source=settings.max_input_length,
            max_cache_tokens=max_cache_tokens,
            exit_head=served.batch.head,
            engine=served.batch.name,
            precision=settings.precision,
        )
        check_memory(checkpoint.config, demand)
        memory = memory_in_words(checkpoint.config, demand, model_parallelism=model_parallelism)
        return cls(
            manifest,
            entry,
            checkpoint=on_device(checkpoint, settings.precision, model_parallelism=model_parallelism),
            vocabulary=loaded,
            settings=settings,
            batch_size=batch_size,
            max_cache_tokens=max_cache_tokens,
            engine=served,
            memory=memory,
            model_parallelism=model_parallelism,
            exact_engine=exact_engine,
        )

    def full_model(self) -> Self:
        """Returns a generator that never exits, with the same weights: what textual consistency compares with."""
        return type(self)(
            self.manifest,
            self.entry,
            checkpoint=self._checkpoint,
            vocabulary=self.vocabulary,
            settings=self._settings,
            batch_size=self._batch_size,
            max_cache_tokens=self._max_cache_tokens,
            engine=self.engine,
            memory=self.memory,
            model_parallelism=self._model_parallelism,
            exact_engine=self._exact_engine,
            is_full_model=True,
        )

    @property
    def num_layers(self) -> int:
        """Decoder depth."""
        depth: int = self._checkpoint.config.num_decoder_layers
        return depth

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Token ids of which each ends an output."""
        ends: tuple[int, ...] = self._checkpoint.config.end_ids
        return ends

    def has_ended(self, tokens: Sequence[int]) -> bool:
        """Returns whether the last token of an answer ended it, and not the most tokens that an answer may have."""
        stops = ends_output(self.vocabulary)
        return bool(tokens) and (tokens[-1] in self.end_ids or (stops is not None and stops(tokens)))

    @property
    def max_input_length(self) -> int:
        """Most tokens of a prompt, eos included."""
        return self._settings.max_input_length

    def other_engine_in_words(self) -> str:
        """Returns what another engine leaves of the promise where batches are decoded by one; else nothing."""
        return other_engine_in_words(self.manifest, self.entry, served=self.engine.batch)

    def _say_other(self, served: EngineRecord) -> None:
        """Logs, once for each engine, that it is not what was calibrated."""
        if served in self._said:
            return
        self._said.add(served)
        if sentence := other_engine_in_words(self.manifest, self.entry, served=served, batch=self.engine.batch):
            _LOGGER.warning("%s", sentence)

    def warm_up(self, *, on_shape: OnShape | None = None) -> None:
        """Compiles what answers single prompts, for every width that they are padded to: none has to wait for that.

        Args:
          on_shape: Called as `Batch.warm_up` calls it, with one shape for each width and threshold; `log_shapes()` if
            omitted.
        """
        # A schedule may let a threshold exit for certain, which is code of its own.
        thresholds = {self._threshold(entry) for entry in (self.entry, *self._by_group.values())}
        shapes = list(itertools.product(thresholds, widths_up_to(self._settings.max_input_length)))
        report = on_shape or log_shapes()
        with named_while_waiting(f"calm-beam: compiling for {len(shapes)} lengths of prompts, once"):
            for done, (threshold, width) in enumerate(shapes):
                report(done, len(shapes))
                self._decoded_alone([EOS_ID] * width, threshold)
                self._answered.add((threshold, width))
        report(len(shapes), len(shapes))

    def check(self, prompts: Sequence[AnyPrompt], *, names: Sequence[str] | None = None) -> None:
        """Raises PromptError for the first prompt that `generate_batch` would refuse, and decodes nothing."""
        self.requests(prompts, names=names)

    def entry_for(self, group: str | None) -> Calibration:
        """Returns the entry by which prompts of a group are answered.

        Args:
          group: Its name; None for the generator's own. For a group that the manifest does not know, it is the safest
            entry of all, though no promise is about such prompts.
        """
        if group is None:
            return self.entry
        return self._by_group.get(group) or self.manifest.safest(self.entry)

    def generate(self, prompt: AnyPrompt, *, group: str | None = None) -> Answer:
        """Returns the answer to one prompt, by itself; prompt, group and errors are those of `generate_batch`."""
        request = self.request(prompt, name="the prompt", group=group)
        threshold = self._threshold(request.entry)
        shape = threshold, bucket_width(len(request.ids), self._settings.max_input_length)
        with contextlib.nullcontext() if shape in self._answered else named_while_waiting(_COMPILING):
            result = self._decoded_alone(request.ids, threshold)
        self._answered.add(shape)
        return self.answer(request, result)

    def generate_batch(
        self,
        prompts: Sequence[AnyPrompt],
        *,
        names: Sequence[str] | None = None,
        groups: Sequence[str | None] | None = None,
    ) -> list[Answer]:
        """Returns the answers to some prompts, in their order, which are decoded together.

        Tokens and exit layers are those of one prompt at a time but at near ties. Native code is batch-invariant; with
        XLA, batch composition changes confidences by about 1e-6.

        Args:
          prompts: Texts, to which the manifest's task prefix is added; or token ids, taken as they are.
          names: What error messages call them; by default `prompt 0` and so on.
          groups: The group of each, as `entry_for` takes it; None if no prompt names one.

        Raises:
          PromptError: If a prompt is empty, not of the kind that was calibrated, too long where the manifest does not
            say that such are cut, or names a group under a manifest without groups. Nothing is decoded then.
          OutputError: If the model gives logits that are not finite; names the prompt.
        """
        answers = dict(self.generate_each(self.requests(prompts, names=names, groups=groups)))
        for index in range(len(prompts)):
            if isinstance(answer := answers[index], OutputError):
                raise answer
        return [answer for _, answer in sorted(answers.items()) if isinstance(answer, Answer)]

    def generate_each(self, requests: Sequence[ServedRequest]) -> Iterator[tuple[int, Answer | OutputError]]:
        """Yields the results of requests that are decoded together, with the index of each, in the order they end.

        One that has no output does not take others along. Until the last is yielded, no other thread decodes a batch.

        Args:
          requests: As `request` returns them.
        """
        if not requests:
            return
        with self._batch_turn:
            decoder = self.batch_decoder()
            for index, result in decoder.decode([self.to_decode(request) for request in requests]):
                try:
                    yield index, self.answer(requests[index], result.branch(0))
                except OutputError as error:
                    yield index, error

    def requests(
        self,
        prompts: Sequence[AnyPrompt],
        *,
        names: Sequence[str] | None = None,
        groups: Sequence[str | None] | None = None,
    ) -> list[ServedRequest]:
        """Returns prompts as they are decoded; arguments and `PromptError` are those of `generate_batch`."""
        if isinstance(prompts, str):
            raise TypeError("expected a list of prompts, got a single text. Put it in a list, or call generate.")
        return [
            self.request(prompt, name=name, group=group)
            for prompt, name, group in zip(
                prompts,
                names or [f"prompt {index}" for index in range(len(prompts))],
                [None] * len(prompts) if groups is None else groups,
                strict=True,
            )
        ]

    def request(self, prompt: AnyPrompt, *, name: str, group: str | None = None) -> ServedRequest:
        """Returns a prompt as it is decoded, encoded as the calibration encoded it.

        Args:
          prompt: A text, to which the manifest's task prefix is added; or token ids, which are used unchanged.
          name: Name of the prompt in error messages.
          group: The group that the prompt belongs to; None for none.

        Raises:
          PromptError: If the prompt is empty, not of the kind that was calibrated, too long where the manifest does not
            say that such are cut, or names a group under a manifest without groups.
        """
        if group is not None and self.manifest.data.groups is None:
            raise PromptError(
                f"{name}: names group {group!r:.60}, and the manifest was calibrated without --group_key. Leave the "
                "group out: the promise is about all prompts together."
            )
        return ServedRequest(
            name=name,
            encoded=self._encode(prompt, name),
            group=self.entry.group if group is None else group,
            entry=self.entry_for(group),
        )

    def answer(self, request: ServedRequest, result: BranchResult) -> Answer:
        """Returns the answer that a decoder's result is.

        Raises:
          OutputError: If the model gave logits that are not finite; names the prompt.
        """
        if not result.is_finite:
            raise OutputError(
                f"{request.name} ({request.beginning()}): the model gave logits that are not finite, so that its "
                "output means nothing. Check the checkpoint."
            )
        tokens = tuple(result.tokens[: result.length].tolist())
        return Answer(
            text=output_text(tokens, self.vocabulary),
            tokens=tokens,
            exit_layers=tuple(result.exit_layers[: result.length].tolist()),
            confidences=tuple(result.confidences[: result.length].tolist()),
            num_layers=self.num_layers,
            truncated=request.encoded.truncated,
            finish_reason="stop" if self.has_ended(tokens) else "length",
            group=request.group,
            entry=None if self._is_full_model else request.entry,
            vocabulary=self.vocabulary,
        )

    def to_decode(self, request: ServedRequest) -> Request:
        """Returns what `batch_decoder` is asked for, to answer a request."""
        return Request(request.ids, branches=[self._branches[self._threshold(request.entry)]])

    def batch_decoder(self) -> Decoder:
        """Returns what decodes batches, made when it is needed first."""
        with self._lock:
            if self._batch is None:
                self._say_other(self.engine.batch)
                self._batch = Decoder(
                    self._checkpoint,
                    [self._branches[None]],
                    max_input_length=self._settings.max_input_length,
                    batch_size=self._batch_size,
                    max_cache_tokens=self._max_cache_tokens,
                    **self.engine.asked,
                    precision=self._settings.precision,
                    model_parallelism=self._model_parallelism,
                    ends_output=ends_output(self.vocabulary),
                )
            return self._batch

    def _decoded_alone(self, ids: Sequence[int], threshold: float | None) -> BranchResult:
        """Returns the result of one prompt's token ids, by itself."""
        ((_, result),) = self._single_decoder(threshold).decode([ids])
        return result

    def _single_decoder(self, threshold: float | None) -> SinglePromptDecoder:
        """Returns what decodes one prompt at a time, made for all thresholds when it is needed first."""
        if self.decodes_as_batches:
            return BranchDecoder(self.batch_decoder(), self._branches[threshold], turn=self._batch_turn)
        with self._lock:
            if not self._single:
                self._say_other(self.engine.single)
                full_model = single_prompt_decoder(
                    self._checkpoint,
                    self._branches[None],
                    max_input_length=self._settings.max_input_length,
                    **self.engine.asked,
                    precision=self._settings.precision,
                    model_parallelism=self._model_parallelism,
                    ends_output=ends_output(self.vocabulary),
                )
                self._single = {threshold: full_model.at(branch) for threshold, branch in self._branches.items()}
            return self._single[threshold]

    def _threshold(self, entry: Calibration) -> float | None:
        return None if self._is_full_model else entry.threshold

    def _encode(self, prompt: AnyPrompt, name: str) -> Prompt:
        """Returns a prompt as token ids, as the calibration encoded it."""
        vocab_size = self._checkpoint.config.vocab_size
        example = example_of(prompt, name, vocab_size=vocab_size)
        if example.input is not None and self.vocabulary is None:
            raise PromptError(f"{name}: is text, but the manifest is about prompts of token ids.")
        if example.earlier is not None and not self.manifest.takes_several_turns:
            raise PromptError(f"{name}: {ONE_TURN}")
        encoded = encode_prompt(
            example, self.vocabulary, settings=self._settings, vocab_size=vocab_size, on_long="truncate"
        )
        plan = self.manifest.plan
        if encoded.truncated and plan is not None and plan.on_long == "error":
            raise PromptError(
                f"{name}: is too long. The manifest allows {self.max_input_length} tokens, and does not allow to cut "
                "what is longer. Shorten it."
            )
        return encoded


def on_device(checkpoint: Checkpoint, precision: Precision, *, model_parallelism: int = 1) -> Checkpoint:
    """Returns the model with its weights where they are computed with, once for all decoders that are made of it."""
    group, *_ = device_groups(checkpoint.config, model_parallelism=model_parallelism)
    return placed(checkpoint, group, precision)
