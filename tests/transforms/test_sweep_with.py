"""An external decoder is swept as ours is: in shards that are kept, resumed and counted."""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

import calm_beam as calm
from calm_beam.errors import UsageError
from calm_beam.inputs.examples import DataError
from calm_beam.manifest import SettingManifest, manifest_text
from calm_beam.outputs import OutputsError, read_generations
from calm_beam.outputs.hosted_decoder import DecoderError
from calm_beam.transforms import ReadExamples, SettingOutput, SweepWith
from tests.kills import children
from tests.pipelines import id_rows, write_rows
from tests.transforms.setting_decoders import SETTINGS, cut, slow, sweep, write_texts


def _certified(output: pathlib.Path, **asked: Any) -> SettingManifest:
    manifest = calm.certify(outputs=output, metric="token_f1", delta=0.3, epsilon=0.1, output=output, **asked)
    assert manifest is not None
    return manifest


def _shards(output: pathlib.Path) -> list[pathlib.Path]:
    return sorted(output.glob("generations/*/*.parquet"))


@pytest.fixture
def data(tmp_path: pathlib.Path) -> pathlib.Path:
    """Twenty-four texts."""
    return write_texts(tmp_path / "data.jsonl")


def test_a_sweep_is_certified(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Outputs under every setting are stored, scored by our metrics and certified; the manifest names the decoder."""
    sweep(data, tmp_path / "swept")
    stored = [generation for path in _shards(tmp_path / "swept") for generation in read_generations(path)]
    found = {each.example.id: [(output.text, output.cost) for output in each.outputs] for each in stored}
    assert len(found) == 24
    assert found["e5"] == [
        ("w50 w51 w52 w53 w54 w55", 6.0),
        ("w50 w51 w52 w53", 4.0),
        ("w50 w51", 2.0),
    ]
    manifest = _certified(tmp_path / "swept")
    assert manifest.plan.order == ("4", "2")
    assert (manifest.plan.baseline, manifest.plan.metric, manifest.plan.consistency) == ("all", "token_f1", "textual")
    assert manifest.decoder is not None
    assert (manifest.decoder.name, manifest.decoder.failed, manifest.decoder.duplicates) == ("cut 1", 0, 0)
    assert "decoded elsewhere, by what its user calls cut 1" in manifest.guarantee
    # Of prompts with 1 to 8 words, 4 words keep F1 = 8 / (4 + words) of those that are longer.
    risk = sum(1 - 8 / (4 + words) for words in (5, 6, 7, 8)) / 8
    assert manifest.calibrations[0].path[0].risk == pytest.approx(risk)
    assert [setting.cost for setting in manifest.settings] == [26 / 8, 15 / 8]


@pytest.mark.parametrize("decoder", ["raises", "hangs", "too few"])
def test_nothing_is_lost_where_a_decoder_fails(decoder: str, data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A decoder that raises, hangs or answers too few ends the run in one line; finished shards are kept."""

    def failing(prompts: list[str], settings: tuple[Any, ...]) -> Any:
        answers = cut(prompts, settings)
        if len(_shards(tmp_path / "swept")) < 2:
            return answers
        if decoder == "raises":
            raise ConnectionError("the server\nis gone")
        if decoder == "hangs":
            time.sleep(60)
        return {setting: given[1:] for setting, given in answers.items()}

    with pytest.raises(DecoderError) as raised:
        sweep(data, tmp_path / "swept", decoder=failing, decode_timeout=1.0)
    said = str(raised.value).splitlines()[0]
    assert {
        "raises": "the decoder raised ConnectionError: the server\\nis gone. Fix the decoder",
        "hangs": "within 1 s, example ",
        "too few": "under setting 'all': every prompt needs one",
    }[decoder] in said
    kept = {path: path.read_bytes() for path in _shards(tmp_path / "swept")}
    assert len(kept) == 2
    with pytest.raises(OutputsError, match=r"has no complete\.json, so decoding did not finish there"):
        _certified(tmp_path / "swept")
    sweep(data, tmp_path / "swept", resume=True)
    assert {path: path.read_bytes() for path in kept} == kept
    sweep(data, tmp_path / "whole")
    with pytest.raises(UsageError, match=r"holds generations \("):
        sweep(data, tmp_path / "whole")
    assert [path.read_bytes() for path in _shards(tmp_path / "swept")] == [
        path.read_bytes() for path in _shards(tmp_path / "whole")
    ]


def test_dead_prompts_count_as_lost(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """With `worst_case`, prompts at which the decoder raises are isolated and have loss 1; too many end the run."""

    def refuses(prompts: list[str], settings: tuple[Any, ...]) -> Any:
        if any(prompt.startswith(("w3 ", "w30", "w70")) for prompt in prompts):
            raise ValueError("refused")
        return cut(prompts, settings)

    with pytest.raises(DataError, match="2 examples failed, more than the 1 that may"):
        sweep(data, tmp_path / "few", decoder=refuses, on_error="worst_case", max_failures=1)
    sweep(data, tmp_path / "swept", decoder=refuses, on_error="worst_case")
    stored = [generation for path in _shards(tmp_path / "swept") for generation in read_generations(path)]
    failed = {each.example.id: each.failure for each in stored if each.failure is not None}
    assert failed == dict.fromkeys(("e3", "e7"), "the decoder raised ValueError: refused")
    manifest = _certified(tmp_path / "swept")
    assert manifest.decoder is not None
    assert manifest.decoder.failed == 2
    losses = [1 - 8 / (4 + 1 + index % 8) if index % 8 > 3 else 0.0 for index in range(24)]
    losses[3] = losses[7] = 1.0
    assert manifest.calibrations[0].path[0].risk == pytest.approx(sum(losses) / 24)


def test_outputs_under_two_names_never_mix(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A sweep of another decoder, or of other settings, is neither resumed nor overwritten by accident."""
    sweep(data, tmp_path / "swept")
    with pytest.raises(UsageError, match="begun in another way: decoder is 'cut 1' there, 'cut 2' here"):
        sweep(data, tmp_path / "swept", decoder_name="cut 2", resume=True)
    with pytest.raises(UsageError, match="begun in another way: settings"):
        sweep(data, tmp_path / "swept", settings=("all", 2), resume=True)
    with pytest.raises(UsageError, match=r"^output .*holds generations .*Pass resume=True"):
        sweep(data, tmp_path / "swept")


def test_ids_are_swept(tmp_path: pathlib.Path) -> None:
    """Prompts of token ids come as lists, answers of ids are compared with reference ids; exit layers are stored."""

    def echo(prompts: list[list[int]], settings: tuple[int, ...]) -> Any:
        kept = {most: [prompt[:most] for prompt in prompts] for most in settings}
        return {
            most: [SettingOutput(token_ids=ids, exit_layers=[most] * len(ids)) for ids in kept[most]]
            for most in settings
        }

    data = write_rows(tmp_path / "ids.jsonl", id_rows(8))
    sweep(data, tmp_path / "swept", decoder=echo, settings=(9, 1))
    (first, *_) = [generation for path in _shards(tmp_path / "swept") for generation in read_generations(path)]
    output = first.outputs[1]
    assert (output.text, output.tokens, output.exit_layers) == (str(output.tokens[0]), output.tokens[:1], (1,))
    manifest = _certified(tmp_path / "swept", consistency="risk")
    assert manifest.calibrations[0].path[0].n == 8


def test_hints_reach_the_step_that_decodes(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Resource hints are those of the step that decodes, and of no other."""
    pipeline = beam.Pipeline(options=PipelineOptions([]))
    _ = (
        pipeline
        | ReadExamples(str(data))
        | SweepWith(cut, settings=SETTINGS, output=str(tmp_path / "swept"), resource_hints={"min_ram": "16GB"})
    )
    components = pipeline.to_runner_api().components
    hinted = {
        name
        for name, environment in components.environments.items()
        if "beam:resources:min_ram_bytes:v1" in environment.resource_hints
    }
    steps = {each.unique_name for each in components.transforms.values() if each.environment_id in hinted}
    assert {name.split("/")[1] for name in steps} == {"DecodeShards"}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"settings": ("all",)}, "settings must be two or more, each once, the safest first"),
        ({"settings": ("1", 1)}, "settings must be two or more, each once"),
        ({"on_error": "list"}, "on_error must be one of fail, worst_case, got 'list'"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"decode_timeout": float("nan")}, "decode_timeout must be a number of seconds above 0, got nan"),
        ({"decoder_name": ""}, "decoder_name is missing"),
    ],
)
def test_what_is_asked_is_checked(asked: dict[str, Any], words: str, tmp_path: pathlib.Path) -> None:
    """Invalid settings are refused before a pipeline is made."""
    with pytest.raises(UsageError, match=words):
        SweepWith(cut, **{"settings": SETTINGS, "output": str(tmp_path), **asked})


def test_a_decoder_has_the_name_of_its_code(tmp_path: pathlib.Path) -> None:
    """Without a name, a decoder has the name of its function or class."""
    assert SweepWith(cut, settings=SETTINGS, output="x").decoder_name == "tests.transforms.setting_decoders.cut"
    assert SweepWith(_Made(), settings=SETTINGS, output="x").decoder_name == f"{__name__}._Made"
    assert SweepWith(_Made, settings=SETTINGS, output="x").decoder_name == f"{__name__}._Made"


class _Made:
    def __call__(self, prompts: list[Any], settings: tuple[Any, ...]) -> dict[Any, list[Any]]:
        return dict(cut(prompts, settings))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["launcher", "worker"])
def test_processes_that_are_killed_lose_nothing(victim: str, data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Two worker processes, killed in the middle and resumed, give the manifest of one uninterrupted process."""
    sweep(data, tmp_path / "one", decoder=slow, batch_size=2)
    output = tmp_path / "two"
    command = [sys.executable, "-m", "tests.transforms.setting_decoders", str(data), str(output)]
    # A process group of its own, since workers are started through a shell that would survive.
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    while process.poll() is None and len(_shards(output)) < 2:
        time.sleep(0.01)
    if victim == "launcher":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        workers = [pid for pid in children(process.pid) if not children(pid)]
        os.kill(workers[0], signal.SIGKILL)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            # Beam's own launcher may wait for ever for a lost worker.
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    left = len(_shards(output))
    assert 2 <= left < 6
    assert not list(output.glob("generations/*/complete.json"))
    subprocess.run([*command, "--resume"], check=True, timeout=120)
    one, two = (
        dataclasses.replace(_certified(tmp_path / name), created="2000-01-01T00:00:00Z") for name in ("one", "two")
    )
    assert manifest_text(one) == manifest_text(two)
    assert (tmp_path / "one" / "risk_table.csv").read_bytes() == (output / "risk_table.csv").read_bytes()
