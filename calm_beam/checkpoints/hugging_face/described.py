"""What a folder of transformers says of a model."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

# Our name of the one matrix that is stored as it is; all others are stored [out, in].
EMBEDDING = "token_embedder/embedding"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Described:
    """A model as transformers describes it.

    Attributes:
      fields: What `config.json` says, but for the type of the weights.
      generation: What `generation_config.json` says.
      names: What transformers calls each parameter, by our names.
    """

    fields: Mapping[str, Any]
    generation: Mapping[str, Any]
    names: Mapping[str, str]


def written_ends(end_ids: Sequence[int]) -> int | list[int]:
    """Returns `eos_token_id` for ids of which each ends an output: older readers know one alone."""
    return end_ids[0] if len(end_ids) == 1 else list(end_ids)
