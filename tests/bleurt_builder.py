"""BLEURT checkpoints in the published layout: a small random BERT, with either kind of vocabulary."""

import json
import pathlib
from typing import Any

import numpy as np
import tensorflow as tf

from tests.builders import train_vocabulary

WORD_PIECES = (
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "##s", "on", "mat", "a", "dog", "un", "##able"),
    *("ete", "Été", "straße", ".", ",", "'", "l", "cats", "日", "本", "##y", "b", "c"),
)
_WIDTH, _HEADS, _LAYERS, _MOST_POSITIONS = 16, 2, 2, 128


class _Bert(tf.Module):
    """A BERT whose first position is projected to a score."""

    def __init__(self, vocab_size: int, seed: int, *, spread: float) -> None:
        super().__init__()
        generator = np.random.default_rng(seed)

        def weights(*shape: int) -> tf.Variable:
            return tf.Variable((generator.standard_normal(shape) * shape[0] ** -0.5).astype(np.float32))

        self.words, self.positions, self.segments = (
            weights(vocab_size, _WIDTH),
            weights(_MOST_POSITIONS, _WIDTH),
            weights(2, _WIDTH),
        )
        self.layers = [[weights(_WIDTH, _WIDTH) for _ in range(4)] for _ in range(_LAYERS)]
        self.mlps = [[weights(_WIDTH, 2 * _WIDTH), weights(2 * _WIDTH, _WIDTH)] for _ in range(_LAYERS)]
        self.head = tf.Variable(weights(_WIDTH, 1) * spread)

    def predictions(self, input_ids: tf.Tensor, input_mask: tf.Tensor, segment_ids: tf.Tensor) -> tf.Tensor:
        """Returns scores around 1/2, shape (batch,), of int64 tensors of shape (batch, length)."""
        size, length = tf.shape(input_ids)[0], tf.shape(input_ids)[1]

        def heads(states: tf.Tensor) -> tf.Tensor:
            # [batch, length, width] -> [batch, heads, length, width / heads]
            return tf.transpose(tf.reshape(states, [size, length, _HEADS, _WIDTH // _HEADS]), [0, 2, 1, 3])

        states = _normed(
            tf.gather(10 * self.words, input_ids) + self.positions[:length] + tf.gather(self.segments, segment_ids)
        )
        bias = -1e4 * (1 - tf.cast(input_mask, tf.float32))[:, None, None, :]
        for (query, key, value, out), (rise, fall) in zip(self.layers, self.mlps, strict=True):
            logits = tf.matmul(heads(states @ query), heads(states @ key), transpose_b=True) + bias
            mixed = tf.transpose(tf.nn.softmax(logits) @ heads(states @ value), [0, 2, 1, 3])
            states = _normed(states + tf.reshape(mixed, [size, length, _WIDTH]) @ out)
            states = _normed(states + tf.nn.gelu(states @ rise) @ fall)
        return 0.5 + tf.squeeze(tf.tanh(states[:, 0]) @ self.head, 1)


def _normed(states: tf.Tensor) -> tf.Tensor:
    states -= tf.reduce_mean(states, -1, keepdims=True)
    return states * tf.math.rsqrt(tf.reduce_mean(states**2, -1, keepdims=True) + 1e-6)


def write_bleurt(
    folder: pathlib.Path,
    *,
    seed: int = 0,
    is_sentencepiece: bool = False,
    do_lower_case: bool = True,
    max_seq_length: int = 64,
    takes_any_length: bool = True,
    spread: float = 0.15,
    output: str = "predictions",
    dtype: tf.DType = tf.int64,
    more_pieces: tuple[str, ...] = (),
) -> pathlib.Path:
    """Writes a checkpoint and returns its folder.

    Args:
      folder: Folder to make.
      seed: Seed of the weights.
      is_sentencepiece: Whether the vocabulary is a SentencePiece model.
      do_lower_case: The configuration's flag for word pieces.
      max_seq_length: The configuration's length.
      takes_any_length: Whether the model takes any length, or that one only.
      spread: How far scores lie from 1/2.
      output: Name of the output.
      dtype: Type of the inputs.
      more_pieces: Word pieces after the others.
    """
    folder.mkdir(parents=True)
    config: dict[str, Any] = {"name": "tiny", "max_seq_length": max_seq_length, "bert_config_file": "bert_config.json"}
    if is_sentencepiece:
        train_vocabulary(folder / "sent_piece.model", size=48, control_symbols=["[CLS]", "[SEP]"])
        config |= {"sp_model": "sent_piece", "dynamic_seq_length": True}
        vocab_size = 48
    else:
        pieces = tuple(dict.fromkeys((*WORD_PIECES, *more_pieces)))
        (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
        config |= {"vocab_file": "vocab.txt", "do_lower_case": do_lower_case}
        vocab_size = len(pieces)
    (folder / "bleurt_config.json").write_text(json.dumps(config))
    (folder / "bert_config.json").write_text(json.dumps({"vocab_size": vocab_size, "hidden_size": _WIDTH}))
    bert = _Bert(vocab_size, seed, spread=spread)
    spec = tf.TensorSpec([None, None if takes_any_length else max_seq_length], dtype)

    @tf.function(input_signature=[spec] * 3)
    def serve(input_ids: tf.Tensor, input_mask: tf.Tensor, segment_ids: tf.Tensor) -> dict[str, tf.Tensor]:
        return {output: bert.predictions(input_ids, input_mask, segment_ids)}

    bert.serve = serve
    tf.saved_model.save(bert, str(folder), signatures={"serving_default": serve})
    return folder
