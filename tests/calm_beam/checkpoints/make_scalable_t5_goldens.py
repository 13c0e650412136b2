"""Makes `scalable_t5_goldens.npz`: the logits that T5X's `examples/scalable_t5` computes with our weights.

    PYTHONPATH=.:/path/to/t5x python -m tests.calm_beam.checkpoints.make_scalable_t5_goldens

Only two modules of T5X are needed, `network` and `layers`. The outputs are stored, no code of T5X's.
"""

import pathlib

import flax.traverse_util
import numpy as np

from .scalable_trees import ARRAYS, DECODER_INPUTS, MLP_ACTIVATIONS, SCALABLE, SOURCES, scalable_tree


def main() -> None:
    """Writes the file next to this one, after checking that scanning does not matter."""
    from t5x.examples.scalable_t5 import network

    logits = {}
    for scan_axis in (None, 0, 1):
        config = network.T5Config(
            vocab_size=SCALABLE.vocab_size,
            emb_dim=SCALABLE.emb_dim,
            num_heads=SCALABLE.num_heads,
            head_dim=SCALABLE.head_dim,
            mlp_dim=SCALABLE.mlp_dim,
            num_encoder_layers=SCALABLE.num_encoder_layers,
            num_decoder_layers=SCALABLE.num_decoder_layers,
            mlp_activations=MLP_ACTIVATIONS,
            dropout_rate=0.0,
            logits_via_embedding=False,
            scan_layers=scan_axis is not None,
            param_scan_axis=scan_axis or 0,
        )
        tree = flax.traverse_util.unflatten_dict(scalable_tree(SCALABLE, ARRAYS, scan_axis=scan_axis), sep="/")
        found = network.Transformer(config).apply(
            {"params": tree}, SOURCES, DECODER_INPUTS, np.ones_like(DECODER_INPUTS), enable_dropout=False
        )
        logits[str(scan_axis)] = np.asarray(found, np.float32)
    for each in logits.values():
        np.testing.assert_allclose(each, logits["None"], atol=1e-4)
    np.savez_compressed(pathlib.Path(__file__).parent / "scalable_t5_goldens.npz", logits=logits["None"])


if __name__ == "__main__":
    main()
