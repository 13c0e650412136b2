"""Makes `t5x_bfloat16.npz`: the predictions of T5X's own network in bfloat16 on the golden inputs of the tiny model.

    CALM_BEAM_GOLDENS=goldens python -m tests.calm_beam.make_t5x_bfloat16 T5X

where `T5X` is a checkout of github.com/google-research/t5x (made at cc342d4), of which `t5x/examples/t5/network.py` and
`layers.py` are loaded; they need Flax alone. A decoder cut after layer i gives the prediction after that layer,
teacher-forced on the full model's golden outputs. Stored are tokens and softmax gaps, each (layers, prompts, steps), in
float32 and in bfloat16.
"""

import importlib.util
import os
import pathlib
import sys
import types
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.exits.measures.built_in import softmax_gap

_LAYERS = 8


def main() -> None:
    """Writes the file next to this one."""
    network = _network(pathlib.Path(sys.argv[1]) / "t5x/examples/t5")
    goldens = pathlib.Path(os.environ["CALM_BEAM_GOLDENS"])
    arrays, inputs = (dict(np.load(goldens / f"tiny_{name}.npz")) for name in ("params", "inputs"))
    decoder_inputs = np.pad(inputs["full/tokens"][:, :-1], ((0, 0), (1, 0))).astype(np.int32)
    made: dict[str, np.ndarray] = {}
    for dtype in ("float32", "bfloat16"):
        tokens, gaps = [], []
        for layers in range(1, _LAYERS + 1):
            config = network.T5Config(
                vocab_size=512,
                dtype=jnp.dtype(dtype),
                emb_dim=64,
                num_heads=4,
                num_encoder_layers=_LAYERS,
                num_decoder_layers=layers,
                head_dim=16,
                mlp_dim=128,
                mlp_activations=("gelu", "linear"),
                dropout_rate=0.0,
                logits_via_embedding=False,
            )
            above = {f"layers_{index}" for index in range(layers, _LAYERS)}
            kept = {
                name: array
                for name, array in arrays.items()
                if not (name.startswith("decoder/") and name.split("/")[1] in {*above, "meta_cls"})
            }
            logits = network.Transformer(config).apply(
                {"params": flax.traverse_util.unflatten_dict(kept, sep="/")},
                inputs["encoder_input_tokens"],
                decoder_inputs,
                # Targets are used for masks only: no position is padding.
                jnp.ones_like(decoder_inputs),
                enable_dropout=False,
            )
            tokens.append(jnp.argmax(logits, axis=-1).astype(jnp.int16))
            gaps.append(softmax_gap(logits.astype(jnp.float32)))
        made |= {f"{dtype}/tokens": np.stack(tokens), f"{dtype}/gaps": np.stack(gaps)}
    np.savez_compressed(pathlib.Path(__file__).with_name("t5x_bfloat16.npz"), **jax.device_get(made))


def _network(folder: pathlib.Path) -> Any:
    """Returns the T5X module with this name, without its package."""
    for name in ("t5x", "t5x.examples", "t5x.examples.t5"):
        sys.modules[name] = types.ModuleType(name)
    for name in ("layers", "network"):
        spec = importlib.util.spec_from_file_location(f"t5x.examples.t5.{name}", folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[f"t5x.examples.t5.{name}"] = module
        setattr(sys.modules["t5x.examples.t5"], name, module)
        spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
