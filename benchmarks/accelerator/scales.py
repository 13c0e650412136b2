"""How much is measured: for an accelerator in fifteen minutes, for a CPU in three."""

import dataclasses

from benchmarks.paper_model import LARGE_DIMENSIONS, PAPER_DIMENSIONS
from calm_beam.precision import Precision

from .part import Scale, Way

_FLOAT32 = Way(name="float32")
_BFLOAT16 = Way(name="bfloat16", precision=Precision(dtype="bfloat16"))

FULL = Scale(
    models=(("paper's dimensions", PAPER_DIMENSIONS), ("T5 1.1 large", LARGE_DIMENSIONS)),
    ways=(
        _FLOAT32,
        _BFLOAT16,
        Way(name="float32, default products", precision=Precision(matmul_precision="default")),
    ),
    programs="",
    vocabularies=(32128, 128256),
    widths=(512, 2048, 4096),
    rows=(1, 8, 64, 512, 2048),
    square=8192,
    copied_bytes=1 << 30,
    prompts=512,
    prompt_tokens=64,
    steps=32,
    thresholds=(20, 100),
    single_prompts=8,
    batches=(64, 256),
    runs=3,
)
QUICK = Scale(
    models=(
        (
            "small",
            dataclasses.replace(
                PAPER_DIMENSIONS, vocab_size=2048, emb_dim=128, num_heads=2, mlp_dim=256, num_encoder_layers=2
            ),
        ),
    ),
    ways=(_FLOAT32, _BFLOAT16),
    programs="^(embeddings|decoder layer, softmax|decisions, softmax)",
    vocabularies=(2048,),
    widths=(128,),
    rows=(1, 64),
    square=1024,
    copied_bytes=1 << 26,
    prompts=16,
    prompt_tokens=16,
    steps=8,
    thresholds=(20,),
    single_prompts=2,
    batches=(8,),
    runs=1,
)
