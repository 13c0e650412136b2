"""Stop strings of a model are calibrated, recorded and served: every decoder ends outputs at the same tokens."""

import json
import pathlib

import pytest

import calm_beam
from calm_beam.checkpoints import GenerationFacts, write_hugging_face
from calm_beam.errors import UsageError
from calm_beam.inputs.vocabularies.vocabulary import open_recorded
from calm_beam.launch.cli import main
from calm_beam.manifest import Manifest, read_manifest
from calm_beam.outputs.job import DecodeJob
from calm_beam.outputs.rows import Generation, read_generations
from calm_beam.serving import ContinuousGenerator, Generator
from tests.calm_beam.model.llama.builders import build_llama_arrays, build_llama_config, write_word_tokenizer
from tests.launch.serve.served import app_of, ready_client
from tests.pipelines import write_rows

_STOPS = ("w2", "w31 w")
_DATA = [{"input": f"w{row} w{row % 7} w{30 - row}"} for row in range(12)]
_FLAGS = ("--thresholds=0.5,0.2,0", "--max_input_length=16", "--max_decode_length=12", "--num_shards=1")
_CALIBRATED = ("--metric=token_f1", "--consistency=textual", "--delta=0.99", "--epsilon=0.2", "--confidence=softmax")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A model as transformers saves it, whose `generation_config.json` has stop strings."""
    folder = tmp_path_factory.mktemp("model")
    config = build_llama_config(vocab_size=40, end_ids=(3,))
    write_hugging_face(
        folder / "model",
        config,
        arrays=build_llama_arrays(config, 0),
        vocabulary_path=write_word_tokenizer(folder / "tokenizer.json", 40, ends=(3,)),
        generation=GenerationFacts(stop_strings=_STOPS),
    )
    return folder / "model"


def _calibrate(model: pathlib.Path, output: pathlib.Path, *flags: str) -> Manifest:
    data = write_rows(output.with_suffix(".jsonl"), _DATA)
    paths = (f"--checkpoint={model}", f"--data={data}", f"--output={output}")
    assert main(["calibrate", *paths, *_FLAGS, *_CALIBRATED, *flags]) == 0
    return read_manifest(output / "manifest.json")


def _generations(output: pathlib.Path) -> list[Generation]:
    (folder,) = (output / "generations").iterdir()
    generations = [each for path in DecodeJob.shard_files(str(folder)) for each in read_generations(path)]
    return sorted(generations, key=lambda generation: generation.example.line)


@pytest.fixture(scope="module")
def calibrated(model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A calibration by the model's own stop strings."""
    output = tmp_path_factory.mktemp("calibrated") / "run"
    manifest = _calibrate(model, output)
    assert manifest.vocabulary is not None
    assert manifest.vocabulary.stop_strings == _STOPS
    return output


def test_outputs_are_those_of_no_stop_strings_up_to_one(
    model: pathlib.Path, calibrated: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Every branch ends with the token that completes a stop string; texts stop before it; folders are others."""
    plain = _calibrate(model, tmp_path / "plain", "--stop_strings=[]")
    assert plain.vocabulary is not None
    assert "stop_strings" not in plain.vocabulary.to_dict()
    manifest = read_manifest(calibrated / "manifest.json")
    assert manifest.vocabulary is not None
    vocabulary = open_recorded(model / "tokenizer.json", manifest.vocabulary)
    assert vocabulary.stops is not None
    ends, cut = vocabulary.stops.ends, 0
    for ours, whole in zip(_generations(calibrated), _generations(tmp_path / "plain"), strict=True):
        for output, long in zip(ours.outputs, whole.outputs, strict=True):
            counts = range(1, len(long.tokens) + 1)
            length = next((count for count in counts if ends(long.tokens[:count])), len(long.tokens))
            assert (output.tokens, output.exit_layers) == (long.tokens[:length], long.exit_layers[:length])
            assert not any(stop in output.text for stop in _STOPS)
            assert long.text.startswith(output.text)
            cut += length < len(long.tokens)
    assert cut > len(_DATA)
    names = [{path.name for path in (run / "generations").iterdir()} for run in (calibrated, tmp_path / "plain")]
    assert not names[0] & names[1]


def test_every_decoder_that_serves_ends_outputs_alike(model: pathlib.Path, calibrated: pathlib.Path) -> None:
    """Single prompts, batches and prompts that join a batch give the calibrated tokens, layers and texts."""
    manifest = read_manifest(calibrated / "manifest.json")
    generator = Generator.from_manifest(manifest, model)
    branch = 1 + (0.5, 0.2, 0.0).index(generator.entry.threshold or 0.0)
    expected = [each.outputs[branch] for each in _generations(calibrated)]
    prompts = [row["input"] for row in _DATA]
    with ContinuousGenerator(generator) as continuous:
        futures = [continuous.submit(prompt) for prompt in prompts]
        joined = [future.result() for future in futures]
    for answers in ([generator.generate(prompt) for prompt in prompts], generator.generate_batch(prompts), joined):
        assert [(answer.text, answer.tokens, answer.exit_layers) for answer in answers] == [
            (output.text, output.tokens, output.exit_layers) for output in expected
        ]
        for answer in answers:
            assert "".join(text for text in answer.token_texts or ("?",) if text != "</s>") == answer.text
    full = [each.outputs[0].tokens for each in _generations(calibrated)]
    assert [answer.tokens for answer in generator.full_model().generate_batch(prompts)] == full


def test_commands_under_the_manifest(
    model: pathlib.Path, calibrated: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`inspect` tells of them, `verify` decodes with them, and `generate` answers as the calibration did."""
    assert main(["inspect", str(calibrated / "manifest.json")]) == 0
    assert "Outputs end before 'w2' or 'w31 w'." in capsys.readouterr().out
    assert main(["inspect", str(model)]) == 0
    said = capsys.readouterr().out
    assert "Outputs end before 'w2' or 'w31 w'." in said
    assert "do not count" not in said
    under = [f"--manifest={calibrated}", f"--checkpoint={model}"]
    fresh = write_rows(tmp_path / "fresh.jsonl", [{"input": f"w9 w{row} w8"} for row in range(20)])
    assert main(["verify", *under, f"--data={fresh}"]) == 0, capsys.readouterr().err
    rows = write_rows(tmp_path / "rows.jsonl", _DATA)
    assert main(["generate", *under, f"--input={rows}", f"--output={tmp_path / 'answers.jsonl'}"]) == 0
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    branch = 1 + (0.5, 0.2, 0.0).index(
        Generator.from_manifest(calibrated / "manifest.json", model).entry.threshold or 0.0
    )
    assert [row["text"] for row in answers] == [each.outputs[branch].text for each in _generations(calibrated)]


def test_the_service(model: pathlib.Path, calibrated: pathlib.Path) -> None:
    """`stop` may be what was calibrated; an answer that a stop string ended says so; streams never show one."""
    generator = Generator.from_manifest(calibrated / "manifest.json", model)
    prompts = [row["input"] for row in _DATA]
    expected = generator.generate_batch(prompts)
    assert any(0 < len(each.tokens) < 12 and each.tokens[-1] != 3 for each in expected)
    with ready_client(app_of(generator)) as client:
        for prompt, answer in zip(prompts, expected, strict=True):
            stop = list(reversed(_STOPS))
            (choice,) = client.post("/v1/completions", json={"prompt": prompt, "stop": stop}).json()["choices"]
            is_ended = generator.has_ended(answer.tokens)
            assert (choice["text"], choice["finish_reason"]) == (answer.text, "stop" if is_ended else "length")
            streamed = client.post("/v1/completions", json={"prompt": prompt, "stream": True}).text
            events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
            assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == answer.text
        for other in ("w9", ["w2"], ["w2", 5], {"w2": 1}):
            refused = client.post("/v1/completions", json={"prompt": prompts[0], "stop": other})
            assert refused.status_code == 400
            assert 'outputs were calibrated with the stop strings ["w2", "w31 w"]' in refused.json()["error"]["message"]


def test_what_is_refused(model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stop strings that are no list, or empty, are refused by name, in commands and in Python."""
    for value in ("###", "5", '[""]', '{"a": 1}', "[5]"):
        command = ["calibrate", f"--checkpoint={model}", "--data=x", f"--output={tmp_path / 'run'}"]
        assert main([*command, f"--stop_strings={value}"]) == 2
        assert "--stop_strings" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"stop_strings: expected texts that are not empty"):
        calm_beam.calibrate(checkpoint=str(model), data="x", output=str(tmp_path / "run"), stop_strings=["a", ""])
    ids = write_rows(tmp_path / "ids.jsonl", [{"input_ids": [5, 6]}] * 4)
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / "bare" / name).write_bytes((model / name).read_bytes())
    command = ["decode", f"--checkpoint={tmp_path / 'bare'}", f"--data={ids}", f"--output={tmp_path / 'out'}"]
    assert main([*command, *_FLAGS]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "'w2', 'w31 w' end outputs by their text, and there is no vocabulary: pass --vocabulary, or" in said
