"""Outputs of models saved by transformers, against its own, which `make_decoder_only_goldens.py` stored."""

import functools
import json
import pathlib
import re

import jax
import numpy as np
import pytest

from calm_beam.checkpoints import Checkpoint, load_checkpoint
from calm_beam.checkpoints.hugging_face.decoder_only import FAMILIES
from calm_beam.decoding.branches import sweep_branches
from calm_beam.decoding.decoder import Decoder
from calm_beam.exits.rule import ExitRule
from calm_beam.model import network_of
from tests.calm_beam.checkpoints.make_decoder_only_goldens import FOLDER, STEPS, prompts, sequences
from tests.sampling import sampled

_FOLDERS = sorted(folder.name for folder in FOLDER.iterdir())
_each_model = pytest.mark.parametrize("name", _FOLDERS)
_each_sampled_model = pytest.mark.parametrize(
    "name",
    sampled(
        _FOLDERS, keep=[_FOLDERS.index(name) for name in ("mistral", "yarn", "phi3_longrope", "gemma2", "mixtral")]
    ),
)


@functools.cache
def _model(name: str) -> tuple[Checkpoint, dict[str, np.ndarray]]:
    with np.load(FOLDER / name / "expected.npz") as expected:
        return load_checkpoint(FOLDER / name), dict(expected)


def test_every_family_and_scaling_is_there() -> None:
    """Every family and scaling has a folder, so that a lost one is noticed."""
    scalings = {_model(name)[0].config.rope_scaling.kind for name in _FOLDERS}
    assert scalings == {"default", "linear", "dynamic", "llama3", "yarn", "longrope"}
    types = {json.loads((FOLDER / name / "config.json").read_text())["model_type"] for name in _FOLDERS}
    assert types == FAMILIES.keys()
    assert {"qwen3_moe_normed", "llama_tied"} <= set(_FOLDERS)


def test_every_family_is_in_the_documentation() -> None:
    """The table of docs/decoder_only.md has a line for each family that is read, and no other."""
    page = (pathlib.Path(__file__).parents[3] / "docs" / "decoder_only.md").read_text(encoding="utf-8")
    table = page.split("| `model_type` |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == FAMILIES.keys()


@_each_model
def test_logits_of_every_layer(name: str) -> None:
    """Logits of every layer are within 1e-4 at every position of up to 48 tokens."""
    checkpoint, expected = _model(name)
    apply = jax.jit(network_of(checkpoint.config).apply)
    for place, tokens in enumerate(sequences(int(expected["seed"]))):
        logits = apply({"params": checkpoint.parameters()}, np.array([tokens], np.int32))
        np.testing.assert_allclose(logits[:, 0], expected[f"logits_{place}"], rtol=0, atol=2e-4)


@_each_sampled_model
def test_outputs_of_all_layers_and_of_fewer(name: str) -> None:
    """50 greedy outputs are equal, with all layers and without the last, as threshold m / L gives them."""
    checkpoint, expected = _model(name)
    depth = checkpoint.config.num_decoder_layers
    decoder = Decoder(
        checkpoint,
        sweep_branches(ExitRule(confidence="static"), ((depth - 1) / depth,), max_decode_length=STEPS),
        max_input_length=36,
    )
    texts = prompts(int(expected["seed"]))
    found = dict(decoder.decode(texts))
    for lane, golden in enumerate((expected["greedy"], expected["greedy_of_a_shallower_model"])):
        for index, tokens in enumerate(golden.tolist()):
            assert found[index].tokens[lane, : found[index].lengths[lane]].tolist() == [t for t in tokens if t >= 0]
