"""`calm-beam train` with decoder-only models: from texts to answers under a manifest."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest

import calm_beam.launch.train.run
from calm_beam.checkpoints import GenerationFacts, load_checkpoint, write_hugging_face, write_native
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary
from calm_beam.launch.cli import main
from calm_beam.manifest import read_manifest
from calm_beam.model.llama import LlamaConfig
from calm_beam.serving import Generator
from calm_beam.training.train import train
from tests.calm_beam.model.llama.builders import build_llama_arrays, build_llama_config, write_word_tokenizer
from tests.numpy_llama import NumpyLlama
from tests.pipelines import write_rows

_SIZES = (
    *("--architecture=llama", "--vocab_size=270", "--emb_dim=16", "--num_heads=2", "--num_kv_heads=1"),
    *("--head_dim=8", "--mlp_dim=16", "--num_decoder_layers=3"),
)
_SHORT = ("--steps=4", "--batch_tokens=120", "--max_input_length=40", "--max_target_length=40")


@pytest.fixture
def data(tmp_path: pathlib.Path) -> pathlib.Path:
    """Nine rows whose references repeat words of their inputs."""
    nouns, others = ("cat", "dog", "owl"), ("mouse", "house", "bird")
    rows = [{"input": f"the {noun} sees a {other}", "references": [other]} for noun in nouns for other in others]
    return write_rows(tmp_path / "rows.jsonl", rows)


def _chat_model(folder: pathlib.Path) -> tuple[LlamaConfig, pathlib.Path]:
    """Writes a model with a chat template, whose outputs end with ids 3 and 7; its tokenizer names 7."""
    config = build_llama_config(vocab_size=40, max_positions=64, end_ids=(3, 7))
    folder.mkdir()
    tokenizer = write_word_tokenizer(folder / "tokenizer.json", 40, ends=config.end_ids)
    template = "{% for m in messages %}w11 {{ m.content }} {% endfor %}w12"
    (folder / "chat_template.jinja").write_text(template)
    write_native(folder / "model", config, arrays=build_llama_arrays(config, 0), vocabulary_path=tokenizer)
    return config, folder / "model"


def test_a_new_model_is_written_with_its_tokenizer(
    data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new model has the requested sizes, a token for each id, and the tokenizer's end-of-sequence id."""
    flags = [f"--data={data}", f"--validation_data={data}", f"--output={tmp_path / 'model'}", *_SIZES, *_SHORT]
    assert main(["train", *flags, "--validate_every=4", "--best_by=token_f1", "--best_by_rows=3"]) == 0
    said = capsys.readouterr().err
    assert "Training 3 layers of width 16 on 9 pairs for 4 steps; 9 pairs to validate on." in said
    assert "step 4: validation loss of the layers " in said
    assert "the weights after step 4, the best of those validated by token_f1" in said
    checkpoint = load_checkpoint(tmp_path / "model")
    assert isinstance(checkpoint.config, LlamaConfig)
    assert (checkpoint.config.num_decoder_layers, checkpoint.config.num_kv_heads) == (3, 1)
    assert checkpoint.config.max_positions == 512
    assert checkpoint.vocabulary_path == tmp_path / "model" / "tokenizer.json"
    vocabulary = Vocabulary(checkpoint.vocabulary_path)
    assert (vocabulary.size, vocabulary.end_ids) == (270, checkpoint.config.end_ids)


def test_prompts_are_learned_as_decoding_sees_them(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The chat template makes prompts, of turns too; targets end with the tokenizer's own of several ids, as told."""
    _, model = _chat_model(tmp_path / "chat")
    turns = [{"role": ("user", "assistant")[place % 2], "content": f"w{place + 13}"} for place in range(4)]
    data = write_rows(tmp_path / "rows.jsonl", [{"input": "w5 w0", "references": ["w0 w6", "w8"]}, {"messages": turns}])
    seen: list[dict[str, Any]] = []

    def recorded(*arguments: Any, **options: Any) -> Any:
        seen.append(options)
        return train(*arguments, **options)

    monkeypatch.setattr(calm_beam.launch.train.run, "train", recorded)
    flags = [f"--checkpoint={model}", f"--data={data}", f"--output={tmp_path / 'tuned'}", "--steps=1"]
    flags += ["--chat_template=model", "--system=w9", "--max_target_length=8"]
    assert main(["train", *flags, "--max_input_length=9"]) == 0
    prompt = (11, 9, 11, 5, 0, 12)
    # The turns before the last question are in its prompt, and its answer alone is learned.
    assert seen[0]["pairs"] == [(prompt, [0, 6]), (prompt, [8]), ((11, 9, 11, 13, 11, 14, 11, 15, 12), [16])]
    assert seen[0]["end_id"] == 7
    assert "References end with id 7, of 3, 7." in capsys.readouterr().err
    assert main(["train", *flags, "--overwrite", "--max_input_length=5"]) == 2
    assert "its input has 6 tokens, max_input_length is 5. Raise it: prompts that" in capsys.readouterr().err
    assert main(["train", *flags, "--overwrite", "--max_input_length=60"]) == 0


def test_what_transformers_needs_outlives_a_training(tmp_path: pathlib.Path) -> None:
    """Ids of beginning and padding, and stop strings, are kept by both stages of training and by conversion."""
    config, _ = _chat_model(tmp_path / "chat")
    source = tmp_path / "source"
    facts = GenerationFacts(token_ids={"bos_token_id": 1, "pad_token_id": 4}, stop_strings=("w9 w8",))
    arrays, tokenizer = build_llama_arrays(config, 0), tmp_path / "chat" / "tokenizer.json"
    write_hugging_face(source, config, arrays=arrays, vocabulary_path=tokenizer, generation=facts)
    data = write_rows(tmp_path / "rows.jsonl", [{"input": "w5 w0", "references": ["w0 w6", "w8"]}])
    flags = [f"--data={data}", "--chat_template=model", "--max_target_length=8", "--max_input_length=8"]
    assert main(["train", f"--checkpoint={source}", *flags, "--steps=1", f"--output={tmp_path / 'steps'}"]) == 0
    train_classifier = [
        "train",
        "--stage=classifier",
        f"--checkpoint={tmp_path / 'steps'}",
        f"--validation_data={data}",
    ]
    assert main([*train_classifier, *flags, f"--output={tmp_path / 'classified'}"]) == 0
    out = ["convert", f"--checkpoint={tmp_path / 'classified'}", f"--output={tmp_path / 'out'}"]
    assert main([*out, "--layout=hugging_face"]) == 0
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (fields["bos_token_id"], fields["pad_token_id"], fields["eos_token_id"]) == (1, 4, [3, 7])
    assert load_checkpoint(tmp_path / "out").generation == facts


def test_more_than_the_positions_of_a_model_is_refused(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lengths beyond the model's positions are refused before the first step."""
    _, model = _chat_model(tmp_path / "chat")
    data = write_rows(tmp_path / "rows.jsonl", [{"input": "w5 " * 60, "references": ["w0 w6 w8 w9"]}])
    flags = [f"--checkpoint={model}", f"--data={data}", f"--output={tmp_path / 'tuned'}", "--steps=1"]
    assert main(["train", *flags, "--chat_template=none"]) != 0
    assert "has 64 positions, but prompts of up to 60 tokens and outputs of up to 5 need 65" in capsys.readouterr().err
    assert not (tmp_path / "tuned").exists()


def test_a_failed_run_is_resumed(data: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed run is resumed to the weights and the tokenizer of one that did not fail."""
    flags = [f"--data={data}", *_SIZES, *_SHORT, "--save_every=2"]
    assert main(["train", *flags, f"--output={tmp_path / 'whole'}"]) == 0
    with monkeypatch.context() as patched:
        patched.setattr(calm_beam.launch.train.run, "train", _failing_train)
        assert main(["train", *flags, f"--output={tmp_path / 'model'}"]) == 1
    assert main(["train", *flags, f"--output={tmp_path / 'model'}", "--resume"]) == 0
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "config.json"):
        assert (tmp_path / "model" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def _failing_train(*arguments: Any, on_save: Any, **options: Any) -> Any:
    """Trains until the first state is saved, then fails."""

    def save(state: Any) -> None:
        on_save(state)
        raise FloatingPointError("the lights went out")

    return train(*arguments, on_save=save, **options)


@pytest.mark.slow
def test_a_model_is_trained_calibrated_and_served(tmp_path: pathlib.Path) -> None:
    """From texts to a classifier, suitability, a manifest, and answers that are mostly the full model's."""
    words = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    generator = np.random.default_rng(0)
    chosen: list[list[str]] = [generator.choice(words, size=3, replace=False).tolist() for _ in range(400)]
    rows = [{"input": " ".join(three), "references": [" ".join(reversed(three))]} for three in chosen]
    prompts, expected = [" ".join(three) for three in chosen[300:320]], [row["references"] for row in rows[300:320]]
    learned, unseen = write_rows(tmp_path / "a.jsonl", rows[:300]), write_rows(tmp_path / "b.jsonl", rows[300:])
    data = (f"--data={learned}", f"--validation_data={unseen}", "--max_input_length=20", "--max_target_length=20")
    sizes = [flag for flag in _SIZES if "emb_dim" not in flag and "mlp_dim" not in flag]
    assert (
        main(
            [
                *("train", *sizes, "--emb_dim=32", "--mlp_dim=64", *data, f"--output={tmp_path / 'model'}"),
                *("--steps=400", "--batch_tokens=500", "--sampled_layers=0"),
            ]
        )
        == 0
    )
    flags = [f"--checkpoint={tmp_path / 'model'}", *data, f"--output={tmp_path / 'classified'}", "--steps=4"]
    assert main(["train", "--stage=classifier", *flags]) == 0
    model = tmp_path / "classified"
    lengths = ("--max_input_length=20", "--max_decode_length=20")
    found = tmp_path / "found.json"
    assert main(["suitability", f"--checkpoint={model}", f"--data={unseen}", *lengths, f"--output={found}"]) == 0
    assert json.loads(found.read_text())["agreement"][1] > 0.5
    checkpoint = load_checkpoint(model)
    assert checkpoint.vocabulary_path is not None
    vocabulary = Vocabulary(checkpoint.vocabulary_path)
    for confidence in ("softmax", "classifier"):
        output = tmp_path / confidence
        flags = [f"--checkpoint={model}", f"--data={unseen}", *lengths, f"--output={output}", "--metric=token_f1"]
        flags += [f"--confidence={confidence}", "--thresholds=0.9,0.5,0.1", "--delta=0.4", "--epsilon=0.2"]
        assert main(["calibrate", *flags]) == 0
        manifest = read_manifest(output / "manifest.json")
        assert manifest.model.fingerprint == checkpoint.fingerprint()
        served = Generator.from_manifest(output / "manifest.json", model)
        assert served.entry.threshold is not None
        answers = served.generate_batch(prompts)
        # By chance, one in 720.
        assert sum([answer.text] == references for answer, references in zip(answers, expected, strict=True)) >= 5
        plain = NumpyLlama(checkpoint.config, checkpoint.arrays)
        for prompt, answer in zip(prompts[:3], answers, strict=False):
            ids, _ = vocabulary.encode_prompt(prompt, room=20)
            alone = plain.decode(ids, ExitRule(confidence=confidence), served.entry.threshold, max_decode_length=20)
            assert (list(answer.tokens), list(answer.exit_layers)) == (alone.tokens, alone.exit_layers)
