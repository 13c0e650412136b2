"""Training a vocabulary: SentencePiece's with T5's conventions, or a `tokenizer.json` for a decoder-only model."""

import io
import json
import os
import pathlib
from collections.abc import Iterable

import sentencepiece

from calm_beam.extras import imported
from calm_beam.inputs.vocabularies.vocabulary import EOS_ID, PAD_ID, UNK_ID, VocabularyError
from calm_beam.storage import writing
from calm_beam.text import counted

from .new_model import ANSWER, END

_BYTES = 256


def train_vocabulary(texts: Iterable[str], path: str | os.PathLike[str], *, vocab_size: int) -> pathlib.Path:
    """Writes a vocabulary of the given texts, of the kind that the name of its file says.

    Args:
      texts: What the model will read and write; each is taken whole, however long.
      path: The file to write: a `tokenizer.json`, or else a SentencePiece model.
      vocab_size: Number of ids in all.

    Returns:
      The path.

    Raises:
      VocabularyError: If the texts cannot fill, or do not fit, a vocabulary of that size.
      MissingExtraError: If the package that makes a `tokenizer.json` is not installed.
    """
    path, sentences = pathlib.Path(path), [text for text in texts if text.strip()]
    if not sentences:
        raise VocabularyError("vocabulary: there is no text to train it on, every text is empty.")
    train = _train_tokenizer if path.suffix == ".json" else _train_sentence_piece
    train(sentences, path, vocab_size=vocab_size)
    return path


def _train_sentence_piece(sentences: list[str], path: pathlib.Path, *, vocab_size: int) -> None:
    """Writes a unigram SentencePiece model of the given texts: pad 0, eos 1, unknown 2, no beginning-of-sentence.

    The same texts in the same order give the same file.
    """
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
            # In bytes; longer ones would be skipped silently.
            max_sentence_length=max(len(sentence.encode()) for sentence in sentences) + 1,
            # Threads add up expected counts in any order.
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise VocabularyError(f"{_too_little(sentences, vocab_size)}: {error}") from error
    with writing(path):
        path.write_bytes(model.getvalue())


def _train_tokenizer(sentences: list[str], path: pathlib.Path, *, vocab_size: int) -> None:
    """Writes a byte-level BPE: id 0 ends every prompt, 1 every output, and any text has ids.

    The same texts give the same file.
    """
    tokenizers = imported("tokenizers", extra="tokenizers", needed_for="the vocabulary of a new decoder-only model")
    least = _BYTES + len((ANSWER, END))
    if vocab_size < least:
        raise VocabularyError(
            f"vocabulary: vocab_size must be at least {least} (each byte has an id), got {vocab_size}."
        )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[ANSWER, END],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        found = counted(tokenizer.get_vocab_size(), "id")
        raise VocabularyError(f"{_too_little(sentences, vocab_size)}: they give {found}.")
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"$A {ANSWER}", special_tokens=[(ANSWER, tokenizer.token_to_id(ANSWER))]
    )
    config = path.with_name("tokenizer_config.json")
    with writing(path):
        tokenizer.save(str(path))
    with writing(config):
        config.write_text(json.dumps({"eos_token": END}, indent=2) + "\n", encoding="utf-8")


def _too_little(sentences: list[str], vocab_size: int) -> str:
    texts = counted(len(sentences), "text does", several="texts do")
    return f"vocabulary: {texts} not give one of vocab_size={vocab_size}"
