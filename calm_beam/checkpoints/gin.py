"""The few lines of a gin file that say what the arrays of a T5X model do not show.

T5X writes the configuration of a run to `config.gin` in its folder. Only bindings of literals are read, and macros in
them; nothing is imported or run. Source: gin-config's syntax (scopes, macros, blocks), T5X `gin_utils.py`.
"""

import ast
import io
import pathlib
import tokenize
from collections.abc import Iterator, Sequence
from typing import Any

from .error import CheckpointError
from .metadata import read_text

# Values are short; macros of macros could make them long.
_MOST_TOKENS, _MOST_MACROS = 500, 50

Tokens = Sequence[tokenize.TokenInfo]


class GinBindings:
    """The bindings of a gin file, of which values are looked at on demand."""

    def __init__(self, path: pathlib.Path) -> None:
        """Reads a file.

        Args:
          path: A file such as T5X's `config.gin`.

        Raises:
          CheckpointError: If it is not text of that form.
        """
        self.path = path
        try:
            # A later binding of the same parameter wins, as in gin.
            text = read_text(path)
            if "\0" in text:
                # Of which versions of Python think differently.
                raise SyntaxError("it holds NUL characters")
            self._bindings = dict(_bindings(text))
        except (tokenize.TokenError, SyntaxError) as error:
            raise CheckpointError(
                f"{path}: cannot be read as a gin file ({error.args[0]}). Mend it, or move it away and pass activation "
                "and relative_max_distance yourself."
            ) from error

    def values(self, *parameters: str) -> dict[str, Any]:
        """Returns all values that are bound to parameters, by the names that they are bound by.

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
        """Yields the texts of a value's tokens with those of macros in their place."""
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
    """Yields logical lines, and whether they are indented: without comments, with what brackets or backslashes join."""
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
