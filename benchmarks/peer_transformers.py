"""Tokens per second of the full model against transformers, on the device that PyTorch and JAX both find.

Both decode random weights of the same sizes greedily, prompts of 64 tokens and outputs of 32, alternately; of each the
fastest round counts. Their outputs are not compared (`tests/calm_beam/checkpoints/test_transformers.py` does that).
Static exits at a quarter of the layers, which need no tests, show the largest possible gain.

    pip install torch transformers
    XLA_PYTHON_CLIENT_PREALLOCATE=false python -m benchmarks.peer_transformers
"""

import argparse
import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding.branches import Branch
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.single_prompts import single_prompt_decoder
from calm_beam.exits.rule import ExitRule
from calm_beam.model import T5Config
from calm_beam.precision import Precision

from .machine import describe_machine
from .paper_model import LARGE_DIMENSIONS, PAPER_DIMENSIONS, build_paper_model, draw_prompts

_MODELS = {"paper": PAPER_DIMENSIONS, "large": LARGE_DIMENSIONS}
_PROMPT_TOKENS, _STEPS = 64, 32
_QUARTER = 0.25
_STATIC = ExitRule(confidence="static")


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a line for every model, type and number of prompts at a time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", default="paper", help=f"some of {', '.join(_MODELS)}, separated by commas")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--sizes", default="1,64,256", help="prompts at a time")
    parser.add_argument("--rounds", type=int, default=3)
    flags = parser.parse_args(argv)
    torch, peer = importlib.import_module("torch"), importlib.import_module("transformers")
    print(f"{describe_machine()}; PyTorch {torch.__version__}, transformers {peer.__version__}", flush=True)
    for name in flags.models.split(","):
        checkpoint = build_paper_model(config=_MODELS[name])
        for dtype in flags.dtypes.split(","):
            for size in map(int, flags.sizes.split(",")):
                prompts = draw_prompts(size, length=_PROMPT_TOKENS, vocab_size=checkpoint.config.vocab_size)
                ways = {
                    "transformers": _by_transformers(torch, peer, checkpoint.config, dtype, prompts),
                    "full model": _here(checkpoint, None, dtype, prompts),
                    "static exits": _here(checkpoint, _QUARTER, dtype, prompts),
                }
                speeds = _speeds(ways, rounds=flags.rounds)
                words = "; ".join(
                    f"{way} {speed:,.0f} tokens/s ({speed / speeds['transformers']:.2f})"
                    for way, speed in speeds.items()
                )
                print(f"{name}, {dtype}, {size} at a time: {words}", flush=True)


def _speeds(ways: dict[str, Callable[[], int]], *, rounds: int) -> dict[str, float]:
    """Returns tokens a second of each; all are run once before, which compiles."""
    for decode in ways.values():
        decode()
    speeds = dict.fromkeys(ways, 0.0)
    for _ in range(rounds):
        for way, decode in ways.items():
            start = time.perf_counter()
            tokens = decode()
            speeds[way] = max(speeds[way], tokens / (time.perf_counter() - start))
    return speeds


def _here(
    checkpoint: Checkpoint, threshold: float | None, dtype: str, prompts: Sequence[Sequence[int]]
) -> Callable[[], int]:
    branch = Branch.at(_STATIC, threshold, max_decode_length=_STEPS)
    precision = Precision(dtype=dtype)
    if len(prompts) == 1:
        single = single_prompt_decoder(
            checkpoint, branch, max_input_length=_PROMPT_TOKENS, exit_head="exact", precision=precision
        )
        return lambda: sum(result.length for _, result in single.decode(prompts))
    decoder = Decoder(
        checkpoint,
        [branch],
        max_input_length=_PROMPT_TOKENS,
        batch_size=len(prompts),
        exit_head="exact",
        precision=precision,
    )
    return lambda: sum(int(result.lengths[0]) for _, result in decoder.decode(prompts))


def _by_transformers(
    torch: Any, peer: Any, config: T5Config, dtype: str, prompts: Sequence[Sequence[int]]
) -> Callable[[], int]:
    """Returns what has transformers write all outputs to their full length, and counts their tokens."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = peer.T5Config(
        vocab_size=config.vocab_size,
        d_model=config.emb_dim,
        d_kv=config.head_dim,
        d_ff=config.mlp_dim,
        num_layers=config.num_encoder_layers,
        num_decoder_layers=config.num_decoder_layers,
        num_heads=config.num_heads,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
    )
    model = peer.T5ForConditionalGeneration(sizes).to(device, getattr(torch, dtype)).eval()
    ids = torch.tensor(prompts, device=device)

    def decode() -> int:
        with torch.inference_mode():
            found = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=_STEPS,
                min_new_tokens=_STEPS,
                do_sample=False,
                num_beams=1,
            )
        # The first is the token that starts the decoder. Brought here, so that all has been computed.
        return int(found.cpu()[:, 1:].numel())

    return decode


if __name__ == "__main__":
    main()
