"""`calm-beam inspect`: manifests and checkpoints as text."""

import dataclasses
import json
import pathlib
import re
import sys

import numpy as np
import pytest

from calm_beam.checkpoints import load_checkpoint, write_native
from calm_beam.inputs.vocabularies import ChatRecord, VocabularyRecord
from calm_beam.launch.cli import main
from calm_beam.manifest import DataRecord, ModelRecord, write_manifest
from tests.builders import build_arrays, build_config, write_hugging_face, write_t5x
from tests.calm_beam.checkpoints.decoder_only_folders import write_decoder_only
from tests.calm_beam.manifest.builders import build_manifest, build_plan_record, build_planned_manifest, written_by
from tests.calm_beam.model.llama.builders import build_llama_arrays, build_llama_config
from tests.calm_beam.serving.builders import build_served_manifest
from tests.pipelines import CONFIG, write_model, write_vocabulary


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


def _write(path: pathlib.Path, **changes: object) -> pathlib.Path:
    write_manifest(build_manifest(**changes), path)
    return path


def test_a_manifest_in_words(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Model, decoder, data, choices and the guarantee are printed, from the file or from its directory."""
    path = _write(tmp_path / "manifest.json")
    assert main(["inspect", str(path)]) == 0
    printed = capsys.readouterr()
    for part in (
        "Manifest of 2026-01-31T12:00:00Z; its digest is right.",
        "Model: 6 decoder layers, sha256:6d6f64656c",
        "read from gs://models/t5-small",
        "confidence softmax, schedule decay, tau 4, state propagation from_exit, from layer 1 on; bfloat16.",
        "inputs up to 512 tokens, outputs up to 64; task prefix 'résume: '.",
        "200 examples of gs://data/calibration-*.jsonl.gz; 3 repeated inputs, 7 prompts cut, 1 failed.",
        "never exit",
        build_manifest().guarantee,
    ):
        assert part in printed.out
    assert printed.err == ""
    assert main(["inspect", str(tmp_path)]) == 0
    assert capsys.readouterr() == printed


@pytest.mark.parametrize("of_settings", [False, True])
def test_a_manifest_of_the_first_form_says_so(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], of_settings: bool
) -> None:
    """A manifest of the first format is printed with the name of the format."""
    content = next(each for each in written_by(1).values() if ("kind" in each) == of_settings)
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    assert main(["inspect", str(tmp_path)]) == 0
    kind = ", of kind settings" if of_settings else ""
    said = f"Manifest of {content['created']}{kind}, of form calm-beam/manifest/v1; its digest is right."
    assert said in capsys.readouterr().out


def test_a_plan_in_words(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Losses, tests, clusters and the digest of the plan are printed if the manifest has them."""
    manifest = build_planned_manifest(
        plan=build_plan_record(cluster_key="page"), data=dataclasses.replace(build_manifest().data, clusters=200)
    )
    write_manifest(manifest, tmp_path / "manifest.json")
    assert main(["inspect", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert manifest.plan is not None
    for part in (
        "200 examples in 200 clusters of gs://data/calibration-*.jsonl.gz;",
        "Tests: textual by hoeffding_bentkus of dissimilarity losses; risk by signed_mixture of signed losses. "
        "Procedure: fixed_sequence, bonferroni.",
        f"Plan settled before the run: {manifest.plan.digest}",
        "end of grid",
    ):
        assert part in printed
    write_manifest(build_manifest(), tmp_path / "manifest.json", overwrite=True)
    assert main(["inspect", str(tmp_path)]) == 0
    early = capsys.readouterr().out
    assert "Tests: textual by hoeffding_bentkus. Procedure: fixed_sequence." in early
    assert "Plan" not in early


def test_square_brackets_are_printed_as_they_are(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Paths and patterns with square brackets are no markup."""
    data = DataRecord(
        patterns=("data/[ab]*.jsonl", "[/x].jsonl"),
        examples=200,
        duplicates=3,
        failed=1,
        truncated=7,
        fingerprint="sha256:64",
    )
    model = ModelRecord(uri="/models/[red]/t5", fingerprint="sha256:6d", layers=6)
    path = _write(tmp_path / "manifest.json", data=data, model=model)
    assert main(["inspect", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "200 examples of data/[ab]*.jsonl, [/x].jsonl;" in printed
    assert "read from /models/[red]/t5" in printed


def test_a_manifest_and_its_model(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --checkpoint, a manifest of another model is refused."""
    ours, other = write_model(tmp_path / "ours"), write_model(tmp_path / "other", seed=1)
    path = tmp_path / "manifest.json"
    write_manifest(build_served_manifest(load_checkpoint(ours)), path)
    assert main(["inspect", str(path), f"--checkpoint={ours}"]) == 0
    text = capsys.readouterr().out
    assert f"It belongs to the model in {ours}." in text
    assert "Operations are compared with the full model's" in " ".join(text.split())
    assert main(["inspect", str(path), f"--checkpoint={other}"]) == 1
    printed = capsys.readouterr()
    assert "Thresholds hold for no other model" in printed.err
    assert "its digest is right" not in printed.out


def test_a_changed_manifest_is_refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A number changed by hand gives status 1, and no content is printed."""
    path = _write(tmp_path / "manifest.json")
    content = json.loads(path.read_text())
    content["calibrations"][0]["threshold"] = 0.1
    path.write_text(json.dumps(content))
    assert main(["inspect", str(path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.search("digest is .* the manifest was changed after it was written", printed.err)


def test_a_native_checkpoint(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes, fingerprint and vocabulary of a native model are printed."""
    model = write_model(
        tmp_path / "model",
        config=build_config(exit_classifier=2),
        vocabulary=write_vocabulary(tmp_path / "trained.model"),
    )
    assert main(["inspect", str(model)]) == 0
    printed = capsys.readouterr().out
    checkpoint = load_checkpoint(model)
    weights = sum(array.size for array in checkpoint.arrays.values())
    assert f"Checkpoint in native layout: {model}" in printed
    assert checkpoint.fingerprint() in printed
    assert "2 encoder and 4 decoder layers, width 16, 2 heads of 8, feed-forward 32, 64 token ids, untied" in printed
    assert f"{weights:,} weights" in printed
    assert "Exit classifier: yes." in printed
    assert f"Vocabulary: 40 ids, {model / 'sentencepiece.model'}" in printed


def test_a_t5x_checkpoint(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a folder of checkpoints, the latest is described."""
    write_t5x(tmp_path, build_arrays(CONFIG, 0), step=5)
    latest = write_t5x(tmp_path, build_arrays(CONFIG, 1), step=40)
    assert main(["inspect", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f"Checkpoint in t5x layout: {latest}" in printed
    assert "Exit classifier: no." in printed
    assert "Vocabulary: none in or next to it." in printed


def test_what_no_array_shows(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Assumptions about a T5X model are printed with their reason, declarations with their source."""
    write_t5x(tmp_path, build_arrays(CONFIG, 0))
    assert main(["inspect", str(tmp_path)]) == 0
    assert "is assumed to be 128, as in T5: there is no config.gin in" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path), "--activation=silu", "--relative_max_distance=64"]) == 0
    printed = capsys.readouterr().out
    assert "T5 with gated SiLU:" in printed
    assert "Activation is silu: you said so.\nRelative max distance is 64: you said so.\n" in printed
    (tmp_path / "config.gin").write_text("T5Config.mlp_activations = ('relu', 'linear')")
    assert main(["inspect", str(tmp_path)]) == 0
    assert f"Activation is relu: {tmp_path}/config.gin says so.\n" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path), "--activation=silu"]) == 1
    assert "activation is relu by" in capsys.readouterr().err


def test_layers_with_tables_and_a_vocabulary_with_sentinels(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Relative positions in every layer, and sentinels of the tokenizer's files, are printed."""
    config = build_config(relative_bias_per_layer=True)
    folder = write_model(tmp_path / "model", config=config, vocabulary=write_vocabulary(tmp_path / "trained.model"))
    (folder / "tokenizer_config.json").write_text('{"extra_ids": 4}')
    assert main(["inspect", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "every layer has a table of relative positions of its own" in printed
    assert "Vocabulary: 44 ids, 4 of them sentinels," in printed


def test_weights_that_are_not_finite(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model with NaN is named as damaged, with the array."""
    arrays = build_arrays(CONFIG, 0)
    arrays["decoder/decoder_norm/scale"][3] = np.nan
    write_t5x(tmp_path, arrays)
    assert main(["inspect", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "weights are not finite numbers in decoder/decoder_norm/scale (1 of 16 values)" in error


def test_a_name_on_the_hub(capsys: pytest.CaptureFixture[str]) -> None:
    """A name on the Hub is answered with the command that fetches it."""
    assert main(["inspect", "google/t5-v1_1-small"]) == 2
    assert "hf download google/t5-v1_1-small --local-dir t5-v1_1-small" in capsys.readouterr().err


def test_a_hugging_face_checkpoint(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An original T5 saved by transformers is described with its feed-forward layer and its head."""
    config = build_config(tied_head=True, gated_mlp=False)
    model = write_hugging_face(tmp_path / "model", config, build_arrays(config, 0))
    assert main(["inspect", str(model)]) == 0
    printed = capsys.readouterr().out
    assert f"Checkpoint in hugging_face layout: {model}" in printed
    assert "T5 with ReLU: 2 encoder and 4 decoder layers" in printed
    assert "64 token ids, tied head" in printed


def test_what_exits_have_is_told(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit norms and exit heads are described, each if there are any."""
    for exits, words in (
        ({"exit_norms": True, "exit_heads": True}, "a norm and a head"),
        ({"exit_heads": True}, "a head"),
    ):
        config = build_config(**exits)
        write_native(tmp_path, config, arrays=build_arrays(config, 0), vocabulary_path=None)
        assert main(["inspect", str(tmp_path)]) == 0
        printed = capsys.readouterr().out
        assert f"untied head; every decoder layer below the last exits by {words} of its own; " in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "the following arguments are required: path"),
        (["{tmp}/none"], "{tmp}/none: no such file or directory."),
        (["{tmp}", "--chekpoint=x"], "unknown flag --chekpoint. Did you mean --checkpoint?"),
        (["{tmp}", "--check=x"], "unknown flag --check"),
        (["{tmp}", "--checkpoint=x"], "{tmp} holds no manifest; --checkpoint is for checking one."),
        (["{tmp}", "--vocabulary=x"], "{tmp} holds no manifest; --vocabulary is for checking one."),
        (["{tmp}", "{tmp}"], "unknown argument {tmp}"),
        (["{tmp}", "--runner=DirectRunner"], "unknown flag --runner"),
    ],
)
def test_bad_usage(flags: list[str], message: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has status 2 and says what was wrong."""
    assert main(["inspect", *(flag.format(tmp=tmp_path) for flag in flags)]) == 2
    assert message.format(tmp=tmp_path) in capsys.readouterr().err


def test_a_calibration_that_did_not_finish(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder of a killed calibration is called that, with the way to go on; a folder with less of it is not."""
    (tmp_path / "plans").mkdir()
    assert main(["inspect", str(tmp_path)]) == 1
    assert "no model here" in capsys.readouterr().err
    (tmp_path / "generations").mkdir()
    assert main(["inspect", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}: a calibration that did not finish, without a manifest yet." in error
    assert "--resume" in error


def test_what_is_neither(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty folder, and a file that is not a manifest, give status 1 and what was expected."""
    (tmp_path / "empty").mkdir()
    assert main(["inspect", str(tmp_path / "empty")]) == 1
    assert "no model here. Expected config.json with model.safetensors (native" in capsys.readouterr().err
    (tmp_path / "notes.txt").write_text("hello")
    assert main(["inspect", str(tmp_path / "notes.txt")]) == 1
    assert f"manifest {tmp_path / 'notes.txt'}: not JSON" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["sixty-four", 0, None, 64.5])
def test_a_broken_config(value: object, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A config.json with an invalid size gives status 1 and the file's name."""
    model = write_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": value}))
    assert main(["inspect", str(model)]) == 1
    message = capsys.readouterr().err
    assert str(model) in message
    assert "vocab_size" in message


def test_decoder_only_models_are_described(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A decoder-only model is described with query and key heads, RoPE base, window, and end-of-sequence ids."""
    folder = write_decoder_only(tmp_path, "mistral", sliding_window=8, rope_theta=1e6)
    assert main(["inspect", str(folder)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Decoder-only with gated SiLU: 2 layers, width 12, 4 heads of 6 over 2 of keys, feed-forward 10" in printed
    assert (
        "rotary positions to base 1e+06, a window of 8 in 2 layers, 40 token ids, untied head; 3,468 weights."
        in printed
    )
    assert "Outputs end with token 2: " in printed


def test_end_tokens_of_a_native_model(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The end tokens of a native decoder-only model are printed, as those of the folder that it was made of."""
    config = build_llama_config(end_ids=(2, 3))
    write_native(tmp_path / "native", config, arrays=build_llama_arrays(config, 0), vocabulary_path=None)
    assert main(["inspect", str(tmp_path / "native")]) == 0
    path = tmp_path / "native" / "config.json"
    assert f"Outputs end with token 2 or 3: {path} says so." in capsys.readouterr().out


def test_a_chat_template_is_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model's chat template is named with its flag, also where its tokenizer cannot be opened, which ends nothing."""
    folder = write_decoder_only(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert main(["inspect", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert f"Vocabulary: {folder / 'tokenizer.json'}, which was not opened: " in printed
    assert "pip install 'calm-beam[tokenizers]' (in a checkout: pip install '.[tokenizers]')" in printed
    assert "Chat template: yes. Commands that make prompts of texts need --chat_template" in printed


def test_chats_of_a_manifest(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A manifest of chats says so, with the system message."""
    for system, words in ((None, "no system message"), ("Be brief.", "the system message 'Be brief.'")):
        chat = ChatRecord(template="{{ messages }}", tokens={}, system=system)
        vocabulary = VocabularyRecord(fingerprint=f"sha256:{'1' * 64}", extra_ids=0, chat=chat)
        assert main(["inspect", str(_write(tmp_path / f"{system}.json", vocabulary=vocabulary))]) == 0
        assert f"Prompts are chats, by a template, with {words}; all of one turn." in capsys.readouterr().out
