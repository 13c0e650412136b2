"""A decoder-only model from its folder to answers under a manifest."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest

from calm_beam.checkpoints import write_hugging_face, write_native
from calm_beam.exits.rule import ExitRule
from calm_beam.launch.cli import main
from calm_beam.serving import Generator
from tests.calm_beam.model.llama.builders import build_llama_arrays, build_llama_config, write_word_tokenizer
from tests.numpy_llama import NumpyLlama


@pytest.mark.slow
# Seeds of weights whose decisions are far from ties, and the lowest thresholds that are proved.
@pytest.mark.parametrize(
    ("seed", "threshold", "changes"),
    [(1, 0.9, {}), (2, 0.5, {"num_experts": 4, "experts_per_token": 2, "normed_expert_weights": True})],
    ids=["llama", "mixtral"],
)
def test_a_decoder_only_model_is_calibrated_and_served(
    seed: int, threshold: float, changes: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    """Prompts of mixed lengths that contain id 0 are answered as by plain numpy at the manifest's threshold."""
    sizes: dict[str, Any] = {"vocab_size": 64, "emb_dim": 16, "head_dim": 8, "mlp_dim": 32, "max_positions": 128}
    config = build_llama_config(**sizes, end_ids=(1, 7), exit_classifier=2, **changes)
    arrays = build_llama_arrays(config, seed)
    tokenizer = write_word_tokenizer(tmp_path / "tokenizer.json", 64, ends=config.end_ids)
    write_hugging_face(tmp_path / "model", config, arrays=arrays, vocabulary_path=tokenizer)
    generator = np.random.default_rng(0)
    # Zeros at the end of a row are read as padding.
    prompts = [[*generator.integers(0, 64, size=place % 29).tolist(), 9] for place in range(60)]
    rows = [{"id": str(i), "input_ids": ids, "reference_ids": [[5, 6, 9]]} for i, ids in enumerate(prompts)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        "checkpoint": tmp_path / "model",
        "data": tmp_path / "data.jsonl",
        "output": tmp_path / "run",
        "max_input_length": 30,
        "max_decode_length": 10,
        "thresholds": "0.9,0.5,0.2",
        "delta": 0.5,
        "epsilon": 0.2,
    }
    assert main(["calibrate", *(f"--{name}={value}" for name, value in flags.items())]) == 0
    served = Generator.from_manifest(tmp_path / "run" / "manifest.json", tmp_path / "model")
    assert served.entry.threshold == threshold
    plain = NumpyLlama(config, arrays)
    together = served.generate_batch(prompts[:12])
    assert any(layer < 3 for answer in together for layer in answer.exit_layers)
    for prompt, answer in zip(prompts, together, strict=False):
        expected = plain.decode(prompt, ExitRule(), threshold, max_decode_length=10)
        assert list(answer.tokens) == expected.tokens
        assert answer.text == " ".join(f"w{token}" for token in expected.tokens if token not in config.end_ids)
        assert list(answer.exit_layers) == expected.exit_layers
        alone = served.generate(prompt)
        assert (alone.tokens, alone.exit_layers) == (answer.tokens, answer.exit_layers)


@pytest.mark.slow
def test_in_bfloat16_the_manifest_says_so_and_serving_follows(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that was calibrated in bfloat16 is served in it; another precision is refused."""
    config = build_llama_config(vocab_size=64, emb_dim=16, head_dim=8, mlp_dim=32, max_positions=128, end_ids=(1, 7))
    arrays = build_llama_arrays(config, 1)
    tokenizer = write_word_tokenizer(tmp_path / "tokenizer.json", 64, ends=config.end_ids)
    write_native(tmp_path / "model", config, arrays=arrays, vocabulary_path=tokenizer)
    prompts = [[*range(2, 3 + place % 20), 9] for place in range(30)]
    rows = [{"id": str(i), "input_ids": ids, "reference_ids": [[5, 6, 9]]} for i, ids in enumerate(prompts)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--max_input_length=24", "--max_decode_length=6", "--thresholds=0.9,0.2", "--delta=0.6", "--epsilon=0.3"]
    places = [f"--checkpoint={tmp_path / 'model'}", f"--data={tmp_path / 'data.jsonl'}", f"--output={tmp_path / 'run'}"]
    assert main(["calibrate", *places, *flags, "--dtype=bfloat16"]) == 0
    manifest = tmp_path / "run" / "manifest.json"
    assert json.loads(manifest.read_text())["decode"]["dtype"] == "bfloat16"
    served = Generator.from_manifest(manifest, tmp_path / "model")
    assert served.generate(prompts[0]).tokens
    generate = ["generate", f"--manifest={manifest}", f"--checkpoint={tmp_path / 'model'}", "--prompt=w5 w9"]
    assert main([*generate, "--dtype=float32"]) == 2
    assert "the manifest was calibrated with bfloat16" in capsys.readouterr().err


def test_without_its_tokenizer_it_is_refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without its tokenizer the model is refused, since end-of-sequence ids would be compared as content."""
    config = build_llama_config(vocab_size=64, emb_dim=16, head_dim=8, mlp_dim=32, max_positions=128, end_ids=(1, 7))
    write_native(tmp_path / "model", config, arrays=build_llama_arrays(config, 1), vocabulary_path=None)
    (tmp_path / "data.jsonl").write_text(json.dumps({"id": "a", "input_ids": [5, 9]}) + "\n")
    flags = [f"--checkpoint={tmp_path / 'model'}", f"--data={tmp_path / 'data.jsonl'}", f"--output={tmp_path / 'run'}"]
    assert main(["calibrate", *flags]) == 2
    assert "ends its outputs with 2 ids of its own (1, 7)" in capsys.readouterr().err
