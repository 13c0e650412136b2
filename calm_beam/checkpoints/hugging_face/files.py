"""Files that the folders of all families have: tensors, start and end of outputs, and exits.

Tensors are in one file or in the parts in its index. Start and end of outputs are taken from `generation_config.json`,
or from `config.json` if it does not have them. If `generation_config.json` has no end token, transformers never ends
an output; here `config.json` counts then. The parameters of exits are in a separate file, which transformers ignores.
Source: transformers `generation/utils.py` (`_prepare_special_tokens`) and `modeling_utils.py`, versions 4 and 5.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from calm_beam.checkpoints.checkpoint import GenerationFacts, StoredModel
from calm_beam.checkpoints.metadata import CheckpointError, read_json, shortened
from calm_beam.checkpoints.model_folder import GENERATION, read_safetensors
from calm_beam.checkpoints.stored_array import Array, FileStamp, StoredArrays, rows_of, stacked
from calm_beam.model import parameter_shapes
from calm_beam.model.architecture import exit_fields

# torch.compile's prefix of every name.
_COMPILED = "_orig_mod."


def read_tensors(directory: pathlib.Path, keeps: Callable[[str], bool]) -> StoredArrays:
    """Returns all tensors of the folder, unread.

    Args:
      directory: Folder with `model.safetensors`, or the parts in its index.
      keeps: Which tensors to read, by name.

    Raises:
      CheckpointError: If a file is missing or damaged, or a part does not have the tensors in the index.
    """
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").exists():
        return read_safetensors(directory / "model.safetensors", keeps=keeps)
    if not index.is_file():
        raise CheckpointError(
            f"{directory}: no model.safetensors, nor model.safetensors.index.json. Weights in other files, such as "
            "pytorch_model.bin, are not read: save the model again with save_pretrained of a recent transformers."
        )
    parts = read_json(index).get("weight_map")
    # File names without folders: nothing outside the folder belongs to the model.
    if not isinstance(parts, dict) or not all(
        isinstance(part, str) and part == pathlib.PurePath(part).name for part in parts.values()
    ):
        raise CheckpointError(f'{index}: expected {{"weight_map": {{name of a tensor: name of its file}}}}.')
    tensors: dict[str, Array] = {}
    stamps: list[FileStamp] = []
    for part in sorted(set(parts.values())):
        found = read_safetensors(directory / part, keeps=keeps)
        if found.keys() != {name for name, place in parts.items() if place == part and keeps(name)}:
            raise CheckpointError(
                f"{shortened(directory / part)}: does not hold the tensors that {index.name} says it holds."
            )
        tensors.update(found)
        stamps += found.stamps
    return StoredArrays(tensors, stamps)


def check_names(directory: pathlib.Path, *, found: Iterable[str], expected: Iterable[str], model: str) -> None:
    """Refuses tensors that do not belong to a model.

    Args:
      directory: Folder of the tensors.
      found: Names of the tensors.
      expected: The model's names.
      model: The kind of model in `config.json`, for the message.

    Raises:
      CheckpointError: If one is missing or unknown.
    """
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or unknown:
        raise CheckpointError(
            f"{directory}: tensors are not those of the {model} in config.json; missing "
            f"{', '.join(missing[:4]) or 'none'} ({len(missing)}), unknown {', '.join(unknown[:4]) or 'none'} "
            f"({len(unknown)}).{prefix_in_words(found, missing)}"
        )


def prefix_in_words(found: Iterable[str], missing: Iterable[str]) -> str:
    """Returns a sentence on a common prefix of all names of tensors, if they would be found without it.

    Args:
      found: Names of the tensors.
      missing: Missing names, of which at least one is found after the prefix.

    >>> prefix_in_words(["model.shared.weight", "model.lm_head.weight"], ["shared.weight"])
    " Every name begins with 'model.', which the model's own do not: save it without that."
    """
    names, wanted = sorted(found), tuple(f".{name}" for name in missing)
    match = next((name for name in names if name.endswith(wanted)), None)
    if not wanted or match is None:
        return ""
    prefix = next(match.removesuffix(name[1:]) for name in wanted if match.endswith(name))
    if not all(name.startswith(prefix) for name in names):
        return ""
    if prefix == _COMPILED:
        return (
            f" Every name begins with {prefix!r}: torch.compile puts that there. Save the model that was compiled, not "
            "what torch.compile made of it."
        )
    return f" Every name begins with {shortened(prefix)!r}, which the model's own do not: save it without that."


# Our name of the only matrix that is stored unchanged; all others are stored [out, in].
EMBEDDING = "token_embedder/embedding"
# The end of our names of matrices with a row for each value of the feed-forward layer; others have a column.
_BACK_TO_WIDTH = "mlp/wo/kernel"


def in_our_form(name: str, tensors: Sequence[Array]) -> Array:
    """Returns a parameter, still unread.

    Args:
      name: Our name of it.
      tensors: As transformers stores it: one, or those of all experts of a layer in order, of one shape.
    """
    if name == EMBEDDING or len(tensors) == 1:
        return tensors[0] if name == EMBEDDING else tensors[0].T
    # [out, in] of each -> [in, out] of all, whose experts are on the axis of the feed-forward layer's values.
    return stacked([each.T for each in tensors]) if name.endswith(_BACK_TO_WIDTH) else stacked(tensors).T


def in_their_form(name: str, array: Array, *, count: int) -> list[Array]:
    """Returns a parameter as transformers stores it; the reverse of `in_our_form`, with `count` tensors."""
    if name == EMBEDDING or count == 1:
        return [array if name == EMBEDDING else array.T]
    has_rows = name.endswith(_BACK_TO_WIDTH)
    by_expert = array if has_rows else array.T
    size = by_expert.shape[0] // count
    parts = [rows_of(by_expert, place * size, (place + 1) * size) for place in range(count)]
    return [part.T for part in parts] if has_rows else parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Described:
    """A model in transformers' description.

    Attributes:
      fields: Content of `config.json`, without the type of the weights.
      generation: Content of `generation_config.json`.
      names: transformers' names of the tensors of each parameter, by our names; several for experts.
    """

    fields: Mapping[str, Any]
    generation: Mapping[str, Any]
    names: Mapping[str, Sequence[str]]


def written_ends(end_ids: Sequence[int]) -> int | list[int]:
    """Returns `eos_token_id` for end-of-sequence ids: a single one is not put in a list, for older readers."""
    return end_ids[0] if len(end_ids) == 1 else list(end_ids)


# Settings with which transformers does not generate the most likely tokens, and their values that change nothing.
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
_STOPS = "stop_strings"
_KEPT_IDS = ("bos_token_id", "pad_token_id")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """A folder's settings for generation.

    Attributes:
      directory: The folder.
      config: Content of `config.json`.
      file: Content of `generation_config.json`; None if there is none.
    """

    directory: pathlib.Path
    config: Mapping[str, Any]
    file: Mapping[str, Any] | None

    def end_ids(self, default: int | None) -> tuple[tuple[int, ...], pathlib.Path]:
        """Returns the end-of-sequence ids, ascending, and the file that has them.

        Args:
          default: The id if neither file has one.

        Raises:
          CheckpointError: If they are not ids.
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
        """Returns the token that the decoder of an encoder-decoder model reads first, and the file that has it.

        Args:
          default: The id if neither file has one.

        Raises:
          CheckpointError: If it is not an id.
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
        """Returns a sentence on settings with which transformers takes other tokens than the likeliest, if any."""
        name, fields = ("config.json", self.config) if self.file is None else (GENERATION, self.file)
        found = [
            key
            for key, neutral in _NOT_FOLLOWED.items()
            if fields.get(key) is not None and not any(fields[key] == value for value in neutral)
        ]
        if not found:
            return ()
        return (
            f"{self.directory / name} sets {', '.join(found)}, which does not count here: every token is the most "
            "likely one.",
        )

    def facts(self) -> GenerationFacts:
        """Returns what is kept of these settings, without start and end, which a model's config has.

        Raises:
          CheckpointError: If `stop_strings` are not texts.
        """
        found = {key: self.value(key) for key in _KEPT_IDS}
        name, named = self._said(_STOPS)
        stops = [named] if isinstance(named, str) else named or []
        if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
            raise CheckpointError(
                f"{self.directory / name}: {_STOPS} is {shortened(repr(named))}; expected a list of texts, none empty."
            )
        return GenerationFacts(
            token_ids={key: index for key, index in found.items() if type(index) is int},
            stop_strings=tuple(dict.fromkeys(stops)),
        )

    def value(self, key: str) -> Any:
        """Returns the value of a key: that of `generation_config.json`, else that of `config.json`, else None."""
        return self._said(key)[1]

    def _said(self, key: str) -> tuple[str, Any]:
        """Returns the name of the file that counts for a key, and its value there."""
        if self.file is not None and self.file.get(key) is not None:
            return GENERATION, self.file[key]
        return "config.json", self.config.get(key)


def read_generation(directory: pathlib.Path, config: Mapping[str, Any]) -> Generation:
    """Returns a folder's settings for generation.

    Args:
      directory: The folder.
      config: Content of its `config.json`.

    Raises:
      CheckpointError: If `generation_config.json` exists and cannot be read.
    """
    path = directory / GENERATION
    return Generation(directory=directory, config=config, file=read_json(path) if path.is_file() else None)


EXITS = "calm_beam_exits.safetensors"
_CLASSIFIER = "decoder/meta_cls/kernel"


def without_exits(config: Any) -> Any:
    """Returns the config of a model without exit norms, exit heads and classifier."""
    return dataclasses.replace(config, exit_classifier=0, exit_norms=False, exit_heads=False)


def with_exits(directory: pathlib.Path, model: StoredModel, *, keeps: Callable[[str], bool]) -> StoredModel:
    """Returns a model with the content of the exits file next to it; the model itself if there is none.

    Args:
      directory: Folder of the model.
      model: The model in transformers' own files.
      keeps: Which arrays to read, by name.

    Raises:
      CheckpointError: If the file is damaged, or has other arrays.
      ValueError: If some exits lack parameters that others have.
    """
    path = directory / EXITS
    if not path.is_file():
        return model
    found = read_safetensors(path, keeps=keeps)
    shapes = {name: array.shape for name, array in found.items()}
    own = exit_fields(shapes, model.config.num_decoder_layers)
    classifier = shapes.get(_CLASSIFIER, (0,))[-1]
    config = dataclasses.replace(model.config, exit_classifier=classifier, **own)
    unknown = sorted(found.keys() - (parameter_shapes(config).keys() - parameter_shapes(model.config).keys()))
    if unknown:
        raise CheckpointError(f"{path}: unknown {shortened(unknown[0])}; expected norms and heads of exits.")
    return dataclasses.replace(
        model,
        config=config,
        arrays=StoredArrays({**model.arrays, **found}, (*model.arrays.stamps, *found.stamps)),
    )
