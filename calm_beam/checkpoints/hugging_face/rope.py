"""Rotary positions in `config.json`: `rope_theta` and `rope_scaling`, or `rope_parameters`.

Version 5 of transformers writes the base among the scaling parameters; earlier versions write it separately.
Source: transformers `modeling_rope_utils.py`, versions 4 and 5.
"""

import math
import pathlib
from collections.abc import Mapping
from typing import Any

from calm_beam.checkpoints.metadata import CheckpointError, shortened
from calm_beam.model.llama import ROPE_SCALINGS, LlamaConfig, RopeScaling

_ORIGINAL = "original_max_position_embeddings"
# Numbers that each kind must have, and further ones that it may have.
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
# Older names of kinds.
_OLDER = {"su": "longrope"}
_OPTIONAL = {
    "llama3": (_ORIGINAL,),
    "yarn": (_ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "longrope": (_ORIGINAL, "attention_factor"),
}
# Values that every kind may have, since they change nothing.
_NEUTRAL = {"truncate": True}
_SHARE = "partial_rotary_factor"


def read_rope(
    path: pathlib.Path, fields: Mapping[str, Any], *, default: float, max_positions: int, turns_some: bool
) -> tuple[float, RopeScaling, float]:
    """Returns the base of the rotary frequencies, their scaling, and the share of a head that is rotated.

    Args:
      path: The `config.json`, for messages.
      fields: Its content.
      default: The base, if it has none.
      max_positions: Its `max_position_embeddings`, by default the length of the first training.
      turns_some: Whether only a part of a head may be rotated.

    Raises:
      CheckpointError: If the kind of scaling is not supported, or a number is missing, wrong, or not one of that
        kind.
    """
    scaling = _parameters(path, fields)
    theta = _only(path, "rope_theta", scaling.pop("rope_theta", None), fields.get("rope_theta"))
    # Some files have the older key for the kind in addition to the newer one, for older readers.
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
    """Returns `rope_theta` and `rope_scaling` of a model, in a form that versions 4 and 5 both read."""
    kind, scaling = config.rope_scaling.kind, config.rope_scaling
    if kind == "default":
        return config.rope_theta, None
    # YaRN's attention factor is always written, since the numbers it was derived from are not known here.
    said = [key for key in (*_NEEDED[kind], *_OPTIONAL.get(kind, ())) if hasattr(scaling, key)]
    written = {"rope_type": kind, **{key: getattr(scaling, key) for key in said}}
    if _ORIGINAL in _OPTIONAL.get(kind, ()):
        written[_ORIGINAL] = scaling.original_max_positions
    return config.rope_theta, written


def _parameters(path: pathlib.Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the scaling parameters that are not null."""
    # An empty object counts as missing; an empty list, false and "" are not objects.
    found = [fields[key] for key in ("rope_scaling", "rope_parameters") if fields.get(key) not in (None, {})]
    if any(not isinstance(each, dict) for each in found) or (len(found) == 2 and found[0] != found[1]):
        raise CheckpointError(
            f"{path}: rope_scaling is {shortened(repr(fields.get('rope_scaling')))} and rope_parameters "
            f"{shortened(repr(fields.get('rope_parameters')))}; expected one object, or two equal ones."
        )
    return {key: value for key, value in (found[0] if found else {}).items() if value is not None}


def _only(path: pathlib.Path, key: str, *said: Any) -> Any:
    """Returns the one value that one or two places have, or None."""
    values = [value for value in said if value is not None]
    if len(values) == 2 and values[0] != values[1]:
        raise CheckpointError(
            f"{path}: {key} is {shortened(values[0])} in one place and {shortened(values[1])} in another."
        )
    return values[0] if values else None


def _take_factors(path: pathlib.Path, scaling: dict[str, Any], *, max_positions: int) -> None:
    """Replaces longrope's parameters by the factors up to the original positions."""
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
    """Removes the parameters of YaRN's attention factor, and returns the factor."""
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
