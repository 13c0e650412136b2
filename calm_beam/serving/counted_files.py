"""Files of losses that a state has counted, so that a file that is given again, grown or moved counts once.

Files of losses grow at their end. The counted part of one is known by its length and its digest, and a file that begins
with these bytes is read on from there. Rows of a probe have ids, so that the same bytes are the same losses wherever
the file lies. Losses written as numbers have none: another file may begin with the same ones, and to leave out losses
for their values would bias the test. So those are known again under the same path only.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import BinaryIO, Self

from calm_beam.storage import absolute

_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountedFile:
    """The part of a file whose losses are counted: its beginning, up to the end of a line.

    Attributes:
      path: Absolute, with links resolved.
      bytes: Length of the part, in bytes.
      sha256: Its digest, as hexadecimal digits.
      losses: Number of its losses, one a line.
    """

    path: str
    bytes: int
    sha256: str
    losses: int

    @classmethod
    def from_dict(cls, value: object) -> Self:
        """Returns the part from a dict of `dataclasses.asdict`.

        Raises:
          ValueError: If a key is missing or unknown, or a value is of another type or below 1.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(value, Mapping) or value.keys() != names:
            raise ValueError(f"a counted file has the keys {', '.join(sorted(names))}, got {value!r:.200}.")
        for name in ("path", "sha256"):
            if not isinstance(value[name], str):
                raise ValueError(f"{name} of a counted file must be a text, got {value[name]!r:.100}.")
        for name in ("bytes", "losses"):
            if type(value[name]) is not int or value[name] < 1:
                raise ValueError(f"{name} of a counted file must be a whole number above 0, got {value[name]!r:.100}.")
        return cls(**value)


class UncountedLines:
    """The lines of an open file of losses after the part that was counted before, as far as they are whole.

    Attributes:
      before: The part that was counted before, of this path or of the one it was moved from; None if none was.
      has_unfinished: Whether a line without a line break was found at the end, which is not read: its writer may not
        have written all of it.
    """

    def __init__(self, file: BinaryIO, *, path: str, counted: Sequence[CountedFile]) -> None:
        """Finds where to read on.

        Args:
          file: At its beginning.
          path: Of the file.
          counted: All parts of files that were counted.
        """
        self._file = file
        self._path = absolute(path)
        self._digest = hashlib.sha256()
        self._bytes = 0
        self.before: CountedFile | None = None
        self.has_unfinished = False
        self._find(counted)
        file.seek(self._bytes)

    def _find(self, counted: Sequence[CountedFile]) -> None:
        """Finds the longest part that the file begins with."""
        has_ids = self._file.read(1) == b"{"
        self._file.seek(0)
        candidates = [part for part in counted if has_ids or part.path == self._path]
        digest, position = hashlib.sha256(), 0
        # Of the same length, the one of this path comes last.
        for part in sorted(candidates, key=lambda part: (part.bytes, part.path == self._path)):
            while position < part.bytes:
                chunk = self._file.read(min(_CHUNK, part.bytes - position))
                if not chunk:
                    return
                digest.update(chunk)
                position += len(chunk)
            if digest.hexdigest() == part.sha256:
                self.before, self._digest, self._bytes = part, digest.copy(), position

    def readline(self, size: int = -1, /) -> bytes:
        """Returns the next whole line, of which at most `size` bytes; empty at the end."""
        line = self._file.readline(size)
        if not line.endswith(b"\n") and len(line) != size:
            self.has_unfinished = bool(line)
            return b""
        self._digest.update(line)
        self._bytes += len(line)
        return line

    def added_to(self, counted: Sequence[CountedFile], *, losses: int) -> tuple[CountedFile, ...]:
        """Returns all counted parts after what has been read of this file.

        Args:
          counted: Those before, as they were given at first.
          losses: Number of losses that were read.
        """
        if not losses:
            return tuple(counted)
        before = self.before
        now = CountedFile(
            path=self._path,
            bytes=self._bytes,
            sha256=self._digest.hexdigest(),
            losses=losses + (before.losses if before else 0),
        )
        # A copy may grow while the file it was made of stays; both are known by their own lengths.
        grown = before if before is not None and before.path == self._path else None
        return (*(part for part in counted if part is not grown), now)
