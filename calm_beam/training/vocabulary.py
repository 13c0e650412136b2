"""Training a SentencePiece vocabulary with T5's conventions."""

import io
import os
import pathlib
from collections.abc import Iterable

import sentencepiece

from calm_beam.counted import counted
from calm_beam.storage import writing
from calm_beam.vocabulary import EOS_ID, PAD_ID, UNK_ID, VocabularyError


def train_vocabulary(texts: Iterable[str], path: str | os.PathLike[str], *, vocab_size: int) -> pathlib.Path:
    """Writes a unigram SentencePiece model of the given texts: pad 0, eos 1, unknown 2, no beginning-of-sentence.

    The same texts in the same order give the same file.

    Args:
      texts: What the model will read and write; each is taken whole, however long.
      path: The file to write.
      vocab_size: Number of ids in all.

    Returns:
      The path.

    Raises:
      VocabularyError: If the texts cannot fill, or do not fit, a vocabulary of that size.
    """
    sentences = [text for text in texts if text.strip()]
    if not sentences:
        raise VocabularyError("vocabulary: there is no text to train it on, every text is empty.")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            pad_id=PAD_ID,
            eos_id=EOS_ID,
            unk_id=UNK_ID,
            bos_id=-1,
            # A rare character left out is one that the model can never write.
            character_coverage=1.0,
            # In bytes; longer ones would be skipped without a word.
            max_sentence_length=max(len(sentence.encode()) for sentence in sentences) + 1,
            # Threads add up expected counts in any order.
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise VocabularyError(
            f"vocabulary: {counted(len(sentences), 'text does', several='texts do')} not give one of "
            f"vocab_size={vocab_size}: {error}"
        ) from error
    path = pathlib.Path(path)
    with writing(path):
        path.write_bytes(model.getvalue())
    return path
