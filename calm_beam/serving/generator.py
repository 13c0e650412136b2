"""The model as it is served: one threshold of a manifest, layers really skipped."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, Self

import jax

from calm_beam.checkpoints import Checkpoint, Declared, load_checkpoint
from calm_beam.decoding.early_exit import EarlyExitDecoder, EarlyExitResult
from calm_beam.decoding.memory import check_memory
from calm_beam.decoding.padding import bucket_width
from calm_beam.decoding.prompts import Prompt, encode_prompt
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.examples import NO_UTF_8, NUL_CHARACTER, Example
from calm_beam.manifest import Calibration, ExternalManifest, Manifest, check_kind, read_manifest
from calm_beam.vocabulary import EOS_ID, PAD_ID, Vocabulary, output_text

from .agreement import agreed_settings, recorded_vocabulary
from .answer import Answer, OutputError, PromptError

AnyPrompt = str | Sequence[int]
"""A prompt: text, or token ids where that is what was calibrated."""

_NOTHING = Declared()


class Generator:
    """Answers prompts as the calibration decoded them, at the threshold that it found safe.

    Threads may share a generator. Nothing of it changes once it is made: weights, vocabulary and compiled code are read
    only, and what a prompt needs while it is decoded is its caller's own. What runs at the same time shares the cores,
    and each thread needs the memory of one batch, so a service bounds their number.

    Under a manifest with groups, a prompt may name its group, and is answered by the entry of that. One without a group
    is answered by the generator's own entry; one of a group that the manifest does not know, by the safest of all.
    """

    def __init__(
        self,
        manifest: Manifest,
        entry: Calibration,
        *,
        checkpoint: Checkpoint,
        vocabulary: Vocabulary | None,
        settings: DecodeSettings,
        batch_size: int,
        exit_head: str,
        is_full_model: bool = False,
    ) -> None:
        """Prepares a decoder; `from_manifest` checks first that all this belongs together."""
        self.manifest = manifest
        self.entry = entry
        self.vocabulary = vocabulary
        self._checkpoint = checkpoint
        self._settings = settings
        self._batch_size = batch_size
        self._exit_head = exit_head
        self._is_full_model = is_full_model
        threshold = None if is_full_model else entry.threshold
        decoder = EarlyExitDecoder(
            checkpoint,
            settings.rule,
            threshold=threshold,
            max_decode_length=settings.max_decode_length,
            max_input_length=settings.max_input_length,
            batch_size=batch_size,
            threshold_by_position=None if threshold is None else entry.threshold_by_position,
            exit_head=exit_head,
        )
        # By threshold: the entries of groups may share one.
        self._decoders = {threshold: decoder}
        self._by_group = {each.group: each for each in manifest.of_same_promise(entry)}
        for each in () if is_full_model else self._by_group.values():
            if each.threshold not in self._decoders:
                self._decoders[each.threshold] = decoder.at(
                    each.threshold, threshold_by_position=each.threshold_by_position
                )

    @classmethod
    def from_manifest(
        cls,
        manifest: Manifest | str | os.PathLike[str],
        checkpoint: Checkpoint | str | os.PathLike[str],
        *,
        declared: Declared = _NOTHING,
        vocabulary: str | os.PathLike[str] | None = None,
        consistency: str | None = None,
        metric: str | None = None,
        loss: str | None = None,
        delta: float | None = None,
        epsilon: float | None = None,
        group: str | None = None,
        batch_size: int = 1,
        exit_head: str = "auto",
        confidence: str | None = None,
    ) -> Self:
        """Returns a generator for one entry of a manifest.

        Args:
          manifest: The manifest, or its file.
          checkpoint: The model that was calibrated, or its folder.
          declared: What the checkpoint's files do not say of the model, if it was calibrated with more than T5's.
          vocabulary: SentencePiece model; by default the one in or beside the checkpoint.
          consistency: Of the entry. This and the next four may be left out where the manifest has one entry that
            matches the rest.
          metric: Of the entry.
          loss: Of the entry, such as `signed` or `dissimilarity>0.3`.
          delta: Of the entry.
          epsilon: Of the entry.
          group: Of the entry: the group of prompts that name none. None takes the entry about all prompts.
          batch_size: Prompts decoded together. All decoding is done with so many rows, single prompts too: an answer
            does not depend on what was asked beside it. More than 1 is for `generate_batch`; meant for 1 to 8.
          exit_head: Form of the output head that decides, one of `EXIT_HEADS`. It moves no answer, only time.
          confidence: The confidence measure, if the manifest names code of the user's, `module:function`: a file alone
            does not decide what runs here.

        Returns:
          The generator. Where the entry's threshold is None, no threshold was found safe: it then runs the full model.

        Raises:
          ManifestError: If the manifest cannot be trusted, no entry or several match, model or vocabulary are not those
            that were calibrated, or nobody can serve what was.
          CheckpointError: If the model cannot be read.
          VocabularyError: If the vocabulary cannot be read.
          OSError: If a file cannot be read.
          ValueError: If `batch_size` is below 1, this machine has no memory for it, or the rule asks for an exit
            classifier and the model has none.

        Source: ours; what is decoded is CALM's, "Decoding with early exiting".
        """
        if isinstance(manifest, ExternalManifest):
            check_kind(manifest.to_dict())
        if not isinstance(manifest, Manifest):
            manifest = read_manifest(manifest)
        entry = manifest.calibration(
            consistency=consistency, metric=metric, loss=loss, delta=delta, epsilon=epsilon, group=group
        )
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = load_checkpoint(os.fspath(checkpoint), declared=declared)
        loaded = recorded_vocabulary(manifest.vocabulary, checkpoint, path=vocabulary)
        settings = agreed_settings(manifest, entry, checkpoint=checkpoint, vocabulary=loaded, confidence=confidence)
        check_memory(
            checkpoint.config,
            lanes=1,
            steps=settings.max_decode_length,
            source=settings.max_input_length,
            rows=batch_size,
        )
        return cls(
            manifest,
            entry,
            checkpoint=_on_device(checkpoint),
            vocabulary=loaded,
            settings=settings,
            batch_size=batch_size,
            exit_head=exit_head,
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
            exit_head=self._exit_head,
            is_full_model=True,
        )

    @property
    def num_layers(self) -> int:
        """Decoder depth."""
        return self._checkpoint.config.num_decoder_layers

    @property
    def max_input_length(self) -> int:
        """Most tokens of a prompt, eos included."""
        return self._settings.max_input_length

    def warm_up(self) -> None:
        """Compiles for every width that prompts are padded to, so that no prompt has to wait for that."""
        limit = self._settings.max_input_length
        widths = {bucket_width(length, limit) for length in range(1, limit + 1)}
        # A schedule may let a threshold exit for certain, which is code of its own.
        for decoder in self._decoders.values():
            for _ in decoder.decode([[EOS_ID] * width for width in sorted(widths)]):
                pass

    def check(self, prompts: Sequence[AnyPrompt], *, names: Sequence[str] | None = None) -> None:
        """Raises PromptError for the first prompt that `generate_batch` would refuse, and decodes nothing."""
        self._encoded(prompts, names)

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
        """Returns the answer to one prompt; prompt, group and errors are those of `generate_batch`."""
        return self.generate_batch([prompt], names=["the prompt"], groups=[group])[0]

    def generate_batch(
        self,
        prompts: Sequence[AnyPrompt],
        *,
        names: Sequence[str] | None = None,
        groups: Sequence[str | None] | None = None,
    ) -> list[Answer]:
        """Returns the answers to some prompts, in their order.

        Args:
          prompts: Texts, to which the manifest's task prefix is added; or token ids, taken as they are.
          names: What error messages call them; by default `prompt 0` and so on.
          groups: The group of each, as `entry_for` takes it; None if no prompt names one.

        Raises:
          PromptError: If a prompt is empty, not of the kind that was calibrated, or too long where the manifest does
            not say that such are cut. Nothing is decoded then.
          OutputError: If the model gives logits that are not finite; names the prompt.
        """
        encoded = self._encoded(prompts, names)
        named = [None] * len(encoded) if groups is None else [*groups]
        entries = [self.entry_for(group) for group, _ in zip(named, encoded, strict=True)]
        answers: dict[int, Answer] = {}
        for threshold, decoder in self._decoders.items():
            places = [
                place for place, entry in enumerate(entries) if self._is_full_model or entry.threshold == threshold
            ]
            for index, result in decoder.decode([encoded[place].ids for place in places]) if places else ():
                place = places[index]
                if not result.is_finite:
                    raise OutputError(
                        f"{encoded[place].example.id} ({prompts[place]!r:.60}): the model gave logits that are not "
                        "finite, so that its output means nothing. Check the checkpoint."
                    )
                answers[place] = self._answer(
                    encoded[place], result, entry=entries[place], group=named[place] or self.entry.group
                )
        return [answers[index] for index in range(len(prompts))]

    def _encoded(self, prompts: Sequence[AnyPrompt], names: Sequence[str] | None) -> list[Prompt]:
        """Returns prompts as token ids."""
        if isinstance(prompts, str):
            raise TypeError("expected a list of prompts, got a single text. Put it in a list, or call generate.")
        names = names or [f"prompt {index}" for index in range(len(prompts))]
        return [self._encode(prompt, name) for prompt, name in zip(prompts, names, strict=True)]

    def _encode(self, prompt: AnyPrompt, name: str) -> Prompt:
        """Returns a prompt as token ids, as the calibration encoded it."""
        vocab_size = self._checkpoint.config.vocab_size
        example = _example(prompt, name, vocab_size=vocab_size)
        if example.input is not None and self.vocabulary is None:
            raise PromptError(f"{name}: is text, but the manifest is about prompts of token ids.")
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

    def _answer(self, prompt: Prompt, result: EarlyExitResult, *, entry: Calibration, group: str | None) -> Answer:
        tokens = tuple(result.tokens[: result.length].tolist())
        return Answer(
            text=output_text(tokens, self.vocabulary),
            tokens=tokens,
            exit_layers=tuple(result.exit_layers[: result.length].tolist()),
            confidences=tuple(result.confidences[: result.length].tolist()),
            num_layers=self.num_layers,
            truncated=prompt.truncated,
            group=group,
            entry=None if self._is_full_model else entry,
        )


def _on_device(checkpoint: Checkpoint) -> Checkpoint:
    """Returns the model with its weights where they are computed with, once for all decoders that are made of it."""
    return dataclasses.replace(checkpoint, arrays=jax.device_put(dict(checkpoint.arrays)))


def _example(prompt: AnyPrompt, name: str, *, vocab_size: int) -> Example:
    """Returns a prompt as an example; what no calibration set could hold is refused."""
    text = ids = None
    if isinstance(prompt, str):
        text = prompt
        if not text.strip():
            raise PromptError(f"{name}: is empty.")
        if "\0" in text:
            raise PromptError(f"{name}: holds {NUL_CHARACTER}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"{name}: is not Unicode text: {NO_UTF_8}") from error
    else:
        ids = _checked_ids(prompt, name, vocab_size=vocab_size)
    return Example(
        id=name, has_own_id=True, input=text, input_ids=ids, references=(), cluster=None, file_index=0, line=1
    )


def _checked_ids(prompt: Any, name: str, *, vocab_size: int) -> tuple[int, ...]:
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
        raise PromptError(f"{name}: expected a text or a list of token ids, got {type(prompt).__name__}.")
    for index in prompt:
        if type(index) is not int or not 0 <= index < vocab_size:
            raise PromptError(f"{name}: token ids must be integers from 0 to {vocab_size - 1}, got {index!r}.")
    # Padding at the end is none of the prompt.
    end = len(prompt)
    while end and prompt[end - 1] == PAD_ID:
        end -= 1
    if not end:
        raise PromptError(f"{name}: is empty, or holds padding (0) only.")
    return tuple(prompt[:end])
