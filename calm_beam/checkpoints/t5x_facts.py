"""What T5X's layouts leave out of a model, found out from the run's `config.gin`, the user, or T5 itself.

The arrays of two models with another activation, or another maximum distance of relative positions, look alike.
Source: T5X `gin_utils.py` (`config.gin`), `examples/t5/layers.py` and `examples/scalable_t5/layers.py` (names of
activations are Flax's), Flaxformer `relative_position_biases.py` and `dense.py`.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from calm_beam.model import T5Config, default_activation

from .declared import Declared
from .error import CheckpointError
from .gin import GinBindings
from .metadata import shortened

# What T5X calls the file, in the folder of a run.
GIN_FILE = "config.gin"

_ACTIVATIONS = ("T5Config.mlp_activations", "MlpBlock.activations")
_MAX_DISTANCES = ("RelativePositionBiases.max_distance",)
# What would be computed in another way than here, and what it is here.
_FIXED = {
    "MultiHeadDotProductAttention.rescale_logits": False,
    "MultiHeadDotProductAttention.use_rotary_embedding": False,
    "T5LayerNorm.epsilon": 1e-6,
}
# Flax has two names for one function.
_OURS = {"gelu": "gelu", "silu": "silu", "swish": "silu", "relu": "relu"}
_THEIRS = {"gelu": "gelu", "silu": "swish", "relu": "relu"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known about a model beside its arrays.

    Attributes:
      activation: Of `T5Config`.
      relative_max_distance: The same.
      stated: Sentences on what a file or the user says, and which.
      assumed: Sentences on what nobody says, and why it is taken for true.
    """

    activation: str
    relative_max_distance: int
    stated: tuple[str, ...]
    assumed: tuple[str, ...]


def find_facts(folders: tuple[pathlib.Path, ...], declared: Declared, *, gated_mlp: bool) -> Facts:
    """Returns what a model in T5X's layout or Orbax's computes.

    Args:
      folders: Where a `config.gin` may be; the first that has one counts.
      declared: What the user says.
      gated_mlp: Whether the arrays are those of a gated feed-forward layer.

    Raises:
      CheckpointError: If `config.gin` cannot be read, describes a model that is not supported or not this one, or
        contradicts the user.
    """
    path = next((folder / GIN_FILE for folder in folders if (folder / GIN_FILE).is_file()), None)
    activation, max_distance = (None, None) if path is None else _read_facts(path, gated_mlp=gated_mlp)
    declared.check(activation=activation, relative_max_distance=max_distance, source=str(path))
    why = f"there is no {GIN_FILE} in {' or '.join(map(str, folders))}" if path is None else f"{path} does not say"
    stated: list[str] = []
    assumed: dict[str, Any] = {}

    def choose(name: str, *, by_file: Any, by_user: Any, by_t5: Any) -> Any:
        if by_file is not None:
            stated.append(f"{name} is {by_file}: {path} says so.")
            return by_file
        if by_user is not None:
            stated.append(f"{name} is {by_user}: you said so.")
            return by_user
        assumed[name] = by_t5
        return by_t5

    return Facts(
        activation=choose(
            "Activation",
            by_file=activation,
            by_user=declared.activation,
            by_t5=default_activation(gated_mlp=gated_mlp),
        ),
        relative_max_distance=choose(
            "Relative max distance",
            by_file=max_distance,
            by_user=declared.relative_max_distance,
            by_t5=T5Config.relative_max_distance,
        ),
        stated=tuple(stated),
        assumed=(_assumed_in_words(assumed, why=why),) if assumed else (),
    )


def _assumed_in_words(assumed: Mapping[str, Any], *, why: str) -> str:
    """Returns one sentence on all that is taken to be as in T5, by name, and how to say otherwise."""
    named = ", and ".join(f"{name.lower()} is assumed to be {value}" for name, value in assumed.items())
    flags = " and ".join(f"--{name.lower().replace(' ', '_')}" for name in assumed)
    return f"{named[:1].upper()}{named[1:]}, as in T5: {why}. If that is not so, pass {flags}."


def gin_text(config: T5Config) -> str:
    """Returns a `config.gin` that says what the arrays of a model do not show."""
    activations = (_THEIRS[config.activation], *(["linear"] if config.gated_mlp else []))
    return (
        "# What the arrays of this model do not show. T5X takes it from the gin files of a run, calm-beam from here.\n"
        f"network.T5Config.mlp_activations = {activations}\n"
        f"relative_position_biases.RelativePositionBiases.max_distance = {config.relative_max_distance}\n"
    )


def _read_facts(path: pathlib.Path, *, gated_mlp: bool) -> tuple[str | None, int | None]:
    """Returns activation and maximum distance as a `config.gin` has them, each None if it does not name it."""
    bindings = GinBindings(path)
    for parameter, expected in _FIXED.items():
        for name, value in bindings.values(parameter).items():
            if value not in (None, expected):
                raise CheckpointError(f"{path}: {name} is {shortened(repr(value))}; only {expected} is supported.")
    chosen = {
        name: _activation(path, name, value=value, gated_mlp=gated_mlp)
        for name, value in bindings.values(*_ACTIVATIONS).items()
    }
    distances = bindings.values(*_MAX_DISTANCES)
    for name, value in distances.items():
        if type(value) is not int:
            raise CheckpointError(f"{path}: {name} is {shortened(repr(value))}, expected a whole number.")
    return _only(path, chosen), _only(path, distances)


def _activation(path: pathlib.Path, name: str, *, value: Any, gated_mlp: bool) -> str:
    """Returns our name of an activation, given what T5X has for each input kernel, such as `('gelu', 'linear')`."""
    names = list(value) if isinstance(value, tuple | list) else [value]
    is_known = all(isinstance(each, str) for each in names) and names[0:1] and names[0] in _OURS
    if not is_known or names[1:] not in ([], ["linear"]):
        raise CheckpointError(
            f"{path}: {name} is {shortened(repr(value))}; only {', '.join(_OURS)} are supported, each alone or gated: "
            "('gelu', 'linear')."
        )
    if (len(names) == 2) != gated_mlp:
        found = "wi_0 and wi_1" if gated_mlp else "wi alone"
        raise CheckpointError(
            f"{path}: {name} is {value!r}, but the feed-forward layers have {found}. The file is of another model: "
            "move it away and pass activation and relative_max_distance yourself."
        )
    return _OURS[names[0]]


def _only(path: pathlib.Path, values: dict[str, Any]) -> Any:
    """Returns the one value of several bindings."""
    if len(set(values.values())) > 1:
        said = ", ".join(f"{name} {value}" for name, value in values.items())
        raise CheckpointError(f"{path}: says {shortened(said)}; only one for the whole model is supported.")
    return next(iter(values.values()), None)
