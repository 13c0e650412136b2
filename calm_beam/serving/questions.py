"""What a host is asked and what it replies: plain values, which travel between processes."""

import dataclasses
import hashlib
from typing import TYPE_CHECKING

from calm_beam.decoding.engine import Work
from calm_beam.inputs.examples import AnyPrompt
from calm_beam.manifest import EntryChoice
from calm_beam.options.groups import Decoding, ExactEngine

from .answer import Answer, Unanswered

if TYPE_CHECKING:
    from calm_beam.checkpoints import Declared


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedPrompt:
    """A prompt with a name, or with a group.

    Attributes:
      prompt: A text, token ids, or the messages of a chat.
      id: Of the request, different for different requests; None for none. Samples are drawn by it.
      group: The group that the prompt names; None for none.
    """

    prompt: AnyPrompt
    id: str | None = None
    group: str | None = None


AnyElement = AnyPrompt | NamedPrompt
"""A prompt, or one with a name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostedModel(Decoding, ExactEngine):
    """A model, and how it decodes: what a host holds once, whatever manifests it is asked about.

    Attributes:
      checkpoint: Its folder.
      fingerprint: Of the model that is expected there: a retrained one is another model.
      declared: What its files do not say.
      vocabulary: SentencePiece model; None for the one in or next to the checkpoint.
    """

    checkpoint: str
    fingerprint: str
    declared: "Declared"
    vocabulary: str | None

    def digest(self) -> str:
        """Returns a name that differs for different models or settings."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Which requests are measured.

    Attributes:
      share: Of the requests, in (0, 1].
      salt: Decides which they are.
    """

    share: float
    salt: str = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """Prompts for a host.

    Attributes:
      asker: Client id, the same on every worker: its last good manifest is used in place of a refused one.
      manifests: Files of manifests: the first is to be served; each other one, if those before it are refused.
      choice: The entry of it.
      prompts: What is to be answered.
      sampling: Which prompts are measured as well; None for none.
    """

    asker: str
    manifests: tuple[str, ...]
    choice: EntryChoice
    prompts: tuple[NamedPrompt, ...]
    sampling: Sampling | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a prompt.

    Attributes:
      inference: The answer, a `ProbedAnswer` if its loss was measured, or why there is none.
      calibration: Place of the entry that it was answered by.
    """

    inference: Answer | Unanswered
    calibration: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """The reply of a host.

    Attributes:
      outcomes: Of all prompts, in their order.
      manifest: File of the manifest that they were answered by.
      digest: Of that manifest.
      refused: Why manifests before it in the question were not taken, by file.
      work: What was decoded.
      decode_seconds: How long that took, compilation included.
      exit_tests: Tests for the tokens of all answers that cost something extra, as `answer.exit_tests` counts them.
      load_msecs: How long models took to load, of those loaded since the last reply.
    """

    outcomes: tuple[Outcome, ...]
    manifest: str
    digest: str
    refused: dict[str, str]
    work: Work
    decode_seconds: float
    exit_tests: int
    load_msecs: tuple[int, ...]
