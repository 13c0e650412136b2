"""What a sweep is asked to do."""

import dataclasses

from calm_beam.decoding.settings import DecodeSettings
from calm_beam.inputs.set_parts import SetPart
from calm_beam.manifest import ChatRecord


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """A sweep over a data set, as a user asks for it.

    Attributes:
      model: Folder of the model.
      settings: What determines the outputs; `prepare_sweep` sets the engine.
      vocabulary: Path of the SentencePiece model, or of a `tokenizer.json`; None looks in and beside the model.
      extra_ids: Sentinels to add to it; None takes as many as tokenizer files beside it name.
      chat_template: `model` for the chat template beside the tokenizer, the path of one, or `none` for prompts as they
        are; None is that, too, where there is no template.
      system: What every chat begins with; None if it begins with the prompt.
      recorded_chat: How a manifest says that prompts become chats, which counts before those two.
      shortens_prompts: Whether the most tokens of a prompt, which the settings have, are what the model has room for
        beside an output, if that is less: where nobody says how many.
      activation: Of the model, where its files do not say it; None goes by the files.
      relative_max_distance: The same.
      on_long: `truncate` or `error`, for prompts longer than the settings allow.
      on_error: `fail` or `worst_case`, for prompts that cannot be decoded.
      max_failures: Most examples that may fail; None as in `failure_limit`.
      batch_size: Most prompts decoded together; None for as many as memory and speed recommend.
      token_budget: Most positions held at a time; None for a share of the memory that is free.
      exit_head: One of `EXIT_HEADS`: the form of the output head that decides. It moves outputs at near ties alone.
      engine: One of `engine_choice.ENGINE_CHOICES`: what decodes. Likewise.
      num_shards: Shards that examples are divided into, by a hash of their prompts; None goes by the size of the data,
        and a prepared sweep has the number.
      order: Salt of a hash of their ids, or of their clusters' names, which divides them instead; None for prompts.
      round_examples: Examples of a round, where tests are looked at after each; None where all examples count.
      model_copies: Most copies of the model in one process.
      model_parallelism: Devices of a worker that share one model, each with a part of it; copies are on the others.
      part: The part of the data that is decoded; None for all of it.
      decoder: As in `DecodeJob`.
    """

    model: str
    settings: DecodeSettings
    vocabulary: str | None = None
    extra_ids: int | None = None
    chat_template: str | None = None
    system: str | None = None
    recorded_chat: ChatRecord | None = None
    shortens_prompts: bool = False
    activation: str | None = None
    relative_max_distance: int | None = None
    on_long: str = "truncate"
    on_error: str = "fail"
    max_failures: int | None = None
    batch_size: int | None = None
    token_budget: int | None = None
    exit_head: str = "auto"
    engine: str = "auto"
    num_shards: int | None = None
    order: str | None = None
    round_examples: int | None = None
    model_copies: int = 1
    model_parallelism: int = 1
    part: SetPart | None = None
    decoder: str | None = None
