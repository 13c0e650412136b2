"""Models in a single GGUF file, as llama.cpp runs them: weights of any type that the package `gguf` dequantises.

Source: llama.cpp `gguf-py/gguf/constants.py` and `tensor_mapping.py` for names, `convert_hf_to_gguf.py` for the
changes to tensors on conversion, `src/llama-model.cpp` for the computation.
"""

import dataclasses
import math
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

# Registers the name bfloat16 with numpy.
import ml_dtypes  # noqa: F401
import numpy as np

from calm_beam.extras import imported
from calm_beam.model.llama import LlamaConfig, RopeScaling, parameter_shapes

from .checkpoint import GenerationFacts, StoredModel
from .metadata import CheckpointError, check_is_file, check_memory, shortened
from .rearranged import changed, turned
from .stored_array import Array, FileStamp, Slices, StoredArray, StoredArrays, rows_of

SUFFIX = ".gguf"
_EXTRA, _NEEDED_FOR = "gguf", "reading GGUF"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """The properties of one `general.architecture`.

    Attributes:
      neighbours: Whether rotary positions rotate neighbouring values together, as in llama.cpp's Llama.
      settled: Fields of `LlamaConfig` with fixed values.
      norm_offset: Number that conversion added to the scales of norms.
      window_pattern: Every n-th layer has no window, unless the file says otherwise; None without windows.
      local_theta: Base of the rotary frequencies in layers with a window, unless the file gives one; None for the same
        base in all layers.
      numbers: Metadata keys of further numbers, by fields of `LlamaConfig`.
      turned_pattern: Every n-th layer has no rotary positions; None if all layers have them.
      widest_depth: Depth of the one size whose queries are divided by the root of width / number of heads.
      turns_by_flag: Whether `rope.scaling.finetuned` = false turns rotary positions off.
      turns_some: Whether rotary positions may turn only a part of each head, and be scaled by tables of factors
        (longrope).
      has_window: Whether `attention.sliding_window` is needed: a window in all layers, unless it is 0.
      sublayers: Names of sub-layers in GGUF that differ from the usual ones. Sub-layers of one name are stored in one
        tensor, one after another in its rows, in the order of `parameter_shapes`.
    """

    neighbours: bool = False
    settled: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    norm_offset: float = 0.0
    window_pattern: int | None = None
    local_theta: float | None = None
    numbers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    turned_pattern: int | None = None
    widest_depth: int | None = None
    turns_by_flag: bool = False
    turns_some: bool = False
    has_window: bool = False
    sublayers: Mapping[str, str] = dataclasses.field(default_factory=dict)


FAMILIES = {
    # Mistral and SmolLM use this name, too.
    "llama": Family(neighbours=True),
    "qwen2": Family(),
    "qwen3": Family(),
    "gemma": Family(
        settled={"scaled_embedding": True, "unit_offset_norms": True, "activation": "gelu"}, norm_offset=1.0
    ),
    "gemma2": Family(
        settled={"scaled_embedding": True, "unit_offset_norms": True, "activation": "gelu", "post_norms": True},
        norm_offset=1.0,
        window_pattern=2,
        numbers={"attention_cap": "attn_logit_softcapping", "logits_cap": "final_logit_softcapping"},
        widest_depth=46,
    ),
    "gemma3": Family(
        settled={"scaled_embedding": True, "unit_offset_norms": True, "activation": "gelu", "post_norms": True},
        norm_offset=1.0,
        window_pattern=6,
        local_theta=10_000.0,
        widest_depth=62,
    ),
    "olmo2": Family(settled={"pre_norms": False, "post_norms": True, "whole_norms": True}),
    "granite": Family(
        neighbours=True,
        numbers={
            "embedding_factor": "embedding_scale",
            "residual_factor": "residual_scale",
            "query_factor": "attention.scale",
            "logits_divisor": "logit_scale",
        },
        turns_by_flag=True,
    ),
    "smollm3": Family(neighbours=True, turned_pattern=4),
    "phi3": Family(
        turns_some=True,
        has_window=True,
        sublayers={
            **{f"self_attention/{name}": "attn_qkv" for name in ("query", "key", "value")},
            "mlp/wi_0": "ffn_up",
        },
    ),
}

# Keys of an architecture that are read, and keys that do not matter here.
_READ = {
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
_WINDOW, _PATTERN, _LOCAL_THETA = "attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"
_TURNS, _ATTENTION_FACTOR = "rope.scaling.finetuned", "rope.scaling.attn_factor"
_IGNORED = {"vocab_size", _TURNS, "leading_dense_block_count"}
_THETA = 10_000.0

_OUTSIDE_OF_LAYERS = {
    "token_embedder/embedding": "token_embd.weight",
    "decoder/decoder_norm/scale": "output_norm.weight",
    "decoder/logits_dense/kernel": "output.weight",
}
_IN_LAYER = re.compile(r"decoder/layers_(\d+)/(.+?)(?:/(?:kernel|scale|(bias)))")
_SUBLAYERS = {
    "pre_self_attention_layer_norm": "attn_norm",
    "self_attention/query": "attn_q",
    "self_attention/key": "attn_k",
    "self_attention/value": "attn_v",
    "self_attention/out": "attn_output",
    "self_attention/query_norm": "attn_q_norm",
    "self_attention/key_norm": "attn_k_norm",
    "pre_mlp_layer_norm": "ffn_norm",
    "post_self_attention_layer_norm": "post_attention_norm",
    "post_mlp_layer_norm": "post_ffw_norm",
    "mlp/wi_0": "ffn_gate",
    "mlp/wi_1": "ffn_up",
    "mlp/wo": "ffn_down",
}
_TURNED = re.compile(r"decoder/layers_\d+/self_attention/(?:query|key)/(?:kernel|bias)")
# Divisors of the rotary frequencies in Llama 3.1 and its relatives, one number for each pair.
_FREQUENCIES = "rope_freqs.weight"
# Divisors up to the original positions, and beyond them.
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class GGUFFile:
    """The metadata and the unread tensors of a file.

    Attributes:
      path: The file.
      tensors: Arrays by their names in the file, [out, in].
      stamp: Stamp of the file, taken before it was opened.
    """

    def __init__(self, path: pathlib.Path) -> None:
        """Opens a file.

        Raises:
          CheckpointError: If it is damaged, is a part of several, or has a tensor type that `gguf` cannot read.
          MissingExtraError: If `gguf` is not installed.
        """
        gguf = imported("gguf", extra=_EXTRA, needed_for=_NEEDED_FOR)
        check_is_file(path, failed="cannot be read as GGUF")
        self.path, self.stamp = path, FileStamp.of(path)
        try:
            reader = gguf.GGUFReader(path)
            self._fields = dict(reader.fields)
            found = list(reader.tensors)
        # Damaged files raise errors of several types.
        except Exception as error:
            raise CheckpointError(f"{path}: cannot be read as GGUF: {shortened(error)}") from error
        parts = self.value("split.count", default=1)
        if parts not in (0, 1):
            raise CheckpointError(f"{path}: is one of {parts} parts; merge them (llama-gguf-split --merge).")
        self.tensors = {tensor.name: self._array(gguf, tensor) for tensor in found}
        check_memory({name: tensor.shape for name, tensor in self.tensors.items()})

    def value(self, key: str, *, default: Any = None) -> Any:
        """Returns the metadata's value for a key: a number, a text, or a list of either."""
        field = self._fields.get(key)
        if field is None:
            return default
        try:
            return field.contents()
        except Exception as error:
            raise CheckpointError(f"{self.path}: {key} cannot be read: {shortened(error)}") from error

    def keys(self, prefix: str) -> list[str]:
        """Returns the keys that begin with a prefix, without the prefix."""
        return [key.removeprefix(prefix) for key in self._fields if key.startswith(prefix)]

    def _array(self, gguf: Any, tensor: Any) -> StoredArray:
        kind = tensor.tensor_type.name
        shape = tuple(int(size) for size in reversed(tensor.shape.tolist()))
        try:
            # The only way to find out whether a type is supported is to read a row.
            gguf.dequantize(tensor.data[:1], tensor.tensor_type)
        except (KeyError, NotImplementedError) as error:
            raise CheckpointError(
                f"{self.path}: {shortened(tensor.name)} is of type {kind}, which the package gguf does not read."
            ) from error

        def read(slices: Slices) -> np.ndarray:
            rows = gguf.dequantize(np.ascontiguousarray(tensor.data[slices[0]]), tensor.tensor_type)
            values: np.ndarray = rows.reshape(-1, *shape[1:])[(slice(None), *slices[1:])]
            return values

        return StoredArray(shape, np.dtype(_FLOATS.get(kind, "float32")), read=read, chunk=(1, *shape[1:]))


def read_gguf(path: pathlib.Path, *, keeps: Callable[[str], bool]) -> StoredModel:
    """Returns the model in a GGUF file, with its weights as float32 whatever their stored type.

    Args:
      path: The file.
      keeps: Which tensors to read, by name.

    Raises:
      CheckpointError: If the file is damaged, or the model is of another family, or its computation is unsupported.
      MissingExtraError: If `gguf` is not installed.
    """
    file = GGUFFile(path)
    name = file.value("general.architecture")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise CheckpointError(
            f"{path}: general.architecture is {shortened(repr(name))}; expected one of "
            f"{', '.join(map(repr, FAMILIES))}."
        )
    tensors: dict[str, Array] = {each: tensor for each, tensor in file.tensors.items() if keeps(each)}
    of_positions = (_SHORT, _LONG) if family.turns_some else (_FREQUENCIES,)
    tables = {each: tensors.pop(each) for each in of_positions if each in tensors}
    end_ids = _end_ids(file)
    try:
        config = _config(file, name, family=family, tensors=tensors, tables=tables, end_ids=end_ids)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    names = {ours: _their_name(ours, family) for ours in parameter_shapes(config)}
    missing, unknown = sorted(set(names.values()) - tensors.keys()), sorted(tensors.keys() - set(names.values()))
    if missing or unknown:
        raise CheckpointError(
            f"{path}: tensors are not those of the {name} in its metadata; missing "
            f"{', '.join(missing[:4]) or 'none'} ({len(missing)}), unknown {', '.join(unknown[:4]) or 'none'} "
            f"({len(unknown)})."
        )
    parts = _parts(path, tensors, names=names, config=config)
    kinds = sorted({str(tensor.stored_dtype) for tensor in file.tensors.values()})
    return StoredModel(
        config=config,
        arrays=StoredArrays(
            {ours: _ours(ours, part, config=config, family=family) for ours, part in parts.items()},
            [file.stamp],
        ),
        stated=(
            f"Weights are dequantised to float32 ({', '.join(kinds)}): {path} holds what it was rounded to.",
            f"Outputs end with token {' or '.join(map(str, end_ids))}: {path} says so.",
        ),
        generation=GenerationFacts(token_ids=_kept_ids(file)),
    )


def _config(
    file: GGUFFile,
    name: str,
    *,
    family: Family,
    tensors: Mapping[str, Array],
    tables: Mapping[str, Array],
    end_ids: tuple[int, ...],
) -> LlamaConfig:
    path, prefix = file.path, f"{name}."
    _check_keys(file, prefix, family=family, tables=tables)

    def whole(key: str, default: int | None = None) -> int:
        value = file.value(prefix + key, default=default)
        if type(value) is not int or value < 1:
            raise CheckpointError(
                f"{path}: {prefix}{key} must be a whole number of at least 1, got {shortened(repr(value))}."
            )
        return value

    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{path}: token_embd.weight is missing, the embedding.")
    heads, width = whole("attention.head_count"), whole("embedding_length")
    head_dim = whole("attention.key_length", width // heads)
    turned_dim = whole("rope.dimension_count", head_dim)
    for key in ("attention.value_length", "rope.dimension_count"):
        may_be_less = family.turns_some and key == "rope.dimension_count" and turned_dim < head_dim
        if whole(key, head_dim) != head_dim and not may_be_less:
            raise CheckpointError(f"{path}: {prefix}{key} is {whole(key)}; only {head_dim} is supported, as of keys.")
    theta = file.value(f"{prefix}rope.freq_base", default=_THETA)
    depth = whole("block_count")
    numbers: dict[str, Any] = {ours: _number(file, prefix + key) for ours, key in family.numbers.items()}
    if depth == family.widest_depth:
        numbers["query_factor"] = (width // heads) ** -0.5
    if np.float32(numbers.get("query_factor", 0)) == np.float32(head_dim**-0.5):
        # The other families' value.
        del numbers["query_factor"]
    scaling = _scaling(file, prefix, theta=theta, head_dim=head_dim, tables=tables)
    return LlamaConfig(
        vocab_size=tensors["token_embd.weight"].shape[0],
        emb_dim=width,
        num_heads=heads,
        num_kv_heads=whole("attention.head_count_kv", heads),
        head_dim=head_dim,
        mlp_dim=whole("feed_forward_length"),
        num_decoder_layers=depth,
        norm_epsilon=file.value(f"{prefix}attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=_positions(whole("context_length"), scaling),
        end_ids=end_ids,
        attention_bias="blk.0.attn_q.bias" in tensors,
        query_key_norms="blk.0.attn_q_norm.weight" in tensors,
        tied_head="output.weight" not in tensors,
        turned_dim=None if turned_dim == head_dim else turned_dim,
        **_kinds_of_layers(file, prefix, family=family, depth=depth),
        **numbers,
        **family.settled,
    )


def _check_keys(file: GGUFFile, prefix: str, *, family: Family, tables: Mapping[str, Array]) -> None:
    """Refuses metadata of an architecture that are not read."""
    known = _READ | _IGNORED | set(family.numbers.values())
    if family.window_pattern is not None:
        known |= {_WINDOW, _PATTERN} | ({_LOCAL_THETA} if family.local_theta is not None else set())
    if family.has_window:
        known |= {_WINDOW}
    if _SHORT in tables:
        known |= {_ATTENTION_FACTOR}
    for key in file.keys(prefix):
        value = file.value(prefix + key)
        is_off = family.turns_by_flag and key == _TURNS and not value
        if is_off or (key not in known and value not in (0, False, None)):
            raise CheckpointError(f"{file.path}: {prefix}{key} is {shortened(repr(value))}; that is not supported.")


def _kinds_of_layers(file: GGUFFile, prefix: str, *, family: Family, depth: int) -> dict[str, Any]:
    """Returns the fields on layers that differ: with a window, of which size, or with other rotary positions."""
    kinds: dict[str, Any] = {}
    if family.turned_pattern is not None:
        kinds["unturned_layers"] = tuple(range(family.turned_pattern - 1, depth, family.turned_pattern))
    windowed = _windowed_layers(file, prefix, family=family, depth=depth)
    if windowed:
        kinds |= {"sliding_window": file.value(prefix + _WINDOW), "windowed_layers": windowed}
        kinds["local_rope_theta"] = file.value(prefix + _LOCAL_THETA, default=family.local_theta)
    return kinds


def _windowed_layers(file: GGUFFile, prefix: str, *, family: Family, depth: int) -> tuple[int, ...]:
    """Returns the layers with a window: all, those in a list, or all except every n-th."""
    if family.has_window:
        if file.value(prefix + _WINDOW) is None:
            raise CheckpointError(
                f"{file.path}: {prefix}{_WINDOW} is missing; expected how many keys a position sees, or 0 "
                "for all. Older converters did not write it: convert the model again."
            )
        return tuple(range(depth)) if file.value(prefix + _WINDOW) else ()
    if family.window_pattern is None or not file.value(prefix + _WINDOW):
        return ()
    pattern = file.value(prefix + _PATTERN, default=family.window_pattern)
    if type(pattern) is int and pattern > 0:
        return tuple(index for index in range(depth) if (index + 1) % pattern != 0)
    if isinstance(pattern, list) and len(pattern) == depth and all(each in (0, 1) for each in pattern):
        return tuple(index for index, has_window in enumerate(pattern) if has_window)
    raise CheckpointError(
        f"{file.path}: {prefix}{_PATTERN} is {shortened(repr(pattern))}; expected a whole number, or a flag for each "
        f"of {depth} layers."
    )


def _positions(context: int, scaling: RopeScaling) -> int:
    """Returns the number of positions of a model."""
    if scaling.kind == "longrope":
        # With more, all positions of a prompt would use other factors.
        return min(context, scaling.original_max_positions)
    return max(context, int(scaling.factor * scaling.original_max_positions))


def _number(file: GGUFFile, key: str) -> float:
    """Returns a number that an architecture must have."""
    value = file.value(key)
    if type(value) not in (int, float):
        raise CheckpointError(f"{file.path}: {key} must be a number, got {shortened(repr(value))}.")
    return float(value)


def _scaling(file: GGUFFile, prefix: str, *, theta: float, head_dim: int, tables: Mapping[str, Array]) -> RopeScaling:
    """Returns the scaling of rotary positions, from the metadata or from a table of factors."""
    kind = file.value(f"{prefix}rope.scaling.type", default="none")
    factor = file.value(f"{prefix}rope.scaling.factor", default=1.0)
    if _FREQUENCIES in tables:
        return _of_table(file.path, np.asarray(tables[_FREQUENCIES]), theta=theta, head_dim=head_dim)
    if tables:
        missing = [name for name in (_SHORT, _LONG) if name not in tables]
        if missing or kind not in ("none", "longrope") or factor not in (0, 1):
            raise CheckpointError(
                f"{file.path}: {prefix}rope.scaling.type is {shortened(repr(kind))}, with factor {shortened(factor)} "
                f"and {' and '.join(tables)}; expected longrope or none, no factor, and both {_SHORT} and {_LONG}."
            )
        return RopeScaling(
            kind="longrope",
            original_max_positions=file.value(f"{prefix}rope.scaling.original_context_length"),
            pair_factors=tuple(np.asarray(tables[_SHORT]).tolist()),
            attention_factor=_number(file, prefix + _ATTENTION_FACTOR),
        )
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if kind == "yarn":
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original_max_positions=file.value(f"{prefix}rope.scaling.original_context_length"),
            beta_fast=file.value(f"{prefix}rope.scaling.yarn_beta_fast", default=32.0),
            beta_slow=file.value(f"{prefix}rope.scaling.yarn_beta_slow", default=1.0),
            attention_factor=1.0 + 0.1 * math.log(factor),
        )
    raise CheckpointError(
        f"{file.path}: {prefix}rope.scaling.type is {shortened(repr(kind))}; only none, linear and yarn are supported."
    )


def _of_table(path: pathlib.Path, found: np.ndarray, *, theta: float, head_dim: int) -> RopeScaling:
    """Returns the scaling for a table of factors, if it is that of Llama 3.1 and its relatives."""
    scaling = RopeScaling(kind="llama3", factor=max(1.0, float(found.max())), original_max_positions=8192)
    plain = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    rotations = scaling.original_max_positions * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    stays = np.clip((rotations - low) / (high - low), 0, 1)
    expected = 1 / (stays + (1 - stays) / scaling.factor)
    if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-5, atol=0):
        raise CheckpointError(
            f"{path}: {_FREQUENCIES} divides rotary frequencies in another way than Llama 3.1 does; that is not "
            "supported."
        )
    return scaling


def _end_ids(file: GGUFFile) -> tuple[int, ...]:
    named = [file.value(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ids = tuple(sorted({index for index in named if index is not None}))
    if not ids:
        raise CheckpointError(f"{file.path}: no tokenizer.ggml.eos_token_id, the token that ends an output.")
    return ids


def _kept_ids(file: GGUFFile) -> dict[str, int]:
    """Returns the ids of the beginning and of padding, by transformers' keys, of those that the file has."""
    named = {"bos_token_id": "bos", "pad_token_id": "padding"}
    found = {ours: file.value(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in named.items()}
    return {key: index for key, index in found.items() if type(index) is int}


def _parts(
    path: pathlib.Path, tensors: Mapping[str, Array], *, names: Mapping[str, str], config: LlamaConfig
) -> dict[str, Array]:
    """Returns each parameter's tensor, or its rows of a tensor that holds several; all still unread."""
    sharing: dict[str, list[str]] = {}
    for ours, theirs in names.items():
        sharing.setdefault(theirs, []).append(ours)
    shapes = parameter_shapes(config)
    parts: dict[str, Array] = {}
    for theirs, together in sharing.items():
        tensor = tensors[theirs]
        if len(together) == 1:
            parts[together[0]] = tensor
            continue
        ends = np.cumsum([shapes[ours][-1] for ours in together]).tolist()
        if tensor.shape[:1] != (ends[-1],):
            raise CheckpointError(
                f"{path}: {theirs} has shape {tensor.shape}, expected {ends[-1]} rows: {' and '.join(together)}."
            )
        for ours, first, end in zip(together, [0, *ends], ends, strict=False):
            parts[ours] = rows_of(tensor, first, end)
    return parts


def _ours(name: str, tensor: Array, *, config: LlamaConfig, family: Family) -> Array:
    """Returns a parameter in our form: kernels [in, out], heads in halves, norm scales without the added offset."""
    if name == "token_embedder/embedding":
        return tensor
    if family.neighbours and _TURNED.fullmatch(name):
        return changed(tensor.T, turned(config.head_dim, scale=np.float32(1), neighbours=True))
    if family.norm_offset and name.endswith("/scale"):
        return changed(tensor, lambda values: values - np.float32(family.norm_offset))
    return tensor.T


def _their_name(name: str, family: Family) -> str:
    """Returns the name in GGUF of the tensor that holds a parameter.

    >>> _their_name("decoder/layers_3/mlp/wo/kernel", FAMILIES["llama"])
    'blk.3.ffn_down.weight'
    >>> _their_name("decoder/layers_3/self_attention/key/kernel", FAMILIES["phi3"])
    'blk.3.attn_qkv.weight'
    """
    if name in _OUTSIDE_OF_LAYERS:
        return _OUTSIDE_OF_LAYERS[name]
    match = _IN_LAYER.fullmatch(name)
    assert match is not None, name
    index, sublayer, bias = match.groups()
    theirs = {**_SUBLAYERS, **family.sublayers}[sublayer]
    return f"blk.{index}.{theirs}.{bias or 'weight'}"
