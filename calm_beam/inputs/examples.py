"""Calibration examples: the rules for a row of any format, and their JSONL form.

A row may hold a chat instead of a prompt: `messages`, in the form of chat models and their data sets.
"""

import dataclasses
import gzip
import hashlib
import json
import re
import reprlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, AnyStr, BinaryIO, Protocol, Self, TypeVar

from calm_beam.errors import CalmBeamError
from calm_beam.storage import strict_json

CHAT = "messages"
"""Key of a row's chat messages."""

_EXPECTED = (
    'expected [{"role": "user", "content": "..."}], after earlier turns of user and assistant or without any, and with '
    "or without the assistant's answer behind it"
)
_ROLES = ("user", "assistant")

AnyPrompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A prompt: a text, token ids, or the messages of a chat."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns:
    """The turns of a chat.

    Attributes:
      earlier: Texts of the turns before the last question, by user and assistant in turn; empty for none.
      text: The text of the user that is answered.
      answer: The assistant's answer to it; None if there is none.
    """

    earlier: tuple[str, ...]
    text: str
    answer: str | None

    @classmethod
    def of(cls, messages: Any) -> Self:
        """Returns the turns of messages, each by a role and with a content of a text, or of parts of type text.

        Args:
          messages: Of user and assistant in turn, the first by the user; an assistant's at the end is an answer.

        Raises:
          ValueError: If there are other messages; names their roles.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise ValueError(f"{CHAT} is no list; {_EXPECTED}")
        said = [role_and_text(message) for message in messages]
        roles = [role for role, _ in said]
        if any(role in ("system", "developer") for role in roles):
            raise ValueError(
                f"{CHAT} has a {roles[0]} message. Leave it out: the text that every chat begins with is given once, "
                "with --system, and a manifest puts its own before every chat"
            )
        if not roles or any(role != _ROLES[place % 2] for place, role in enumerate(roles)):
            raise ValueError(f"{CHAT} are of {', '.join(roles) or 'nobody'}; {_EXPECTED}")
        texts = [text for _, text in said]
        answer = texts.pop() if len(texts) % 2 == 0 else None
        return cls(earlier=tuple(texts[:-1]), text=texts[-1], answer=answer)


def messages_of(text: str, earlier: Sequence[str] = ()) -> list[dict[str, str]]:
    """Returns the messages of a chat: earlier texts of user and assistant in turn, then the user's that is answered."""
    return [{"role": _ROLES[place % 2], "content": said} for place, said in enumerate((*earlier, text))]


def prompt_size(prompt: Any) -> int:
    """Returns the size of a prompt that may be invalid: characters of its texts, or token ids."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return len(prompt) if isinstance(prompt, str) else 1
    return sum(len(str(each.get("content"))) if isinstance(each, Mapping) else 1 for each in prompt)


def role_and_text(message: Any) -> tuple[str, str]:
    """Returns the role and the text of a message, whose content is a text or parts of type text.

    Raises:
      ValueError: If it is not such a message.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"each of {CHAT} must be an object with role and content")
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text") or "") for part in content)
    if not isinstance(content, str):
        raise ValueError("the content of a message must be a text, or parts of type text")
    return message["role"], content


# Ids are decoded and stored as int32.
_LARGEST_ID = 2**31 - 1

NO_UTF_8 = "it holds bytes that are not UTF-8, or half of a surrogate pair. Convert it, for example with iconv."
"""End of messages about text that no UTF-8 file can hold."""
NUL_CHARACTER = (
    "a NUL character, which vocabularies read as an unknown piece and outputs never have. Take it out, or find out "
    "whether the file is text at all."
)
"""End of messages about text with a NUL character."""

# Bytes that are not UTF-8, as `errors="surrogateescape"` decodes them.
_ESCAPED = re.compile("[\udc80-\udcff]")
_NO_CLUSTER = "by which examples were to be clustered. Every line must name its cluster."
_NO_GROUP = "which was to name its group. Every line must name its group."

# For messages.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100

LARGEST_ROW = 4 << 20
"""Most bytes of a row: enough for a long novel. Tokenizing a text takes fifty times its size in memory."""


class DataError(CalmBeamError, ValueError):
    """A malformed example, or a data set that cannot be used for calibration."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """One prompt, with its references: texts that are right answers.

    Attributes:
      id: Identifies the example within its data set.
      has_own_id: Whether the data have the id; otherwise it is derived from the content.
      input: The prompt as text, without task prefix; None if the data have token ids. Of a chat, the text of the user
        that is answered.
      input_ids: The prompt as token ids, unchanged; None if the data have text.
      references: Right answers as texts, possibly none. `inputs.prompts.with_reference_texts` makes them of
        `reference_ids` when prompts are encoded.
      reference_ids: Right answers as token ids; None if the data have texts.
      cluster: Name of the cluster it was drawn with; None if every example is drawn by itself.
      group: Name of its group, such as its language; None if there are no groups.
      file_index: Index of its file among the sorted data files.
      line: Number of its line, row or record in that file, from 1.
      repeats_prompt: Whether an example before it, in the order by ids, has the same prompt; for a holdout one, also
        whether a selection example has. Always False if equal prompts come into one shard.
      earlier: Of a chat of several turns, the texts before `input`, by user and assistant in turn; else None.
    """

    id: str
    has_own_id: bool
    input: str | None
    input_ids: tuple[int, ...] | None
    references: tuple[str, ...]
    reference_ids: tuple[tuple[int, ...], ...] | None = None
    cluster: str | None = None
    group: str | None = None
    file_index: int
    line: int
    repeats_prompt: bool = False
    earlier: tuple[str, ...] | None = None

    @property
    def prompt(self) -> AnyPrompt:
        """The prompt as it is asked: text, token ids, or the messages of a chat of several turns."""
        if self.input is None:
            return self.input_ids or ()
        return self.input if self.earlier is None else messages_of(self.input, self.earlier)

    @property
    def has_references(self) -> bool:
        """Whether there is a right answer, as text or as token ids."""
        return bool(self.references or self.reference_ids)

    @property
    def has_empty_reference(self) -> bool:
        """Whether a right answer is empty, so that only an empty output can match it."""
        return not all(map(str.strip, self.references)) or any(map(_is_empty, self.reference_ids or ()))

    def input_digest(self) -> bytes:
        """Returns a digest of the prompt: equal for two examples if and only if their prompts are equal."""
        content: list[object] = [self.input, self.input_ids]
        if self.earlier is not None:
            content.append(self.earlier)
        return hashlib.sha256(json.dumps(content).encode()).digest()

    def content_digest(self) -> bytes:
        """Returns a 32-byte digest of id, prompt, references as given, cluster and group."""
        references = self.references if self.reference_ids is None else self.reference_ids
        content: list[object] = [self.id, self.input, self.input_ids, references]
        if self.cluster is not None:
            content.append(self.cluster)
        if self.group is not None:
            # Under its name, so that a group is never taken for a cluster.
            content.append({"group": self.group})
        if self.earlier is not None:
            content.append({"earlier": self.earlier})
        return hashlib.sha256(json.dumps(content).encode()).digest()

    def in_words(self) -> str:
        """Returns the example's name in messages; if the data have no id, with its file and row."""
        place = "" if self.has_own_id else f" (row {self.line} of data file {self.file_index + 1}, sorted by name)"
        return f"example {self.id}{place}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowKeys:
    """The keys of a row's values, and what every row must have.

    Token ids are always under `input_ids` and `reference_ids`, ids of examples under `id`.

    Attributes:
      inputs: Key of the prompt's text.
      targets: Key of the references: a list of texts, or, under another key than `references`, one text.
      cluster: Key of the cluster's name, a text or an integer; None reads no cluster.
      group: Key of the group's name, a text or an integer; None reads no group.
      needs_references: Whether an example without references is an error.
      has_vocabulary: Whether outputs become texts. If not, references that are texts are an error: compared with token
        ids, they would give every output a score of 0, and every risk would be 0.
    """

    inputs: str = "input"
    targets: str = "references"
    cluster: str | None = None
    group: str | None = None
    needs_references: bool = False
    has_vocabulary: bool = True


DEFAULT_KEYS = RowKeys()


def parse_examples(raw: BinaryIO, *, path: str, file_index: int = 0, keys: RowKeys = DEFAULT_KEYS) -> Iterator[Example]:
    """Yields the examples of one JSONL file.

    Args:
      raw: The file's bytes.
      path: Its name, for messages; read as gzip if it ends in `.gz`.
      file_index: Recorded in the examples.
      keys: The keys of a row's values, and what every row must have.

    Raises:
      DataError: If the file is damaged or a line is not an example; names file and line.
    """
    for line_number, line in numbered_lines(raw, path=path):
        yield parse_example(line, path=path, line_number=line_number, file_index=file_index, keys=keys)


def numbered_lines(raw: BinaryIO, *, path: str) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a file with their numbers, from 1.

    Args:
      raw: The file's bytes.
      path: Its name, for messages; read as gzip if it ends in `.gz`.

    Raises:
      DataError: If gzip data are damaged or incomplete, or a line is longer than `LARGEST_ROW`.
    """
    number = 0
    try:
        with gzip.open(raw) if path.endswith(".gz") else raw as lines:
            for number, line in bounded_lines(lines, name=path):
                yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: damaged gzip data after line {number} ({error}).") from error


_Line = TypeVar("_Line", str, bytes, covariant=True)


class _Lines(Protocol[_Line]):
    """An open file of text or of bytes."""

    def readline(self, size: int = -1, /) -> _Line: ...


def bounded_lines(lines: _Lines[AnyStr], *, name: str, first: int = 1) -> Iterator[tuple[int, AnyStr]]:
    """Yields the lines of an open file with their numbers; reads at most `LARGEST_ROW` of a line into memory.

    Args:
      lines: The file.
      name: Its name, for messages.
      first: Number of the first line.

    Raises:
      DataError: If a line is longer than `LARGEST_ROW`.
    """
    number = first
    while line := lines.readline(LARGEST_ROW + 1):
        check_row_size(len(line), f"{name}, line {number}")
        yield number, line
        number += 1


def check_utf_8(line: str, where: str) -> None:
    """Refuses a line that was not UTF-8 when it was read with `errors="surrogateescape"`; `where` names file and line.

    Raises:
      DataError: If it holds a byte that is not UTF-8; shows the first.
    """
    if not line.isascii() and (found := _ESCAPED.search(line)):
        byte = ord(found.group()) & 0xFF
        raise DataError(f"{where}: is not text in UTF-8: it holds the byte 0x{byte:02x}. Convert it with iconv.")


def check_row_size(size: int, where: str) -> None:
    """Refuses a row that is too large; `where` names file and row.

    Raises:
      DataError: If it has more than `LARGEST_ROW` bytes.
    """
    if size > LARGEST_ROW:
        raise DataError(
            f"{where}: is longer than {LARGEST_ROW >> 20} MiB, the most that a row may have. Shorten it; if no row "
            "should be so long, the file is damaged, or of another format."
        )


def parse_example(
    line: bytes | str, *, path: str, line_number: int, file_index: int = 0, keys: RowKeys = DEFAULT_KEYS
) -> Example:
    """Returns the example in one line of a JSONL file.

    Args:
      line: A JSON object with the keys that `example_of_row` reads.
      path: The file, for messages.
      line_number: The line in it, from 1.
      file_index: Index of the data file.
      keys: The keys of a row's values, and what every row must have.

    Raises:
      DataError: If the line is not such an object; names file and line.
    """
    where = f"{path}, line {line_number}"
    if not line.strip():
        raise DataError(f"{where}: is blank. Every line must be one JSON object.")
    try:
        # Strict under unused keys too: a row either is JSON or is not.
        row = strict_json.loads(line.strip())
    except strict_json.StrictJSONError as error:
        raise DataError(f"{where}: {error}. Every line must be one JSON object.") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, got {type(row).__name__}.")
    return example_of_row(row, where=where, position=line_number, file_index=file_index, keys=keys)


def example_of_row(
    row: Mapping[str, Any], *, where: str, position: int, file_index: int = 0, keys: RowKeys = DEFAULT_KEYS
) -> Example:
    """Returns the example in one row of any format: equal rows give equal examples, ids included.

    Args:
      row: Has `input` (text) or `input_ids` (list of token ids, padding 0 at the end is dropped), and optionally `id`
        (text) and `references` (list of texts) or `reference_ids` (list of lists of token ids). In place of a prompt it
        may have `messages`: the last text of the user becomes the input, turns before it `earlier`, and an assistant's
        answer a reference. Other keys are ignored.
      where: File and row, for messages.
      position: Number of the row in its file, from 1.
      file_index: Index of the data file.
      keys: The keys of a row's values, and what every row must have.

    Returns:
      The example. Without `id`, the id is derived from prompt and references.

    Raises:
      DataError: If a value is missing or of another type, or a text has a NUL character; names the place.
    """
    earlier: tuple[str, ...] | None = None
    if CHAT in row and keys.inputs not in row and "input_ids" not in row:
        row, earlier = _of_messages(row, keys, where=where)
    if (keys.inputs in row) == ("input_ids" in row):
        found = sorted(row)
        raise DataError(f"{where}: expected exactly one of the keys {keys.inputs} and input_ids, got keys {found}.")
    text = _input_text(row, keys.inputs, where=where) if keys.inputs in row else None
    ids = _input_ids(row, where) if "input_ids" in row else None
    references = _references(row, keys.targets, where=where)
    reference_ids = _reference_ids(row, keys.targets, where=where)
    own_id = row.get("id")
    if own_id is not None and (not isinstance(own_id, str) or not own_id):
        raise DataError(f"{where}: id must be a text that is not empty, got {own_id!r}.")
    cluster = _name(row, keys.cluster, where=where, missing=_NO_CLUSTER) if keys.cluster is not None else None
    group = _name(row, keys.group, where=where, missing=_NO_GROUP) if keys.group is not None else None
    for value in (text, own_id, cluster, group, *references, *(earlier or ())):
        _check_text(value, where)
    content_of_id = [text, ids, references if reference_ids is None else reference_ids]
    content = json.dumps(content_of_id if earlier is None else [*content_of_id, earlier]).encode()
    example = Example(
        id=own_id or f"content-{hashlib.sha256(content).hexdigest()[:24]}",
        has_own_id=own_id is not None,
        input=text,
        input_ids=ids,
        references=references,
        reference_ids=reference_ids,
        cluster=cluster,
        group=group,
        file_index=file_index,
        line=position,
        earlier=earlier,
    )
    if keys.needs_references and not example.has_references:
        raise DataError(f"{where}: risk consistency needs references, example {example.id} has none.")
    if references and not keys.has_vocabulary:
        raise DataError(no_vocabulary_for(f"{where}: its"))
    return example


def no_vocabulary_for(whose: str) -> str:
    """Returns the error message for text references without a vocabulary; `whose` begins the sentence."""
    return (
        f"{whose} references are texts, but outputs are token ids, since there is no vocabulary in or next to the "
        "checkpoint. Pass --vocabulary, or give reference_ids (lists of token ids) instead."
    )


def mixed_prompts(text: str, ids: str) -> str:
    """Returns the error message for a data set with both kinds of prompts, given a row with text and one with ids."""
    return (
        f"{text}: its prompt is text, but that of {ids} is token ids. Texts are encoded with prefix and eos, ids are "
        "taken as they are: make one data set of each kind."
    )


def _of_messages(
    row: Mapping[str, Any], keys: RowKeys, *, where: str
) -> tuple[Mapping[str, Any], tuple[str, ...] | None]:
    """Returns a row with an input in place of messages, and with a reference if there is an answer; and earlier turns.

    Those are None for a chat of one turn, which is the same example as its text by itself.
    """
    try:
        turns = Turns.of(row[CHAT])
    except ValueError as error:
        raise DataError(f"{where}: {error}.") from error
    earlier = turns.earlier or None
    if turns.answer is None:
        return {**row, keys.inputs: turns.text}, earlier
    both = next((key for key in (keys.targets, "reference_ids") if key in row), None)
    if both is not None:
        raise DataError(f"{where}: has both {both} and an assistant's message. Leave one of them out.")
    return {**row, keys.inputs: turns.text, keys.targets: [turns.answer]}, earlier


def _input_text(row: Mapping[str, Any], key: str, *, where: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise DataError(f"{where}: {key} must be a text, got {type(value).__name__}.")
    if not value.strip():
        raise DataError(f"{where}: {key} is empty.")
    return value


def _input_ids(row: Mapping[str, Any], where: str) -> tuple[int, ...]:
    ids = _without_padding(row["input_ids"], "input_ids", where=where)
    if not ids:
        raise DataError(f"{where}: input_ids is empty or holds padding (0) only.")
    return ids


def _reference_ids(row: Mapping[str, Any], targets: str, *, where: str) -> tuple[tuple[int, ...], ...] | None:
    if "reference_ids" not in row:
        return None
    if targets in row:
        raise DataError(f"{where}: has both {targets} and reference_ids. Leave one of them out.")
    value = row["reference_ids"]
    if not isinstance(value, list):
        raise DataError(f"{where}: reference_ids must be a list of lists of token ids, got {_shown(value)}.")
    return tuple(_without_padding(ids, "each of reference_ids", where=where) for ids in value)


def _without_padding(value: Any, name: str, *, where: str) -> tuple[int, ...]:
    """Returns token ids without padding at their end."""
    if not isinstance(value, list) or any(type(index) is not int or index < 0 for index in value):
        raise DataError(f"{where}: {name} must be a list of integers of at least 0, got {_shown(value)}.")
    if any(index > _LARGEST_ID for index in value):
        raise DataError(f"{where}: {name} must be at most {_LARGEST_ID}, got {max(value)}.")
    end = len(value)
    while end and value[end - 1] == 0:
        end -= 1
    return tuple(value[:end])


def _is_empty(ids: tuple[int, ...]) -> bool:
    """Returns whether token ids hold nothing but padding before the first eos."""
    end = ids.index(1) if 1 in ids else len(ids)
    return not any(ids[:end])


def _name(row: Mapping[str, Any], key: str, *, where: str, missing: str) -> str:
    if key not in row:
        raise DataError(f"{where}: has no {key!r}, {missing}")
    value = row[key]
    # True is an integer to Python.
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        raise DataError(f"{where}: {key} must be a text that is not empty or an integer, got {value!r}.")
    return str(value)


def _check_text(value: str | None, where: str) -> None:
    """Refuses strings that JSON can spell but that are not text: with NUL, or with half of a surrogate pair."""
    if "\0" in (value or ""):
        raise DataError(f"{where}: {_shown(value)} holds {NUL_CHARACTER}")
    try:
        (value or "").encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {_shown(value)} is not Unicode text: {NO_UTF_8}") from error


def _references(row: Mapping[str, Any], key: str, *, where: str) -> tuple[str, ...]:
    value = row.get(key, [])
    if key != RowKeys.targets and isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(reference, str) for reference in value):
        hint = " Token ids go under reference_ids." if _are_numbers(value) else ""
        raise DataError(f"{where}: {key} must be a list of texts, got {_shown(value)}.{hint}")
    return tuple(value)


def _are_numbers(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first[0] if isinstance(first, list) and first else first, int)


def _shown(value: object) -> str:
    """Returns a value for a message; a long one is cut."""
    return _SHORT.repr(value)
