"""Small models, checkpoints and vocabularies for tests."""

import io
import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import flax.serialization
import flax.traverse_util
import numpy as np
import safetensors.numpy
import sentencepiece
import tensorstore

from calm_beam.checkpoints import Arrays, Checkpoint
from calm_beam.exits.measures import MEASURES, Need
from calm_beam.exits.rule import ExitRule
from calm_beam.model import ModelConfig, T5Config, parameter_shapes

_EOS_ID = 1


def build_config(**changes: Any) -> T5Config:
    """Returns the sizes of a tiny model, with the given fields changed."""
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "emb_dim": 16,
        "num_heads": 2,
        "head_dim": 8,
        "mlp_dim": 32,
        "num_encoder_layers": 2,
        "num_decoder_layers": 4,
    }
    return T5Config(**{**sizes, **changes})


# A measure that is added is tested by all that these parametrize.
BY_LOGITS = tuple(name for name, measure in MEASURES.items() if measure.needs is Need.LOGITS)
SERVABLE = tuple(name for name, measure in MEASURES.items() if measure.needs is not Need.LAST_TOKEN)


def build_rule(confidence: str, **fields: Any) -> ExitRule:
    """Returns a rule by a measure, with the setting that the measure needs."""
    needs_patience = MEASURES[confidence].needs is Need.TOKENS
    return ExitRule(**{"confidence": confidence, "patience": 2 if needs_patience else None, **fields})


def build_arrays(config: T5Config, seed: int, *, logit_scale: float = 4.0) -> dict[str, np.ndarray]:
    """Returns random float32 weights that give varied outputs, some of which end, and confidences across (0, 1).

    Args:
      config: Sizes of the model.
      seed: Seed of the draws.
      logit_scale: Scale of the output head; at about 100, most confidences are exactly 1.
    """
    generator = np.random.default_rng(seed)
    arrays = {
        name: (generator.standard_normal(shape) * _standard_deviation(name, shape, config)).astype(np.float32)
        for name, shape in parameter_shapes(config).items()
    }
    for name in arrays:
        if name.endswith("/scale"):
            arrays[name] += np.float32(1)
    if config.tied_head:
        # The head sees the embedding too, and divides by sqrt(d): the scale goes into the norms.
        for name in arrays:
            if name == "decoder/decoder_norm/scale" or name.startswith("decoder/exit_norms_"):
                arrays[name] *= np.float32(logit_scale)
    for name in arrays:
        if name.startswith(("decoder/logits_dense/", "decoder/exit_heads_")):
            arrays[name] *= np.float32(1 if config.tied_head else logit_scale)
            # A longer column is more often the largest: about one token in eight ends its output.
            arrays[name][:, _EOS_ID] *= np.float32(1.4)
    return arrays


def build_checkpoint(config: T5Config | None = None, seed: int = 0, **options: Any) -> Checkpoint:
    """Returns a checkpoint in memory; `options` are those of `build_arrays`."""
    config = config or build_config(exit_classifier=2)
    return checkpoint_of(config, build_arrays(config, seed, **options))


def build_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Returns random prompts of these lengths for the tiny model that end in eos, without pad and without id 63."""
    generator = np.random.default_rng(seed)
    return [[*generator.integers(2, 63, size=length - 1).tolist(), _EOS_ID] for length in lengths]


def checkpoint_of(config: ModelConfig, arrays: Arrays) -> Checkpoint:
    """Returns the given weights as a checkpoint in memory."""
    nowhere = pathlib.Path("/nowhere")
    return Checkpoint(config=config, arrays=arrays, directory=nowhere, vocabulary_path=None, layout="native")


def write_t5x(directory: pathlib.Path, arrays: Arrays, *, step: int = 1000, inline: Iterable[str] = ()) -> pathlib.Path:
    """Writes `directory/checkpoint_<step>` as T5X lays it out, and returns that folder.

    Args:
      directory: Folder to write to; made if needed.
      arrays: Weights by name.
      step: Number of the training step.
      inline: Names of arrays to store in the msgpack file itself, as T5X does with small ones.
    """
    folder = directory / f"checkpoint_{step}"
    folder.mkdir(parents=True)
    inline = set(inline)
    leaves: dict[str, Any] = {}
    for name, array in arrays.items():
        if name in inline:
            leaves[name] = np.asarray(array)
            continue
        path = f"target.{name.replace('/', '.')}"
        metadata = {"shape": list(array.shape), "chunks": list(array.shape), "compressor": {"id": "gzip", "level": 1}}
        leaves[name] = {
            "driver": "zarr",
            "dtype": str(array.dtype),
            "kvstore": {"driver": "file", "path": f"{path}/"},
            "metadata": metadata,
        }
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": f"{folder / path}/"},
            "metadata": {**metadata, "dtype": array.dtype.str},
        }
        tensorstore.open(spec, create=True, open=False).result().write(array).result()
    state = {"step": np.int32(step), "param_states": {"v": np.zeros(3, np.float32)}}
    target = flax.traverse_util.unflatten_dict(leaves, sep="/")
    tree = {"version": 3, "optimizer": {"target": target, "state": state}}
    (folder / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(tree))
    return folder


def hugging_face_tensors(config: T5Config, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the weights of a model without an exit classifier as transformers names and turns them."""
    tensors = {"shared.weight": arrays["token_embedder/embedding"]}
    if not config.tied_head:
        tensors["lm_head.weight"] = arrays["decoder/logits_dense/kernel"].T
    attentions = {"encoder": ["attention"], "decoder": ["self_attention", "encoder_decoder_attention"]}
    norms = {
        "attention": "attention",
        "self_attention": "self_attention",
        "encoder_decoder_attention": "cross_attention",
    }
    for stack, depth in (("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers)):
        tensors[f"{stack}.final_layer_norm.weight"] = arrays[f"{stack}/{stack}_norm/scale"]
        table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        tensors[table] = arrays[f"{stack}/relpos_bias/rel_embedding"].T
        for index in range(depth):
            ours = f"{stack}/layers_{index}"
            for place, attention in enumerate(attentions[stack]):
                theirs = f"{stack}.block.{index}.layer.{place}"
                tensors[f"{theirs}.layer_norm.weight"] = arrays[f"{ours}/pre_{norms[attention]}_layer_norm/scale"]
                for letter, kernel in {"q": "query", "k": "key", "v": "value", "o": "out"}.items():
                    name = f"{theirs}.{('SelfAttention', 'EncDecAttention')[place]}.{letter}.weight"
                    tensors[name] = arrays[f"{ours}/{attention}/{kernel}/kernel"].T
            theirs = f"{stack}.block.{index}.layer.{len(attentions[stack])}"
            tensors[f"{theirs}.layer_norm.weight"] = arrays[f"{ours}/pre_mlp_layer_norm/scale"]
            for kernel in ("wi_0", "wi_1", "wo") if config.gated_mlp else ("wi", "wo"):
                tensors[f"{theirs}.DenseReluDense.{kernel}.weight"] = arrays[f"{ours}/mlp/{kernel}/kernel"].T
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def write_hugging_face(directory: pathlib.Path, config: T5Config, arrays: Mapping[str, np.ndarray]) -> pathlib.Path:
    """Writes a model as the fourth version of transformers does, without a vocabulary, and returns its folder."""
    directory.mkdir(parents=True, exist_ok=True)
    fields = {
        "architectures": ["T5ForConditionalGeneration"],
        "d_ff": config.mlp_dim,
        "d_kv": config.head_dim,
        "d_model": config.emb_dim,
        "decoder_start_token_id": 0,
        "dropout_rate": 0.1,
        "eos_token_id": 1,
        "feed_forward_proj": "gated-gelu" if config.gated_mlp else "relu",
        "is_encoder_decoder": True,
        "layer_norm_epsilon": 1e-06,
        "model_type": "t5",
        "num_decoder_layers": config.num_decoder_layers,
        "num_heads": config.num_heads,
        "num_layers": config.num_encoder_layers,
        "pad_token_id": 0,
        "relative_attention_max_distance": config.relative_max_distance,
        "relative_attention_num_buckets": config.relative_buckets,
        "tie_word_embeddings": config.tied_head,
        "vocab_size": config.vocab_size,
    }
    (directory / "config.json").write_text(json.dumps(fields, indent=2))
    safetensors.numpy.save_file(hugging_face_tensors(config, arrays), directory / "model.safetensors")
    return directory


def train_vocabulary(
    path: str | os.PathLike[str], texts: Iterable[str] | None = None, size: int = 48, **changes: Any
) -> pathlib.Path:
    """Writes a SentencePiece model with T5's ids and returns its path.

    Args:
      path: The file to write.
      texts: Training texts; some English sentences by default.
      size: Number of ids.
      changes: Options of SentencePiece's trainer.
    """
    model = io.BytesIO()
    options = {"vocab_size": size, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "minloglevel": 2, **changes}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_SENTENCES if texts is None else texts), model_writer=model, **options
    )
    path = pathlib.Path(path)
    path.write_bytes(model.getvalue())
    return path


_SENTENCES = (
    "the cat sat on the mat and the dog sat on the rug",
    "a small red boat sails on the cold blue sea",
    "two old men talk about the rain in the north",
    "she reads a long book while the train waits",
    "who painted the door of the quiet yellow house",
    "five green birds fly over a field of jumping hares and quick zebras",
)


def _standard_deviation(name: str, shape: tuple[int, ...], config: T5Config) -> float:
    if name.endswith("/scale"):
        return 0.2
    if name == "token_embedder/embedding":
        return 1.0
    if name.endswith("/rel_embedding"):
        return 0.7
    if name.endswith("/query/kernel"):
        # T5 does not divide attention logits by sqrt(head_dim).
        return float((config.emb_dim * config.head_dim) ** -0.5) * 2
    if name.startswith("decoder/meta_cls/"):
        return 0.25
    return float(shape[0] ** -0.5)
