"""The Flex Template: its parameters are flags, and its script is `calm-beam calibrate`."""

import json
import pathlib
import re
import runpy
import sys
from typing import Any

import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from google.cloud.dataflow import TemplateMetadata

from calm_beam.launch.calibrate import flag_parsers
from calm_beam.launch.flags import parse_flags
from calm_beam.launch.flags.shared_options import parse_accelerator

_FOLDER = pathlib.Path(__file__).parents[2] / "launch" / "flex_template"
_METADATA: dict[str, Any] = json.loads((_FOLDER / "metadata.json").read_text())
_PARAMETERS: dict[str, dict[str, Any]] = {parameter["name"]: parameter for parameter in _METADATA["parameters"]}

# For each parameter a good value, and one that its pattern refuses, if it has a pattern.
_VALUES = {
    "checkpoint": ("gs://bucket/model", "model"),
    "data": ("gs://bucket/a-*.jsonl.gz,gs://bucket/b.jsonl", "gs://bucket/a.jsonl,b.jsonl"),
    "output": ("gs://bucket/out", "gs://bucket"),
    "sdk_container_image": ("us-docker.pkg.dev/project/calm-beam/worker:cuda", "worker"),
    "accelerator": ("type:nvidia-l4;count:1;install-nvidia-driver", "l4"),
    "vocabulary": ("gs://bucket/sentencepiece.model", "/sentencepiece.model"),
    "chat_template": ("model", "chat.jinja"),
    "task_prefix": ("summarize: ", None),
    "consistency": ("textual,risk", "text"),
    "metric": ("rouge_l,package.module:function", "rouge_l,"),
    "delta": ("0.05, 0.1", "5%"),
    "epsilon": ("1e-2", "small"),
    "confidence": ("softmax_max", "Softmax"),
    "schedule": ("decay_t5x", "Eq. 5"),
    "tau": ("4", "four"),
    "thresholds": ("0.9,0.5,0", "0.9;0.5"),
    "grid_step": ("0.01", "1 %"),
    "p_value": ("signed_mixture", "signed-mixture"),
    "procedure": ("multi_start", "multi-start"),
    "cluster_key": ("paragraph", None),
    "group_key": ("language", None),
    "max_input_length": ("256", "0"),
    "max_decode_length": ("32", "-1"),
    "batch_size": ("64", "many"),
    "max_cache_tokens": ("64", "many"),
    "model_parallelism": ("2", "0"),
    "num_shards": ("200", "0"),
    "on_error": ("worst_case", "skip"),
}


def test_every_parameter_is_tried_here() -> None:
    """The table above covers every parameter."""
    assert list(_VALUES) == list(_PARAMETERS)


def test_dataflow_understands_the_file() -> None:
    """The file is what Dataflow's client knows as a template's metadata: no field is misspelled."""
    known = TemplateMetadata.from_json(json.dumps(_METADATA), ignore_unknown_fields=False)
    assert len(known.parameters) == len(_PARAMETERS)
    assert all(parameter.label and parameter.help_text for parameter in known.parameters)


@pytest.mark.parametrize("name", _PARAMETERS)
def test_each_parameter_is_a_flag(name: str) -> None:
    """A parameter arrives as the flag of its name, and its good value is parsed to something other than the default."""
    value, _ = _VALUES[name]
    flags, options = parse_flags(flag_parsers()[0], ["--checkpoint=x", f"--{name}={value}"])
    parsed = {**options.get_all_options(), **vars(flags)}
    defaults = {**PipelineOptions([]).get_all_options(), **vars(flag_parsers()[0].parse_args([]))}
    assert parsed[name] != defaults[name]


@pytest.mark.parametrize("name", _PARAMETERS)
def test_patterns_tell_good_from_bad(name: str) -> None:
    """Each pattern takes the good value whole and refuses the bad one."""
    good, bad = _VALUES[name]
    patterns = _PARAMETERS[name].get("regexes", [])
    assert bool(patterns) == (bad is not None)
    for pattern in patterns:
        assert pattern.startswith("^")
        assert pattern.endswith("$")
        assert re.fullmatch(pattern, good)
        assert not re.fullmatch(pattern, str(bad))


@pytest.mark.parametrize(
    "text", ["nvidia-l4", "tpu-v6e-slice", "type:tpu-v6e-slice;topology:1x1", "count:1;type:nvidia-tesla-t4"]
)
def test_the_pattern_takes_every_accelerator(text: str) -> None:
    """The template's pattern accepts every accelerator that the flag accepts."""
    parse_accelerator(text)
    (pattern,) = _PARAMETERS["accelerator"]["regexes"]
    assert re.fullmatch(pattern, text)


def test_what_a_job_cannot_do_without_is_required() -> None:
    """Model, data, output and image are required, since the launcher would refuse a job without them."""
    required = {name for name, parameter in _PARAMETERS.items() if not parameter["isOptional"]}
    assert required == {"checkpoint", "data", "output", "sdk_container_image"}


def test_the_script_is_calibrate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The launcher's script hands its flags to `calm-beam calibrate`, and ends with that command's status."""
    monkeypatch.setattr(sys, "argv", ["main.py", "--delta=5"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(_FOLDER / "main.py"), run_name="__main__")
    assert ended.value.code == 2
    assert "calm-beam calibrate: --delta must be in (0, 1), got 5" in capsys.readouterr().err
