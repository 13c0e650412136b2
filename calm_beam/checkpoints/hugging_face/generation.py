"""Where outputs begin and end, as `generation_config.json` says, or `config.json` where that says nothing.

Source: transformers `generation/utils.py` (`_prepare_special_tokens`) and `modeling_utils.py`, versions 4 and 5. Where
`generation_config.json` names no end at all, these never end an output; here `config.json` counts then.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from calm_beam.checkpoints.error import CheckpointError
from calm_beam.checkpoints.metadata import read_json, shortened

GENERATION = "generation_config.json"
# Settings under which transformers generates other tokens than the most likely ones, and values that change nothing.
_NOT_FOLLOWED: Mapping[str, tuple[object, ...]] = {
    "do_sample": (False,),
    "num_beams": (1,),
    "penalty_alpha": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "encoder_repetition_penalty": (1, 1.0),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "bad_words_ids": ([],),
    "sequence_bias": ([], {}),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
}
# What ends outputs there and not here.
_STOPS = "stop_strings"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """What a folder says about generating.

    Attributes:
      directory: The folder.
      config: What `config.json` says.
      file: What `generation_config.json` says; None if there is none.
    """

    directory: pathlib.Path
    config: Mapping[str, Any]
    file: Mapping[str, Any] | None

    def end_ids(self, default: int | None) -> tuple[tuple[int, ...], pathlib.Path]:
        """Returns the tokens of which each ends an output, ascending, and the file that says so.

        Args:
          default: What counts where neither file names one.

        Raises:
          CheckpointError: If they are no ids.
        """
        name, named = self._said("eos_token_id")
        if named is None:
            named = self.config.get("eos_token_id", default)
        ids = named if isinstance(named, list) else [named]
        if not ids or not all(type(index) is int for index in ids):
            raise CheckpointError(
                f"{self.directory / name}: eos_token_id is {shortened(repr(named))}; expected the id of the token that "
                "ends an output, or a list of several."
            )
        return tuple(sorted(set(ids))), self.directory / name

    def start_id(self, default: int) -> tuple[int, pathlib.Path]:
        """Returns the token that a decoder beside an encoder reads first, and the file that says so.

        Args:
          default: What counts where neither file names one.

        Raises:
          CheckpointError: If it is no id.
        """
        key = "decoder_start_token_id"
        name, named = self._said(key)
        if self.file is not None and self.file.get(key) is None and self.file.get("bos_token_id") is not None:
            name, key, named = GENERATION, "bos_token_id", self.file["bos_token_id"]
        if named is None:
            named = default
        if isinstance(named, list) and len(named) == 1:
            (named,) = named
        if type(named) is not int:
            raise CheckpointError(
                f"{self.directory / name}: {key} is {shortened(repr(named))}; expected the id of the token that the "
                "decoder reads first."
            )
        return named, self.directory / name

    def not_followed(self) -> tuple[str, ...]:
        """Returns sentences on settings under which transformers takes other tokens than the likeliest, or stops."""
        name, fields = ("config.json", self.config) if self.file is None else (GENERATION, self.file)
        stops = fields.get(_STOPS)
        found = [
            key
            for key, neutral in _NOT_FOLLOWED.items()
            if fields.get(key) is not None and not any(fields[key] == value for value in neutral)
        ]
        said = []
        if found:
            said.append(
                f"{self.directory / name} sets {', '.join(found)}, which does not count here: every token is the most "
                "likely one."
            )
        if stops:
            said.append(
                f"{self.directory / name} sets {_STOPS} {shortened(repr(stops))}, which do not count here: tokens "
                "alone end an output. Name the tokens that these texts are among its eos_token_id."
            )
        return tuple(said)

    def _said(self, key: str) -> tuple[str, Any]:
        """Returns the name of the file that counts for a key, and what it says."""
        if self.file is not None and self.file.get(key) is not None:
            return GENERATION, self.file[key]
        return "config.json", self.config.get(key)


def read_generation(directory: pathlib.Path, config: Mapping[str, Any]) -> Generation:
    """Returns what a folder says about generating.

    Args:
      directory: The folder.
      config: What its `config.json` says.

    Raises:
      CheckpointError: If `generation_config.json` is there and cannot be read.
    """
    path = directory / GENERATION
    return Generation(directory=directory, config=config, file=read_json(path) if path.is_file() else None)
