"""The files of a vocabulary, copied beside the weights of a model."""

import pathlib
import shutil

from calm_beam.sentinels import write_extra_ids
from calm_beam.storage import replacing
from calm_beam.vocabularies.tokenizer_files import TOKENIZER, TOKENIZER_FILES

_SENTENCE_PIECE = "sentencepiece.model"


def write_vocabulary(folder: pathlib.Path, vocabulary_path: pathlib.Path | None, *, extra_ids: int) -> None:
    """Writes a vocabulary; what is there of another is taken away, since readers would take that.

    Args:
      folder: Where to.
      vocabulary_path: A SentencePiece model, or a `tokenizer.json`, which goes with what belongs to it; with None, none
        is left in the folder.
      extra_ids: Sentinels of a SentencePiece model, which a file beside it then names.
    """
    is_tokenizer = vocabulary_path is not None and vocabulary_path.name == TOKENIZER
    # Read before anything is taken away, as it may lie in this folder.
    copied: dict[str, bytes] = {}
    if vocabulary_path is not None and is_tokenizer:
        beside = {name: vocabulary_path.with_name(name) for name in TOKENIZER_FILES}
        copied = {name: path.read_bytes() for name, path in beside.items() if path.is_file()}
    for name in TOKENIZER_FILES:
        if name not in copied:
            (folder / name).unlink(missing_ok=True)
    if is_tokenizer or vocabulary_path is None:
        (folder / _SENTENCE_PIECE).unlink(missing_ok=True)
    else:
        with replacing(folder / _SENTENCE_PIECE) as temporary:
            shutil.copyfile(vocabulary_path, temporary)
    for name, content in copied.items():
        with replacing(folder / name) as temporary:
            temporary.write_bytes(content)
    if not is_tokenizer:
        write_extra_ids(folder, extra_ids if vocabulary_path else 0)
