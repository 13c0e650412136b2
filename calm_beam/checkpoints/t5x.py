"""The layout that T5X's `Checkpointer` writes: one msgpack file, and one zarr array per parameter.

`checkpoint_<step>/checkpoint` holds the tree; its leaves are either small arrays or TensorStore specs whose path is
relative to the folder. Only the `target` tree (the weights) is read or written, never an optimizer's state: T5X infers
without it, and with `fallback_to_scratch` fine-tunes from the weights alone. T5X itself is not needed.

Two models with different activations or maximum distances of relative positions have arrays of the same form. Facts
that T5X's layouts leave out are taken from the run's `config.gin`, from the user, or from T5's defaults. T5X writes the
configuration of a run to `config.gin` in its folder. Only bindings of literals are read, and macros in them; nothing is
imported or run.
Source: T5X `checkpoints.py` (version 3 of its format) and `train_state.py` (`InferenceState`); `gin_utils.py`
(`config.gin`), `examples/t5/layers.py` and `examples/scalable_t5/layers.py` (names of activations are Flax's);
Flaxformer `relative_position_biases.py` and `dense.py`; gin-config's syntax (scopes, macros, blocks).
"""

import ast
import dataclasses
import io
import os
import pathlib
import shutil
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from calm_beam.model import T5Config, default_activation
from calm_beam.storage import replacing

from .checkpoint import Arrays, Config, Declared, stored_architecture
from .metadata import CheckpointError, read_text, read_whole, shortened
from .model_folder import write_vocabulary
from .orbax import read_arrays
from .rearranged import split_heads
from .stored_array import StoredArrays

# Values are short, but nested macros could make them long.
_MOST_TOKENS, _MOST_MACROS = 500, 50

Tokens = Sequence[tokenize.TokenInfo]


class GinBindings:
    """The bindings of a gin file; values are parsed on demand."""

    def __init__(self, path: pathlib.Path) -> None:
        """Reads a file.

        Args:
          path: A file such as T5X's `config.gin`.

        Raises:
          CheckpointError: If it is not a text in gin's syntax.
        """
        self.path = path
        try:
            # A later binding of the same parameter wins, as in gin.
            text = read_text(path)
            if "\0" in text:
                # Python versions treat NUL differently.
                raise SyntaxError("it holds NUL characters")
            self._bindings = dict(_bindings(text))
        except (tokenize.TokenError, SyntaxError) as error:
            raise CheckpointError(
                f"{path}: cannot be read as a gin file ({error.args[0]}). Fix it, or move it away and pass activation "
                "and relative_max_distance yourself."
            ) from error

    def values(self, *parameters: str) -> dict[str, Any]:
        """Returns all values that are bound to parameters, by the full names of their bindings.

        Args:
          parameters: Names such as `T5Config.mlp_activations`, without modules and scopes.

        Raises:
          CheckpointError: If a value is not a literal, or contains a macro that is not.
        """
        chosen = {
            name: tokens
            for name, tokens in self._bindings.items()
            if ".".join(name.rpartition("/")[2].split(".")[-2:]) in parameters
        }
        return {name: self._value(name, tokens) for name, tokens in chosen.items()}

    def _value(self, name: str, tokens: Tokens) -> Any:
        texts = list(self._expanded(name, tokens, macros=()))
        try:
            return ast.literal_eval(" ".join(texts))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise CheckpointError(
                f"{self.path}: the value of {name} is not a literal. Write it out there, or move the file away and "
                "pass activation and relative_max_distance yourself."
            ) from error

    def _expanded(self, name: str, tokens: Tokens, *, macros: tuple[str, ...]) -> Iterator[str]:
        """Yields the texts of a value's tokens, with macros replaced by theirs."""
        if len(macros) > _MOST_MACROS:
            raise self._too_long(name)
        remaining = iter(tokens)
        length = 0
        for token in remaining:
            expanded = [token.string]
            if token.string == "%":
                macro = next(remaining, token).string
                if macro in macros or macro not in self._bindings:
                    raise CheckpointError(f"{self.path}: {name} is %{macro}, of which the file does not say the value.")
                expanded = list(self._expanded(name, self._bindings[macro], macros=(*macros, macro)))
            length += len(expanded)
            if length > _MOST_TOKENS:
                raise self._too_long(name)
            yield from expanded

    def _too_long(self, name: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: the value of {name} is too long.")


def _bindings(text: str) -> Iterator[tuple[str, Tokens]]:
    """Yields every binding's name, with scopes and modules, and the tokens of its value."""
    block = ""
    for is_indented, line in _lines(text):
        texts = [token.string for token in line]
        if not is_indented:
            block = ""
        if "=" in texts:
            index = texts.index("=")
            yield f"{block}{''.join(texts[:index])}", line[index + 1 :]
        elif texts[-1] == ":":
            block = f"{''.join(texts[:-1])}."


def _lines(text: str) -> Iterator[tuple[bool, Tokens]]:
    """Yields logical lines without comments, joined at brackets and backslashes, and whether they are indented."""
    depth = 0
    line: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.INDENT:
            depth += 1
        elif token.type == tokenize.DEDENT:
            depth -= 1
        elif token.type == tokenize.NEWLINE and line:
            yield depth > 0, line
            line = []
        elif token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER):
            line.append(token)


# T5X's name for the file, in the folder of a run.
GIN_FILE = "config.gin"

_ACTIVATIONS = ("T5Config.mlp_activations", "MlpBlock.activations")
_MAX_DISTANCES = ("RelativePositionBiases.max_distance",)
# Parameters that change the computation, with the supported value.
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
    """Facts about a model that its arrays do not show.

    Attributes:
      activation: Field of `T5Config`.
      relative_max_distance: Field of `T5Config`.
      stated: Sentences on what a file or the user says, with the source.
      assumed: Sentences on what no source says, with the reason for the assumption.
    """

    activation: str
    relative_max_distance: int
    stated: tuple[str, ...]
    assumed: tuple[str, ...]


def find_facts(folders: tuple[pathlib.Path, ...], declared: Declared, *, gated_mlp: bool) -> Facts:
    """Returns the facts that define the computation of a model in T5X's or Orbax's layout.

    Args:
      folders: Folders to search for `config.gin`; the first that has one counts.
      declared: The user's declarations.
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
    """Returns one sentence on all values taken from T5's defaults, by name, and how to declare others."""
    named = ", and ".join(f"{name.lower()} is assumed to be {value}" for name, value in assumed.items())
    flags = " and ".join(f"--{name.lower().replace(' ', '_')}" for name in assumed)
    return f"{named[:1].upper()}{named[1:]}, as in T5: {why}. If that is not so, pass {flags}."


def gin_text(config: T5Config) -> str:
    """Returns a `config.gin` with the facts that a model's arrays do not show."""
    activations = (_THEIRS[config.activation], *(["linear"] if config.gated_mlp else []))
    return (
        "# What the arrays of this model do not show. T5X takes it from the gin files of a run, calm-beam from here.\n"
        f"network.T5Config.mlp_activations = {activations}\n"
        f"relative_position_biases.RelativePositionBiases.max_distance = {config.relative_max_distance}\n"
    )


def _read_facts(path: pathlib.Path, *, gated_mlp: bool) -> tuple[str | None, int | None]:
    """Returns activation and maximum distance from a `config.gin`, each None if it is not there."""
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
    """Returns our name of an activation for T5X's names by input kernel, such as `('gelu', 'linear')`."""
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


_VERSION = 3
_CHUNK_BYTES = 64 * 2**20
# Most bytes of arrays that are written concurrently, unless one array is larger.
_PENDING_BYTES = 256 * 2**20


def read_t5x(directory: pathlib.Path, *, keeps: Callable[[str], bool]) -> StoredArrays:
    """Returns the weights of a `checkpoint_<step>` folder by name, to be read as float32.

    Args:
      directory: The folder with the msgpack file `checkpoint`.
      keeps: Which arrays to read, by name.

    Returns:
      Mapping from names such as `decoder/layers_0/mlp/wi_0/kernel` to arrays.

    Raises:
      CheckpointError: If the msgpack file is not a T5X checkpoint, or an array is missing or broken.
    """
    import flax.serialization
    import flax.traverse_util

    path = directory / "checkpoint"
    content = read_whole(path)
    try:
        target = flax.serialization.msgpack_restore(content)["optimizer"]["target"]
        if not isinstance(target, dict):
            raise TypeError(f"its target is a {type(target).__name__}, not a tree")
        leaves = flax.traverse_util.flatten_dict(target, is_leaf=lambda _, value: _is_spec(value), sep="/")
    except Exception as error:
        # msgpack raises a dozen unrelated types for damaged input; all of them mean the same to the user.
        raise CheckpointError(
            f"{path}: not a T5X checkpoint ({type(error).__name__}: {shortened(error)}). "
            'Expected msgpack with {"optimizer": {"target": ...}}.'
        ) from error
    kept = {name: leaf for name, leaf in leaves.items() if keeps(name)}
    unreadable = [name for name, leaf in kept.items() if not isinstance(leaf, np.ndarray) and not _is_spec(leaf)]
    if unreadable:
        raise CheckpointError(f"{path}: {shortened(unreadable[0])} is neither an array nor the place of one.")
    return read_arrays(path, {name: _place(directory, leaf) for name, leaf in kept.items()})


def write_t5x(
    directory: pathlib.Path,
    config: Config,
    *,
    arrays: Arrays,
    step: int,
    vocabulary_path: pathlib.Path | None,
    extra_ids: int = 0,
) -> pathlib.Path:
    """Writes a `checkpoint_<step>` folder atomically, and returns its path.

    A `config.gin` next to it has the facts that the arrays do not show, if they are not T5's. A model whose layers have
    their own relative position biases is written like `scalable_t5` with `scan_layers=False`, with an axis for heads.

    Args:
      directory: The folder to write to; made if needed.
      config: Sizes of the model.
      arrays: Weights by name; stored as float32.
      step: Number of the training step, at least 1: T5X takes 0 for "there is none". A step of that number is replaced.
      vocabulary_path: The SentencePiece model, or `tokenizer.json`, to copy to `directory`; with None, none is left
        there.
      extra_ids: Number of its sentinels, which a file next to it records.

    Raises:
      ValueError: If the model is not a T5, or has other start or end ids than T5; if `step` is below 1; or if a
        `config.gin` in `directory` is of another model.
    """
    if not isinstance(config, T5Config):
        raise ValueError(f"T5X's layout holds T5s only, and this model is a {stored_architecture(config).name}.")
    if (config.start_id, config.end_ids) != (T5Config.start_id, T5Config.end_ids):
        raise ValueError(
            f"T5X's layout cannot say that outputs begin with token {config.start_id} and end with "
            f"{' or '.join(map(str, config.end_ids))}: its models begin with {T5Config.start_id} and end with "
            f"{T5Config.end_ids[0]}. Use the native layout."
        )
    if step < 1:
        raise ValueError(f"step must be at least 1, got {step}.")
    text = _missing_gin_text(directory, config)
    final = directory / f"checkpoint_{step}"
    # Names that no reader takes for a step.
    mark = os.urandom(8).hex()
    temporary, replaced = directory / f".{final.name}.{mark}.tmp", directory / f".{final.name}.{mark}.old"
    temporary.mkdir(parents=True)
    try:
        _write_tree(temporary, config, arrays=arrays, step=step)
        if vocabulary_path is not None:
            write_vocabulary(directory, vocabulary_path, extra_ids=extra_ids)
        if text is not None:
            with replacing(directory / GIN_FILE) as gin_file:
                gin_file.write_text(text, encoding="utf-8")
        if os.path.lexists(final):
            os.rename(final, replaced)
        os.rename(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if replaced.is_symlink():
        # A link's target belongs to someone else.
        replaced.unlink()
    else:
        shutil.rmtree(replaced, ignore_errors=True)
    if vocabulary_path is None:
        write_vocabulary(directory, None, extra_ids=0)
    return final


def _missing_gin_text(directory: pathlib.Path, config: T5Config) -> str | None:
    """Returns the `config.gin` that readers of a model need but would not find; None if they need none."""
    found = find_facts((directory,), Declared(), gated_mlp=config.gated_mlp)
    if (found.activation, found.relative_max_distance) == (config.activation, config.relative_max_distance):
        return None
    if (directory / GIN_FILE).exists():
        raise ValueError(
            f"{directory / GIN_FILE}: is of another model, with activation {found.activation} and relative max "
            f"distance {found.relative_max_distance}; this one has {config.activation} and "
            f"{config.relative_max_distance}. Write to another folder."
        )
    return gin_text(config)


def _is_spec(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("kvstore"), dict)


def _place(directory: pathlib.Path, leaf: Any) -> Any:
    """Returns an array that is in the tree, or the place of its zarr array, whose path is relative to the folder."""
    if isinstance(leaf, np.ndarray):
        return leaf
    relative = pathlib.PurePosixPath(str(leaf["kvstore"].get("path", ""))).name
    return {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{directory / relative}/"}}


def _write_tree(folder: pathlib.Path, config: T5Config, *, arrays: Arrays, step: int) -> None:
    import flax.serialization
    import flax.traverse_util
    import tensorstore

    specs: dict[str, Any] = {}
    pending: list[Any] = []
    pending_bytes = 0

    def finish() -> None:
        try:
            while pending:
                pending.pop().result()
        except ValueError as error:
            raise _not_written(folder, error) from error

    for name, array in arrays.items():
        values = np.asarray(array, np.float32)
        if config.relative_bias_per_layer:
            values = split_heads(name, values, num_heads=config.num_heads)
        specs[name] = _spec(name, values.shape)
        kvstore = {"driver": "file", "path": f"{folder / specs[name]['kvstore']['path']}/"}
        try:
            store = tensorstore.open({**specs[name], "kvstore": kvstore}, create=True).result()
            pending.append(store.write(values))
        except ValueError as error:
            raise _not_written(folder, error) from error
        pending_bytes += values.nbytes
        if pending_bytes > _PENDING_BYTES:
            # Arrays that are being written stay in memory.
            finish()
            pending_bytes = 0
    finish()
    if isinstance(arrays, StoredArrays):
        arrays.check_unchanged()
    target = flax.traverse_util.unflatten_dict(specs, sep="/")
    tree = {"version": _VERSION, "optimizer": {"target": target, "state": {"step": np.asarray(step, np.int32)}}}
    with replacing(folder / "checkpoint") as path:
        path.write_bytes(flax.serialization.msgpack_serialize(tree))


def _not_written(folder: pathlib.Path, error: ValueError) -> CheckpointError:
    """Returns the error for a failed write, without TensorStore's specification of the array."""
    reason = str(error).partition(" [")[0].rpartition(": ")[2]
    return CheckpointError(f"{folder.parent}: cannot be written: {reason}. Make room there, or choose another folder.")


def _spec(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Returns the leaf that represents an array in the tree."""
    row_bytes = 4 * int(np.prod(shape[1:]))
    chunks = [min(shape[0], max(1, _CHUNK_BYTES // row_bytes)), *shape[1:]]
    return {
        "driver": "zarr",
        "dtype": "float32",
        "kvstore": {"driver": "file", "path": f"target.{name.replace('/', '.')}/"},
        "metadata": {"chunks": chunks, "compressor": {"id": "gzip", "level": 1}, "shape": list(shape)},
    }
