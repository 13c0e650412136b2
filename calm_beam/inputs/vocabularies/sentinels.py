"""How many sentinels `<extra_id_0>`, ... the tokenizer of a T5 has, which its SentencePiece model does not hold.

Hugging Face keeps them in small files beside the vocabulary.
Source: transformers `tokenization_t5.py`, versions 4 and 5.
"""

import json
import os
import pathlib
import re
from typing import Any

from calm_beam.errors import CalmBeamError
from calm_beam.storage import is_file, joined, open_input, parent, replacing, strict_json

# Which files name them, in the order in which they are asked.
SENTINEL_FILES = ("tokenizer_config.json", "added_tokens.json", "special_tokens_map.json")
_SENTINEL = re.compile(r"<extra_id_(\d{1,6})>")
_MOST_BYTES = 16 << 20


class SentinelsError(CalmBeamError, ValueError):
    """A file of a tokenizer that cannot be read, or that numbers sentinels in another way than T5 does."""


def extra_ids_beside(vocabulary: str | os.PathLike[str]) -> int:
    """Returns how many sentinels the files beside a SentencePiece model name; 0 if there are none.

    Args:
      vocabulary: Where the model is, local or on Cloud Storage.

    Raises:
      SentinelsError: If such a file cannot be read, or its sentinels are not numbered downwards from the highest id.
    """
    folder = parent(os.fspath(vocabulary))
    for name in SENTINEL_FILES:
        path = joined(folder, name)
        if is_file(path) and (count := _extra_ids(path)):
            return count
    return 0


def write_extra_ids(folder: pathlib.Path, extra_ids: int) -> None:
    """Writes a file that `extra_ids_beside` reads; with 0, none is left in the folder."""
    path = folder / SENTINEL_FILES[0]
    if not extra_ids:
        path.unlink(missing_ok=True)
        return
    with replacing(path) as temporary:
        temporary.write_text(json.dumps({"extra_ids": extra_ids}) + "\n", encoding="utf-8")


def _extra_ids(path: str) -> int:
    try:
        with open_input(path) as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise SentinelsError(f"{path}: is larger than {_MOST_BYTES >> 20} MiB, which no such file is.")
        fields = strict_json.loads(content, constants_allowed=True)
    except (OSError, strict_json.StrictJSONError) as error:
        raise SentinelsError(f"{path}: cannot be read as JSON: {error}.") from error
    ids = _numbered(fields)
    numbers = set(ids) | _listed(fields)
    stated = fields.get("extra_ids") if isinstance(fields, dict) else None
    count = stated if type(stated) is int and stated >= 0 else len(numbers)
    top = max(ids.values(), default=0)
    is_whole = not numbers or (len(numbers) == count and max(numbers) == count - 1)
    if not is_whole or any(index != top - number for number, index in ids.items()):
        raise SentinelsError(
            f"{path}: names {len(numbers)} sentinels, and not as T5 does: expected <extra_id_0> with the highest id, "
            f"<extra_id_1> below it, and so on{f', {count} in all' if stated else ''}. Pass extra_ids yourself."
        )
    return count


def _numbered(fields: Any) -> dict[int, int]:
    """Returns the ids of sentinels by their numbers, from `{text: id}` or `{"added_tokens_decoder": {id: token}}`."""
    if not isinstance(fields, dict):
        return {}
    decoder = fields.get("added_tokens_decoder")
    pairs = list(fields.items())
    if isinstance(decoder, dict):
        pairs += [(_text(token), int(index)) for index, token in decoder.items() if index.isascii() and index.isdigit()]
    return {
        int(match.group(1)): index
        for text, index in pairs
        if type(index) is int and (match := _SENTINEL.fullmatch(text))
    }


def _listed(fields: Any) -> set[int]:
    """Returns the numbers of sentinels in lists of special tokens."""
    if not isinstance(fields, dict):
        return set()
    lists = [fields.get(key) for key in ("additional_special_tokens", "extra_special_tokens")]
    texts = [_text(token) for tokens in lists if isinstance(tokens, list) for token in tokens]
    return {int(match.group(1)) for text in texts if (match := _SENTINEL.fullmatch(text))}


def _text(token: Any) -> str:
    """Returns what a special token, of either form, stands for."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""
