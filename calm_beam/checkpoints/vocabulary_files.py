"""The files of a vocabulary, copied beside the weights of a model."""

import pathlib

from calm_beam.inputs.vocabularies.sentinels import SENTINEL_FILES, SentinelsError, extra_ids_beside, write_extra_ids
from calm_beam.inputs.vocabularies.tokenizer_files import TOKENIZER, TOKENIZER_FILES
from calm_beam.storage import replacing

_SENTENCE_PIECE = "sentencepiece.model"
# What transformers calls it, in whose way texts are then cut at special tokens.
SPIECE = "spiece.model"
_ALL = (_SENTENCE_PIECE, SPIECE, *dict.fromkeys((*TOKENIZER_FILES, *SENTINEL_FILES)))


def write_vocabulary(
    folder: pathlib.Path, vocabulary_path: pathlib.Path | None, *, extra_ids: int, name: str | None = None
) -> None:
    """Writes a vocabulary; what is there of another is taken away, since readers would take that.

    Args:
      folder: Where to.
      vocabulary_path: A SentencePiece model, or a `tokenizer.json`; the latter, and a `spiece.model`, go with what
        belongs to them. With None, none is left in the folder.
      extra_ids: Sentinels of a SentencePiece model, which a file beside it then names.
      name: What a SentencePiece model is called in the folder; None for the one of two names that it has now.
    """
    # Read before anything is taken away, as it may lie in this folder.
    copied: dict[str, bytes] = {}
    is_tokenizer = vocabulary_path is not None and vocabulary_path.name == TOKENIZER
    if vocabulary_path is not None:
        is_theirs = vocabulary_path.name == SPIECE
        name = TOKENIZER if is_tokenizer else name or (SPIECE if is_theirs else _SENTENCE_PIECE)
        names = TOKENIZER_FILES if is_tokenizer else SENTINEL_FILES if is_theirs else ()
        beside = {each: vocabulary_path.with_name(each) for each in names}
        copied = {each: path.read_bytes() for each, path in beside.items() if path.is_file()}
        copied[name] = vocabulary_path.read_bytes()
    for each in _ALL:
        if each not in copied:
            (folder / each).unlink(missing_ok=True)
    for each, content in copied.items():
        with replacing(folder / each) as temporary:
            temporary.write_bytes(content)
    if not is_tokenizer and extra_ids != _extra_ids_in(folder):
        write_extra_ids(folder, extra_ids)


def _extra_ids_in(folder: pathlib.Path) -> int | None:
    """Returns how many sentinels the files in a folder name; None if they cannot be understood."""
    try:
        return extra_ids_beside(folder / _SENTENCE_PIECE)
    except SentinelsError:
        return None
