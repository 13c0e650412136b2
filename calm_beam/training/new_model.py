"""New models for `train`, by architecture: sizes, a vocabulary, and random weights. Needs no JAX.

A vocabulary is a SentencePiece model with T5's conventions, or a `tokenizer.json` for a decoder-only model. Added exit
norms and heads begin as copies of the norm or head that all layers shared before.
"""

import dataclasses
import io
import json
import os
import pathlib
import types
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
import sentencepiece

from calm_beam.checkpoints import Array, Arrays, StoredArrays
from calm_beam.extras import imported
from calm_beam.inputs.vocabularies.vocabulary import EOS_ID, PAD_ID, UNK_ID, VocabularyError
from calm_beam.model import ModelConfig, T5Config, architecture_of, parameter_shapes
from calm_beam.model.architecture import exit_shapes
from calm_beam.model.llama import LlamaConfig
from calm_beam.storage import writing
from calm_beam.text import counted

# Special tokens of a new decoder-only model's tokenizer, in the order of their ids. The first ends every prompt, so
# that the model can tell where the answer begins; the second ends every output.
ANSWER, END = "<|answer|>", "<|end|>"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewModel:
    """The defaults for a new model of one architecture.

    Attributes:
      kind: Class of its config.
      sizes: Sizes that may be chosen, with their defaults.
      options: Further config fields that may be given; their defaults are the config's.
      fixed: Config fields that cannot be chosen.
      vocabulary: File name of its vocabulary, which also selects the vocabulary's format.
    """

    kind: type
    sizes: Mapping[str, int]
    options: tuple[str, ...]
    fixed: Mapping[str, Any]
    vocabulary: str

    def config(self, given: Mapping[str, Any]) -> ModelConfig:
        """Returns the config, given some of the sizes and options.

        Raises:
          ValueError: If one is out of range.
        """
        made: ModelConfig = self.kind(**{**self.sizes, **self.fixed, **given})
        return made


_SIZES = {"vocab_size": 2048, "emb_dim": 128, "num_heads": 4, "head_dim": 32, "mlp_dim": 256, "num_decoder_layers": 8}

NEW_MODELS: Mapping[str, NewModel] = types.MappingProxyType(
    {
        "t5": NewModel(
            kind=T5Config,
            sizes=_SIZES | {"num_encoder_layers": 3},
            options=("activation", "relative_max_distance"),
            fixed={},
            vocabulary="sentencepiece.model",
        ),
        "llama": NewModel(
            kind=LlamaConfig,
            sizes=_SIZES | {"num_kv_heads": 4, "max_positions": 512},
            options=("activation",),
            fixed={"norm_epsilon": 1e-5, "rope_theta": 10_000.0, "end_ids": (1,)},
            vocabulary="tokenizer.json",
        ),
    }
)


_BYTES = 256


def train_vocabulary(texts: Iterable[str], path: str | os.PathLike[str], *, vocab_size: int) -> pathlib.Path:
    """Writes a vocabulary trained on the given texts; the file's name selects the format.

    Args:
      texts: Texts that the model will read and write; each is used whole, however long.
      path: The file to write: a `tokenizer.json`, or else a SentencePiece model.
      vocab_size: Total number of ids.

    Returns:
      The path.

    Raises:
      VocabularyError: If the texts cannot fill, or do not fit, a vocabulary of that size.
      MissingExtraError: If the package that trains a `tokenizer.json` is not installed.
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
            # The model could never write a rare character that is left out.
            character_coverage=1.0,
            # In bytes; longer ones would be skipped silently.
            max_sentence_length=max(len(sentence.encode()) for sentence in sentences) + 1,
            # Threads would add up expected counts in varying order.
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise VocabularyError(f"{_too_little(sentences, vocab_size)}: {error}") from error
    with writing(path):
        path.write_bytes(model.getvalue())


def _train_tokenizer(sentences: list[str], path: pathlib.Path, *, vocab_size: int) -> None:
    """Writes a byte-level BPE: id 0 ends every prompt, 1 every output, and every text can be encoded.

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


def initialize_parameters(config: ModelConfig, *, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns random weights, normal with the scales of `Architecture.initial_distribution`.

    Args:
      config: Sizes of the model. Its exit classifier, if any, starts at 0, which scores every state 1/2.
      generator: Source of the draws.

    Returns:
      float32 arrays by name, names and shapes as in `parameter_shapes`.
    """
    architecture, arrays = architecture_of(config), {}
    for name, shape in parameter_shapes(config).items():
        mean, deviation = architecture.initial_distribution(config, name, shape=shape)
        drawn = mean + generator.standard_normal(shape) * deviation if deviation else np.full(shape, mean)
        arrays[name] = drawn.astype(np.float32)
    return arrays


def with_own_exits(
    config: ModelConfig, arrays: Arrays, *, exit_norms: bool, exit_heads: bool
) -> tuple[ModelConfig, Arrays]:
    """Returns a model whose layers below the last have their own norms or heads, and whose predictions are unchanged.

    Args:
      config: Config of the model.
      arrays: Its weights by name.
      exit_norms: Whether each of these layers gets a norm; existing ones are kept.
      exit_heads: Whether each of these layers gets a head kernel; existing ones are kept.

    Returns:
      The new config, and its weights: the given ones, and copies of the final norm and the output head.

    Raises:
      ValueError: If there is only one layer.

    Source: EE-Tuning (Pan et al., 2024), where added exits begin as copies of the final one.
    """
    changes = {"exit_norms": config.exit_norms or exit_norms, "exit_heads": config.exit_heads or exit_heads}
    changed: ModelConfig = dataclasses.replace(cast(Any, config), **changes)
    names = [name for name in exit_shapes(changed) if name not in arrays]
    if not names:
        return changed, arrays
    kernel = _head(config, arrays) if changed.exit_heads and not config.exit_heads else None
    added: dict[str, Any] = {}
    for name in names:
        added[name] = kernel if name.endswith("/kernel") else arrays["decoder/decoder_norm/scale"]
    # Stored arrays stay on disk, and are read again for each copy.
    all_arrays: dict[str, Array] = {**arrays, **added}
    return changed, arrays.of(all_arrays) if isinstance(arrays, StoredArrays) else all_arrays


def _head(config: ModelConfig, arrays: Arrays) -> Array:
    """Returns the output head as a kernel, [width, vocabulary], for unscaled states."""
    if not config.tied_head:
        return arrays["decoder/logits_dense/kernel"]
    kernel = arrays["token_embedder/embedding"].T
    if not architecture_of(config).scales_tied_head:
        return kernel
    return np.asarray(kernel) / np.float32(np.sqrt(config.emb_dim))
