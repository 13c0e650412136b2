"""`calm-beam suitability`: its verdict, its file, and errors for bad input."""

import inspect
import json
import pathlib
import re
import shlex

import numpy as np
import pytest

import calm_beam as calm
from calm_beam.checkpoints import load_checkpoint, write_native
from calm_beam.decoding.branches import Branch
from calm_beam.decoding.early_exit import EarlyExitDecoder
from calm_beam.evaluation.device_forecast import device_forecast
from calm_beam.evaluation.flops import DecoderSizes
from calm_beam.evaluation.suitability import ExitForecast, Suitability, layer_predictions, suitability_of
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.token_cost import TokenCost
from calm_beam.launch.cli import main
from calm_beam.launch.commands import flag_parsers
from calm_beam.launch.suitability.command import Here, _fastest_here
from calm_beam.manifest import read_manifest
from calm_beam.precision import Precision
from tests.builders import build_arrays, build_checkpoint, build_config, build_prompts, checkpoint_of
from tests.calm_beam.model.llama.builders import build_llama_arrays, build_llama_config, write_word_tokenizer
from tests.numpy_llama import NumpyLlama
from tests.pipelines import id_rows, write_model, write_rows

_SHORT = ("--max_input_length=32", "--max_decode_length=6")


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny random model without a vocabulary."""
    return write_model(tmp_path_factory.mktemp("suitability") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Ten prompts of token ids with references."""
    return write_rows(tmp_path_factory.mktemp("suitability") / "rows.jsonl", id_rows(10))


def test_the_last_layer_predicts_the_full_models_output() -> None:
    """Given greedy outputs, the last layer predicts each of their tokens from the ones before it."""
    checkpoint, prompts = build_checkpoint(), build_prompts(3, 9, 5, 12, 7)
    decoder = EarlyExitDecoder(checkpoint, Branch.at(ExitRule(), None, max_decode_length=8), max_input_length=16)
    outputs = dict(decoder.decode(prompts))
    tokens = [outputs[index].tokens[: outputs[index].length].tolist() for index in range(len(prompts))]
    found = layer_predictions(checkpoint, list(zip(prompts, tokens, strict=True)))
    # Batches are grouped by width, so compare the whole set.
    assert sorted(found.tokens[-1].tolist()) == sorted(token for output in tokens for token in output)
    assert found.tokens.shape == found.gaps.shape == (checkpoint.config.num_decoder_layers, sum(map(len, tokens)))
    # Each of these tokens is more probable than any other by the gap.
    assert found.cross_entropies[-1] <= -np.log(found.gaps[-1].mean())


def test_states_that_are_not_finite_are_refused() -> None:
    """A model whose states are not finite gets no verdict."""
    config = build_config()
    arrays = {**build_arrays(config, 0)}
    arrays["decoder/decoder_norm/scale"] = np.full_like(arrays["decoder/decoder_norm/scale"], np.nan)
    with pytest.raises(ValueError, match=r"logits that are not finite\. Check the checkpoint"):
        layer_predictions(checkpoint_of(config, arrays), [([5, 1], [7, 1])])


def test_python_and_a_file_do_the_same(model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """`calm_beam.suitability` takes the command's options, writes the same file, and returns its findings."""
    asked = {"checkpoint": str(model), "data": [str(data)], "max_input_length": 32, "max_decode_length": 6}
    config = tmp_path / "run.json"
    config.write_text(json.dumps({**asked, "agreeing": 0.9, "output": str(tmp_path / "command.json")}))
    assert main(["suitability", f"--config={config}", "--agreeing=100%", "--device=h100"]) == 0
    found = calm.suitability(
        checkpoint=model,
        data=str(data),
        max_input_length=32,
        max_decode_length=6,
        agreeing=1,
        device="h100",
        output=tmp_path / "call.json",
    )
    written = (tmp_path / "command.json").read_bytes()
    assert (tmp_path / "call.json").read_bytes() == written
    assert json.loads(written)["verdict"] == found.verdict
    flags = vars(flag_parsers("suitability")[0].parse_args([])).keys() - {"config", "json"}
    assert inspect.signature(calm.suitability).parameters.keys() == flags


def test_python_is_refused_in_its_own_words(tmp_path: pathlib.Path) -> None:
    """Errors from Python name arguments."""
    with pytest.raises(ValueError, match=r"^overwrite=True belongs to output, which is missing\.$"):
        calm.suitability(overwrite=True)
    with pytest.raises(
        ValueError, match=r"^agreeing: expected a share above 0 and up to 1, such as 98% or 0\.98, got 3"
    ):
        calm.suitability(agreeing=3)
    assert list(tmp_path.iterdir()) == []


def test_tells_and_writes_what_was_found(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A random model, whose layers seldom agree, is reported as unsuitable; the file has the same figures."""
    output = tmp_path / "found.json"
    command = ["suitability", f"--checkpoint={model}", f"--data={data}", *_SHORT, f"--output={output}"]
    assert main([*command, "--max_examples=6"]) == 0
    shown = capsys.readouterr().out
    found = json.loads(output.read_text(encoding="utf-8"))
    checkpoint = load_checkpoint(model)
    assert found["model"]["fingerprint"] == checkpoint.fingerprint()
    assert len(found["agreement"]) == checkpoint.config.num_decoder_layers
    assert found["agreement"][-1] == 1
    assert found["verdict"] in shown
    assert found["advice"] in shown
    for forecast in found["exits"]:
        assert re.search(rf"{forecast['layers']:.2f} +{forecast['work']:.0%}", shown)
    assert found["verdict"].startswith("Not suitable as it is: softmax exits would use about ")
    assert found["sample"].startswith("6 prompts: of 10 examples")
    assert found["sample"] in shown
    assert all(f"{share:.1%}" in shown for share in found["agreement"])
    assert main(command) == 2
    assert "exists already. Choose another file, or pass --overwrite" in capsys.readouterr().err


def test_the_next_command_runs_as_printed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For a suitable model, the printed calibration of the same model and data runs as it is."""
    monkeypatch.chdir(tmp_path)
    config = build_config(num_encoder_layers=1, num_decoder_layers=2)
    arrays = {**build_arrays(config, 0)}
    # The last layer adds next to nothing, so the first one predicts its output.
    for name in arrays:
        if name.startswith("decoder/layers_1/") and name.endswith(("wo/kernel", "out/kernel")):
            arrays[name] = arrays[name] * np.float32(1e-6)
    write_model(tmp_path / "a model", config=config)
    (tmp_path / "a model" / "sentencepiece.model").write_bytes(b"")
    write_native(
        tmp_path / "other model", config, arrays=arrays, vocabulary_path=tmp_path / "a model" / "sentencepiece.model"
    )
    (tmp_path / "other model" / "sentencepiece.model").unlink()
    for part in (1, 2):
        write_rows(tmp_path / f"rows-{part}.jsonl", [{**row, "id": f"{part}-{row['id']}"} for row in id_rows(20)])
    asked = ["--checkpoint=other model", "--data=rows-1.jsonl,rows-2.jsonl", *_SHORT, "--engine=xla"]
    assert main(["suitability", *asked, "--agreeing=0.5", "--output=found.json"]) == 0
    shown = capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert (
        f"Next:\n  {found['next']}\nIt may use these prompts, since no figure above decides anything in it.\n"
        "Where a figure above decides something, such as delta or how tokens exit, calibrate on other prompts.\n"
    ) in shown
    assert shlex.split(found["next"]) == [
        *("calm-beam", "calibrate", "--checkpoint=other model", "--data=rows-1.jsonl,rows-2.jsonl"),
        *("--max_input_length=32", "--max_decode_length=6", "--engine=xla"),
    ]
    assert "Measured here, one prompt at a time," in shown
    assert (
        "An oracle that exits at the first layer whose prediction is the last layer's uses 1.00 of 2 layers a t"
        in shown
    )
    here = found["here"]
    assert len(here["gain_of_exits"]) == len(found["exits"])
    assert here["seconds"].keys() == {"layer", "output", "logits_test"}
    assert main([*shlex.split(found["next"])[1:], "--objective=layers", "--metric=token_f1"]) == 0
    assert read_manifest("calibration/manifest.json").plan is not None
    # A folder that is taken now is not offered again.
    assert main(["suitability", *asked, "--agreeing=0.5"]) == 0
    assert " --output=calibration_2\n" in capsys.readouterr().out


def test_a_model_that_gains_little_is_trained_next(
    model: pathlib.Path, data: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where exits save next to nothing, the next command trains the same model with the same prompts, on other rows."""
    command = ["suitability", f"--checkpoint={model}", f"--data={data}", *_SHORT, "--task_prefix=say it: "]
    assert main([*command, "--engine=xla", "--device=h100"]) == 0
    shown = capsys.readouterr().out
    assert "Not suitable as it is" in shown
    after = shown.partition("Next:\n")[2].splitlines()
    words = shlex.split(after[0])
    assert words == [
        *("calm-beam", "train", f"--checkpoint={model}", "--task_prefix=say it: ", "--max_input_length=32"),
        *("--data=train.jsonl", "--validation_data=validation.jsonl", "--output=trained_model"),
    ]
    # Every flag is one of training.
    flag_parsers("train")[0].parse_args(words[2:])
    expected = "train.jsonl and validation.jsonl stand for rows of yours with answers"
    assert after[1] == f"{expected}, other than those that will calibrate."
    assert "calm-beam calibrate" not in shown


def test_time_and_operations_may_choose_other_layers() -> None:
    """If other exits are fastest than have the fewest operations, the sentence says so, with both speeds."""
    every = ExitForecast(min_exit_layer=1, exit_interval=1, threshold=0.5, layers=2.0, work=0.9)
    fewer = ExitForecast(min_exit_layer=2, exit_interval=2, threshold=0.5, layers=2.5, work=0.7)
    found = Suitability(
        agreement=(0.9,) * 4,
        perplexity=(2.0,) * 4,
        first_agreement=1.5,
        settled=2.0,
        exits=(every, fewer),
        agreeing=0.98,
    )
    cost = TokenCost.of_layers(4)
    differing = _fastest_here(Here(cost=cost, gains=(1.5, 1.25)), found)
    assert "--min_exit_layer=1 --exit_interval=1 are forecast to be fastest, at 2.00 layers a token: 1.50" in differing
    assert differing.endswith(
        "Time is not operations: those with the fewest operations, --min_exit_layer=2 --exit_interval=2, are forecast "
        "to be 1.25 times as fast."
    )
    assert "Time is not operations" not in _fastest_here(Here(cost=cost, gains=(1.25, 1.5)), found)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--data=x.jsonl",), "--checkpoint is missing"),
        (("--checkpoint={model}",), "--data is missing"),
        (
            ("--checkpoint={model}", "--data={data}", "--agreeing=98"),
            "--agreeing: expected a share above 0 and up to 1",
        ),
        (("--checkpoint=nowhere", "--data={data}"), "nowhere"),
        (("--checkpoint={model}", "--data={data}", "--output={data}"), "exists already"),
    ],
)
def test_bad_input_is_refused(
    flags: tuple[str, ...],
    message: str,
    model: pathlib.Path,
    data: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Bad input is refused with the reason before anything is decoded."""
    assert main(["suitability", *(flag.format(model=model, data=data) for flag in flags)]) == 2
    assert message in capsys.readouterr().err


def test_a_share_of_all_tokens_is_what_exits_keep() -> None:
    """Tokens are forecast given the full model's tokens: if all stay, exits match the oracle's or are deeper."""
    checkpoint = build_checkpoint()
    pairs = [([5, 9, 1], [7, 8, 1]), ([4, 1], [6, 1])]
    predictions = layer_predictions(checkpoint, pairs)
    found = suitability_of(predictions, sizes=DecoderSizes.of(checkpoint.config), agreeing=0.999)
    assert found.exits[0].layers >= found.first_agreement


def test_a_decoder_only_model_that_was_not_trained_for_it_will_not_exit(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An untrained decoder-only model is unsuitable; zeros are tokens, and each end-of-sequence id ends an output."""
    config = build_llama_config(vocab_size=64, max_positions=128, num_decoder_layers=6, end_ids=(0, 2))
    tokenizer = write_word_tokenizer(tmp_path / "tokenizer.json", 64, ends=config.end_ids)
    arrays = build_llama_arrays(config, 0)
    # The last layer's contribution decides the output.
    arrays["decoder/layers_5/mlp/wo/kernel"] *= np.float32(20)
    write_native(tmp_path / "model", config, arrays=arrays, vocabulary_path=tokenizer)
    generator = np.random.default_rng(0)
    rows = [{"input_ids": [*generator.integers(0, 64, size=5).tolist(), 9]} for _ in range(8)]
    data, output = tmp_path / "rows.jsonl", tmp_path / "found.json"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [f"--checkpoint={tmp_path / 'model'}", f"--data={data}", f"--output={output}", *_SHORT]
    assert main(["suitability", *flags]) == 0
    found = json.loads(output.read_text(encoding="utf-8"))
    plain, agrees = NumpyLlama(config, arrays), []
    for row in rows:
        tokens = plain.decode(row["input_ids"], ExitRule(), 1.0, max_decode_length=6).tokens
        states = plain.states([*row["input_ids"], *tokens[:-1]])[:, len(row["input_ids"]) - 1 :]
        predicted = plain.logits(states).argmax(axis=-1)
        assert predicted[-1].tolist() == tokens
        agrees.append(predicted == predicted[-1])
    np.testing.assert_allclose(found["agreement"], np.concatenate(agrees, axis=1).mean(axis=1))
    assert "Not suitable as it is" in capsys.readouterr().out
    assert "it was not trained to exit early" in found["verdict"]


def test_a_device_is_forecast_beside(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--device` adds the sample's positions, the gain of each choice of layers, and that nothing was run."""
    output = tmp_path / "found.json"
    command = ["suitability", f"--checkpoint={model}", f"--data={data}", *_SHORT, f"--output={output}"]
    assert main([*command, "--max_examples=4", "--device=h100"]) == 0
    shown, found = capsys.readouterr().out, json.loads(output.read_text(encoding="utf-8"))
    on_device = found["on_device"]
    forecast = device_forecast(load_checkpoint(model).config, "h100", Precision(), positions=on_device["positions"])
    assert on_device["full_microseconds"] == 1e6 * forecast.full_seconds()
    assert len(on_device["gain_of_exits"]) == len(found["exits"])
    for gain, exits in zip(on_device["gain_of_exits"], found["exits"], strict=True):
        rule = ExitRule(min_exit_layer=exits["min_exit_layer"], exit_interval=exits["exit_interval"])
        assert gain == forecast.full_seconds() / forecast.mean_seconds(exits["layers"], rule)
    assert f"{max(on_device['gain_of_exits']):.2f} times as fast as the full model, one prompt at a time" in shown
    assert "Least time of a step on NVIDIA H100 SXM" in shown
    assert shown.count("A forecast from bytes and operations: nothing was run.") == 1
