"""Facts that T5X's layouts lack come from `config.gin`, from the user, or are assumed with a message."""

import pathlib

import pytest

from calm_beam.checkpoints import CheckpointError, Declared, load_checkpoint
from tests.builders import build_arrays, build_config, write_t5x

_CONFIG = build_config(num_encoder_layers=1, num_decoder_layers=1)
_ARRAYS = build_arrays(_CONFIG, 0)

# As gin writes it for T5X: macros first, then one parameter a line.
_OF_T5X = """
import seqio
from t5x.examples.t5 import network
from t5x import utils

# Macros:
# ==============================================================================
DROPOUT_RATE = 0.0
MIXTURE_OR_TASK_NAME = 'wmt_t2t_ende_v003'
TASK_FEATURE_LENGTHS = {'inputs': 256, 'targets': 256}

# Parameters for network.T5Config:
# ==============================================================================
network.T5Config.dropout_rate = %DROPOUT_RATE
network.T5Config.dtype = 'bfloat16'
network.T5Config.mlp_activations = ('swish', 'linear')

# Parameters for train/utils.DatasetConfig:
# ==============================================================================
train/utils.DatasetConfig.batch_size = 128
train/utils.DatasetConfig.module = @network.Transformer()
"""


def _model(folder: pathlib.Path, gin: str | None = None) -> pathlib.Path:
    write_t5x(folder, _ARRAYS)
    if gin is not None:
        (folder / "config.gin").write_text(gin)
    return folder


@pytest.mark.parametrize(
    ("gin", "activation", "distance"),
    [
        (_OF_T5X, "silu", 128),
        ("network.T5Config:\n  # Gated.\n  vocab_size = 64\n  mlp_activations = ('relu', 'linear')\n", "relu", 128),
        ("dense.MlpBlock.activations = ('silu', 'linear')", "silu", 128),
        ("network.T5Config.mlp_activations = \\\n    ('swish',\n     'linear')\n", "silu", 128),
        ("A = 'swish'\nB = (%A, 'linear')\nnetwork.T5Config.mlp_activations = %B\n", "silu", 128),
        ("T5Config.mlp_activations = ['gelu', 'linear']\nx.RelativePositionBiases.max_distance = 200", "gelu", 200),
        (
            "encoder/MlpBlock.activations=('swish','linear')\ndecoder/MlpBlock.activations=('silu','linear')",
            "silu",
            128,
        ),
        (
            "a.T5Config.mlp_activations = ('gelu', 'linear')\na.T5Config.mlp_activations = ('swish', 'linear')",
            "silu",
            128,
        ),
        ("N.T5Config.emb_dim = 8\nother.mlp_activations = ('tanh',)\nMY_activations = 5", "gelu", 128),
    ],
    ids=["t5x", "block", "flaxformer", "lines", "macros", "distance", "scopes", "last", "none"],
)
def test_config_gin_is_read(tmp_path: pathlib.Path, gin: str, activation: str, distance: int) -> None:
    """Activation and distance are read from `config.gin`, next to the step or in it, in any of gin's forms."""
    config = load_checkpoint(_model(tmp_path, gin)).config
    assert (config.activation, config.relative_max_distance) == (activation, distance)
    (tmp_path / "config.gin").rename(tmp_path / "checkpoint_1000" / "config.gin")
    assert load_checkpoint(tmp_path).config == config


def test_the_file_of_another_folder_is_not_read(tmp_path: pathlib.Path) -> None:
    """A model in a folder that is no step of a run ignores files in the folder above."""
    (_model(tmp_path, _OF_T5X) / "checkpoint_1000").rename(tmp_path / "model")
    assert load_checkpoint(tmp_path / "model").config.activation == "gelu"


def test_what_is_assumed_is_said(tmp_path: pathlib.Path) -> None:
    """Facts without a file are T5's, and a message says so and why; for facts with a file, it says where."""
    alone = load_checkpoint(_model(tmp_path))
    assert alone.config == _CONFIG
    assert alone.assumed == (
        "Activation is assumed to be gelu, and relative max distance is assumed to be 128, as in T5: there is no "
        f"config.gin in {tmp_path}/checkpoint_1000 or {tmp_path}. If that is not so, pass --activation and "
        "--relative_max_distance.",
    )
    (tmp_path / "config.gin").write_text(_OF_T5X)
    beside = load_checkpoint(tmp_path)
    assert beside.stated == (f"Activation is silu: {tmp_path}/config.gin says so.",)
    assert beside.assumed == (
        f"Relative max distance is assumed to be 128, as in T5: {tmp_path}/config.gin does not say. If that is not so, "
        "pass --relative_max_distance.",
    )


def test_what_the_user_says(tmp_path: pathlib.Path) -> None:
    """A user's declarations apply where files have none, and nothing is assumed then."""
    _model(tmp_path)
    found = load_checkpoint(tmp_path, declared=Declared(activation="silu", relative_max_distance=64))
    assert (found.config.activation, found.config.relative_max_distance) == ("silu", 64)
    assert found.stated == ("Activation is silu: you said so.", "Relative max distance is 64: you said so.")
    assert not found.assumed


def test_contradictions_are_refused(tmp_path: pathlib.Path) -> None:
    """A user's declaration that contradicts the file is refused with both, in every layout."""
    _model(tmp_path, _OF_T5X)
    with pytest.raises(CheckpointError, match=r"activation is silu by .*config\.gin, but relu was passed"):
        load_checkpoint(tmp_path, declared=Declared(activation="relu"))
    assert load_checkpoint(tmp_path, declared=Declared(activation="silu")).config.activation == "silu"
    with pytest.raises(CheckpointError, match="activation must be one of gelu, silu, relu; got 'swish'"):
        Declared(activation="swish")


@pytest.mark.parametrize("distance", [16, 0, -5, 10**30])
def test_distances_out_of_sense_are_refused(tmp_path: pathlib.Path, distance: int) -> None:
    """A distance without room for the wider buckets, or beyond the device's integers, is refused."""
    with pytest.raises(CheckpointError, match="relative_max_distance must be"):
        load_checkpoint(_model(tmp_path), declared=Declared(relative_max_distance=distance))


@pytest.mark.parametrize(
    ("gin", "message"),
    [
        ("T5Config.mlp_activations = ('tanh', 'linear')", r"is \('tanh', 'linear'\); only gelu, silu, swish, relu are"),
        ("T5Config.mlp_activations = ('linear', 'gelu')", "only gelu, silu, swish, relu are supported"),
        ("T5Config.mlp_activations = ()", "only gelu, silu, swish, relu are supported"),
        ("T5Config.mlp_activations = 5", "is 5; only gelu"),
        ("T5Config.mlp_activations = ('relu',)", "but the feed-forward layers have wi_0 and wi_1"),
        ("T5Config.mlp_activations = %A", "is %A, of which the file does not say the value"),
        ("A = %A\nT5Config.mlp_activations = %A", "is %A, of which the file does not say the value"),
        ("T5Config.mlp_activations = @activations()", "is not a literal"),
        ("T5Config.mlp_activations = __import__('os').getcwd()", "is not a literal"),
        ("T5Config.mlp_activations = ", "is not a literal"),
        ("T5Config.mlp_activations = (", "cannot be read as a gin file"),
        ("  a = 1\n b = 2\n", "cannot be read as a gin file"),
        ("T5Config.mlp_activations = " + "(" * 5000 + ")" * 5000, "cannot be read as a gin file|is too long"),
        ("".join(f"M{i} = (%M{i + 1}, %M{i + 1})\n" for i in range(40)) + "M40 = 1\nT5Config.mlp_activations = %M0",
         "is too long"),
        ("".join(f"M{i} = %M{i + 1}\n" for i in range(5000)) + "M5000 = 1\nT5Config.mlp_activations = %M0", "too long"),
        ("a/MlpBlock.activations = ('gelu','linear')\nb/MlpBlock.activations = ('relu','linear')", "only one for"),
        ("RelativePositionBiases.max_distance = 128.0", "is 128.0, expected a whole number"),
        ("RelativePositionBiases.max_distance = 3", "relative_max_distance must be above 16"),
        ("x.MultiHeadDotProductAttention.rescale_logits = True", "rescale_logits is True; only False is supported"),
        ("\0", "cannot be read as a gin file"),
    ],
)  # fmt: skip
def test_what_config_gin_must_not_say(tmp_path: pathlib.Path, gin: str, message: str) -> None:
    """Another architecture, another model's file, and values that are no literals are refused; nothing is run."""
    with pytest.raises(CheckpointError, match=message) as error:
        load_checkpoint(_model(tmp_path, gin))
    assert str(tmp_path) in str(error.value)


def test_bytes_that_are_no_text(tmp_path: pathlib.Path) -> None:
    """A `config.gin` that is not UTF-8 is refused by name."""
    _model(tmp_path)
    (tmp_path / "config.gin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match=r"config\.gin: cannot be read as UTF-8 text"):
        load_checkpoint(tmp_path)


def test_another_activation_is_another_model(tmp_path: pathlib.Path) -> None:
    """Fingerprints distinguish activations and distances; those of T5's own do not change."""
    plain = load_checkpoint(_model(tmp_path))
    others = [
        load_checkpoint(tmp_path, declared=declared).fingerprint()
        for declared in (Declared(activation="silu"), Declared(activation="relu"), Declared(relative_max_distance=64))
    ]
    assert load_checkpoint(tmp_path, declared=Declared(activation="gelu")).fingerprint() == plain.fingerprint()
    assert len({plain.fingerprint(), *others}) == 4
