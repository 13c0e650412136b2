"""Rotary positions as `config.json` describes them: `rope_theta` and `rope_scaling`, or `rope_parameters`.

Version 5 of transformers writes the base among the parameters of the scaling; before, it stood beside them.
Source: transformers `modeling_rope_utils.py`, versions 4 and 5.
"""

import math
import pathlib
from collections.abc import Mapping
from typing import Any

from calm_beam.checkpoints.metadata import CheckpointError, shortened
from calm_beam.model.llama import ROPE_SCALINGS, LlamaConfig, RopeScaling

_ORIGINAL = "original_max_position_embeddings"
# Numbers that each kind must have, and those that it may have.
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
# What older files call kinds.
_OLDER = {"su": "longrope"}
_OPTIONAL = {
    "llama3": (_ORIGINAL,),
    "yarn": (_ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "longrope": (_ORIGINAL, "attention_factor"),
}
# What every kind may say, since it changes nothing.
_NEUTRAL = {"truncate": True}
_SHARE = "partial_rotary_factor"


def read_rope(
    path: pathlib.Path, fields: Mapping[str, Any], *, default: float, max_positions: int, turns_some: bool
) -> tuple[float, RopeScaling, float]:
    """Returns the base of the rotary frequencies, how they are stretched, and which share of a head is turned.

    Args:
      path: The `config.json`, for messages.
      fields: What it says.
      default: The base, if it says none.
      max_positions: Its `max_position_embeddings`, what a model was first trained on if nothing else is said.
      turns_some: Whether positions may turn a part of a head alone.

    Raises:
      CheckpointError: If the kind of scaling is not supported, a number is missing or wrong, or one is there that the
        kind does not have.
    """
    scaling = _parameters(path, fields)
    theta = _only(path, "rope_theta", scaling.pop("rope_theta", None), fields.get("rope_theta"))
    # The older name of the kind stands beside the newer one in some files, for older readers.
    older, kind = scaling.pop("type", None), scaling.pop("rope_type", None)
    kind = kind or older or "default"
    kind = _OLDER.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in ROPE_SCALINGS:
        raise CheckpointError(
            f"{path}: rope_type is {shortened(repr(kind))}; only {', '.join(ROPE_SCALINGS)} are supported."
        )
    share = _only(path, _SHARE, scaling.pop(_SHARE, None), fields.get(_SHARE))
    share = 1.0 if share is None else share
    if share != 1 and not (turns_some and type(share) is float and 0 < share < 1):
        expected = "a number above 0 and at most 1" if turns_some else "1.0"
        raise CheckpointError(f"{path}: {_SHARE} is {shortened(repr(share))}; only {expected} is supported.")
    for key, neutral in _NEUTRAL.items():
        value = scaling.pop(key, None)
        value = fields.get(key) if value is None else value
        if value not in (None, neutral):
            raise CheckpointError(f"{path}: {key} is {shortened(repr(value))}; only {neutral} is supported.")
    unknown = sorted(scaling.keys() - {*_NEEDED[kind], *_OPTIONAL.get(kind, ())})
    missing = [key for key in _NEEDED[kind] if key not in scaling]
    if unknown or missing:
        raise CheckpointError(
            f"{path}: rope_scaling of type {kind} has {shortened(', '.join(unknown)) or 'nothing'} that is unknown; "
            f"{', '.join(missing) or 'nothing'} is missing."
        )
    if _ORIGINAL in _OPTIONAL.get(kind, ()):
        original = _only(path, _ORIGINAL, scaling.pop(_ORIGINAL, None), fields.get(_ORIGINAL))
        scaling["original_max_positions"] = max_positions if original is None else original
    if kind == "yarn":
        scaling["attention_factor"] = _attention_factor(path, scaling)
    if kind == "longrope":
        _take_factors(path, scaling, max_positions=max_positions)
    return (default if theta is None else theta), RopeScaling(kind=kind, **scaling), share


def written_rope(config: LlamaConfig) -> tuple[float, dict[str, Any] | None]:
    """Returns `rope_theta` and `rope_scaling` of a model, in the form that versions 4 and 5 both read."""
    kind, scaling = config.rope_scaling.kind, config.rope_scaling
    if kind == "default":
        return config.rope_theta, None
    # YaRN's factor of cosines and sines is always said: what it is made of is not known here.
    said = [key for key in (*_NEEDED[kind], *_OPTIONAL.get(kind, ())) if hasattr(scaling, key)]
    written = {"rope_type": kind, **{key: getattr(scaling, key) for key in said}}
    if _ORIGINAL in _OPTIONAL.get(kind, ()):
        written[_ORIGINAL] = scaling.original_max_positions
    return config.rope_theta, written


def _parameters(path: pathlib.Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what is said about scaling, without what is null."""
    # An empty object says nothing; an empty list, false and "" are no objects.
    found = [fields[key] for key in ("rope_scaling", "rope_parameters") if fields.get(key) not in (None, {})]
    if any(not isinstance(each, dict) for each in found) or (len(found) == 2 and found[0] != found[1]):
        raise CheckpointError(
            f"{path}: rope_scaling is {shortened(repr(fields.get('rope_scaling')))} and rope_parameters "
            f"{shortened(repr(fields.get('rope_parameters')))}; expected one object, or two equal ones."
        )
    return {key: value for key, value in (found[0] if found else {}).items() if value is not None}


def _only(path: pathlib.Path, key: str, *said: Any) -> Any:
    """Returns the one value that is said in one or two places, or None."""
    values = [value for value in said if value is not None]
    if len(values) == 2 and values[0] != values[1]:
        raise CheckpointError(
            f"{path}: {key} is {shortened(values[0])} in one place and {shortened(values[1])} in another."
        )
    return values[0] if values else None


def _take_factors(path: pathlib.Path, scaling: dict[str, Any], *, max_positions: int) -> None:
    """Puts the factors up to the original positions in the place of what longrope is described by."""
    short, original = scaling.pop("short_factor"), scaling["original_max_positions"]
    del scaling["long_factor"]
    if not isinstance(short, list) or not all(type(value) in (int, float) for value in short):
        raise CheckpointError(f"{path}: short_factor is {shortened(repr(short))}; expected numbers.")
    scaling["pair_factors"] = tuple(map(float, short))
    if type(original) is not int or original < 2:
        raise CheckpointError(f"{path}: {_ORIGINAL} must be a whole number of at least 2, got {shortened(original)}.")
    stretched = max_positions / original
    if "attention_factor" not in scaling:
        more = math.log(stretched) / math.log(original) if stretched > 1 else 0.0
        scaling["attention_factor"] = math.sqrt(1 + more)


def _attention_factor(path: pathlib.Path, scaling: dict[str, Any]) -> float:
    """Takes what YaRN's factor of cosines and sines is made of out of the parameters, and returns it."""
    factor, given = scaling["factor"], scaling.pop("attention_factor", None)
    scales = [scaling.pop(key, None) for key in ("mscale", "mscale_all_dim")]
    for value in (factor, given, *scales):
        if value is not None and (type(value) not in (int, float) or not 0 < value < math.inf):
            raise CheckpointError(
                f"{path}: a number of rope_scaling is {shortened(repr(value))}; expected one above 0."
            )
    if given is not None:
        return float(given)
    if None in scales:
        scales = [1.0, 0.0]
    whole, part = (1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0 for scale in scales)
    return float(whole / part)
