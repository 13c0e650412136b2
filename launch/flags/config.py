"""`--config=FILE`: options in a file, each by its name; flags that are given besides win."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from calm_beam.errors import UsageError, os_error_in_words
from calm_beam.options.kinds import Kind
from calm_beam.storage import open_input
from calm_beam.storage.strict_json import StrictJSONError, loads

if TYPE_CHECKING:
    from .parser import FlagParser

CONFIG_HELP = (
    "YAML or JSON file with options, each by its name, such as delta: [0.05, 0.1]; or a manifest, whose outputs are "
    "then decoded in the same way; flags that are given besides win"
)
_OF_THE_COMMAND_LINE = ("--config", "--json", "--require_threshold", "--log_to")
# What a manifest says of decoding that no flag does, or that another machine may do otherwise.
_NOT_OPTIONS = ("confidence_source", "engine")


class OptionOfFile(str):
    """A flag that a file stands for; whoever refuses it names file and key.

    Attributes:
      place: The file, and the key in it.
    """

    place: str

    @classmethod
    def of(cls, name: str, value: str | None, *, path: str) -> "OptionOfFile":
        """Returns the flag of an option; without a value where it takes none."""
        flag = cls(f"--{name}" if value is None else f"--{name}={value}")
        flag.place = f"{path}: {name}"
        return flag


def with_config(parser: "FlagParser", argv: Sequence[str]) -> list[str]:
    """Returns flags after those of the file that `--config` names, so that what is given wins.

    Raises:
      UsageError: If the file cannot be read, or has a value that its option does not take; names file and key.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    try:
        found, rest = finder.parse_known_args(list(argv))
    except SystemExit:
        # Without a value, which the parser itself says.
        return list(argv)
    path = found.config
    if path is None or not path.strip():
        return list(argv)
    return [*_flags_of(parser, _read(path), path=path), *rest]


def _read(path: str) -> Mapping[str, Any]:
    """Returns the options of a file, by name."""
    try:
        with open_input(path) as file:
            text = file.read()
    except OSError as error:
        raise UsageError(f"--config {os_error_in_words(error)}") from error
    try:
        content = loads(text) if text.lstrip().startswith(b"{") else _loads_yaml(text.decode("utf-8-sig"), path=path)
    except (StrictJSONError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: {error}.") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise UsageError(f"--config {path}: expected options by name, such as delta: 0.1.")
    if str(content.get("schema", "")).startswith("calm-beam/manifest/"):
        decode = content.get("decode", {})
        return {name: value for name, value in decode.items() if name not in _NOT_OPTIONS}
    return content


def _loads_yaml(text: str, *, path: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise UsageError(f"--config {path}: YAML needs pyyaml (pip install pyyaml). JSON does without.") from error

    # Refuses a key that is there twice, of which one would be lost.
    loader: Any = type("Loader", (yaml.SafeLoader,), {})

    def mapping(reader: Any, node: Any) -> dict[Any, Any]:
        pairs = reader.construct_pairs(node, deep=True)
        content = dict(pairs)
        if len(content) < len(pairs):
            raise UsageError(f"--config {path}: a key is there twice.")
        return content

    loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        return yaml.load(text, loader)
    except (yaml.YAMLError, TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"--config {path}: not YAML: {' '.join(str(error).split())}.") from error


def _flags_of(parser: "FlagParser", content: Mapping[str, Any], *, path: str) -> Iterator[OptionOfFile]:
    """Yields the flags that options of a file stand for; an option whose value is null is left out."""
    for name, value in content.items():
        if f"--{name}" in _OF_THE_COMMAND_LINE:
            raise UsageError(f"{path}: {name} is given on the command line, and not in a file.")
        action = parser._option_string_actions.get(f"--{name}")
        if value is None or (action is not None and action.nargs == 0 and value is False):
            continue
        if action is not None and action.nargs == 0:
            if value is not True:
                raise UsageError(f"{path}: {name}: expected true or false, got {json.dumps(value, default=str)}.")
            yield OptionOfFile.of(name, None, path=path)
            continue
        if isinstance(value, bool) and action is not None:
            raise UsageError(f"{path}: {name}: expected a value, got {str(value).lower()}; quote it if it is a text.")
        # Beam's flags take several values by being given several times.
        values = value if isinstance(value, list) and action is None else [value]
        for each in values:
            written = None if each is True else _written(each, action, place=f"{path}: {name}")
            if action is not None and written is not None:
                _check(parser, action, written, place=f"{path}: {name}")
            yield OptionOfFile.of(name, written, path=path)


def _written(value: Any, action: argparse.Action | None, *, place: str) -> str:
    """Returns a value as the command line has it."""
    kind = action.type if action is not None and isinstance(action.type, Kind) else None
    if isinstance(value, dict):
        if kind is None or not kind.is_mapping:
            raise UsageError(f"{place}: expected a value or a list of values, got a mapping.")
        value = [f"{name}={each}" for name, each in value.items()]
    if not isinstance(value, list):
        return str(value)
    takes_list = kind is not None and kind.is_list
    if not takes_list or not value:
        raise UsageError(f"{place}: expected {'one or more values' if takes_list else 'one value'}, got {value!r:.60}.")
    parts = [str(each) for each in value]
    if any("," in part for part in parts):
        raise UsageError(f"{place}: a value in a list must have no comma, got {value!r:.60}.")
    return ",".join(parts)


def _check(parser: "FlagParser", action: argparse.Action, written: str, *, place: str) -> None:
    """Refuses a value that an option does not take."""
    try:
        parser._get_values(action, [written])
    except argparse.ArgumentError as error:
        raise UsageError(f"{place}: {error.message}.") from error
    if not written.strip() and action.default != "":
        raise UsageError(f"{place} is empty; leave it out, or give it a value.")
