"""A user's decoder is calibrated by one call from Python, as by a sweep and a certification."""

import pathlib
from typing import Any

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

import calm_beam as calm
from calm_beam.errors import UsageError
from calm_beam.launch.runners import PipelineError
from calm_beam.manifest import SettingManifest
from tests.transforms.setting_decoders import NAME, SETTINGS, cut, sweep, write_texts

_GUARANTEE: dict[str, Any] = {"metric": "token_f1", "delta": 0.3, "epsilon": 0.1}


@pytest.fixture
def data(tmp_path: pathlib.Path) -> pathlib.Path:
    """Twenty-four texts."""
    return write_texts(tmp_path / "data.jsonl")


def _calibrated(data: pathlib.Path, output: pathlib.Path, decoder: Any = cut, **asked: Any) -> SettingManifest:
    arguments = {"settings": SETTINGS, "decoder_name": NAME, "num_shards": 6, **_GUARANTEE, **asked}
    manifest: SettingManifest = calm.calibrate(decoder=decoder, data=str(data), output=output, **arguments)
    return manifest


def _files(output: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (*output.glob("generations/*/*"), output / "risk_table.csv")}


@pytest.mark.parametrize("processes", [1, 2])
def test_one_call_is_a_sweep_and_a_certification(processes: int, data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Files and entries equal those of `SweepWith` and `certify`, in one process and in two."""
    flags = ["--direct_running_mode=multi_processing", f"--direct_num_workers={processes}"] if processes > 1 else []
    manifest = _calibrated(data, tmp_path / "one", options=PipelineOptions(flags))
    sweep(data, tmp_path / "two")
    expected = calm.certify(outputs=tmp_path / "two", output=tmp_path / "two", **_GUARANTEE)
    assert expected is not None
    assert (manifest.calibrations, manifest.plan, manifest.decoder) == (
        expected.calibrations,
        expected.plan,
        expected.decoder,
    )
    assert _files(tmp_path / "one") == _files(tmp_path / "two")


def test_too_few_examples_are_noticed_first(
    data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A promise that so few examples cannot prove is named before they are decoded, and not only after that."""

    def dead(prompts: list[str], settings: tuple[Any, ...]) -> Any:
        raise ConnectionError("the server is gone")

    with pytest.raises(PipelineError):
        _calibrated(data, tmp_path / "swept", dead, delta=0.05)
    assert "caution: The promise cannot be proved by 24 examples" in capsys.readouterr().err


def test_a_failed_run_is_resumed(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A decoder that raises ends the run in one line; what it has stored is kept, and `resume=True` goes on."""
    output = tmp_path / "swept"

    def failing(prompts: list[str], settings: tuple[Any, ...]) -> Any:
        if len(list(output.glob("generations/*/*.parquet"))) == 2:
            raise ConnectionError("the server is gone")
        return cut(prompts, settings)

    with pytest.raises(PipelineError, match=r"^.*the decoder raised ConnectionError: the server is gone.*$"):
        _calibrated(data, output, failing)
    kept = {path: path.read_bytes() for path in output.glob("generations/*/*.parquet")}
    assert len(kept) == 2
    resumed = _calibrated(data, output, resume=True)
    assert {path: path.read_bytes() for path in kept} == kept
    assert resumed.calibrations == _calibrated(data, tmp_path / "whole").calibrations
    with pytest.raises(UsageError, match="holds a manifest already"):
        _calibrated(data, output)
    assert _calibrated(data, output, overwrite=True).calibrations == resumed.calibrations


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"metric": "blue"}, "blue"),
        ({"metric": "bleurt"}, "metric=.bleurt.: needs a checkpoint"),
        ({"delta": 1.5}, "delta"),
        ({"settings": ("all",)}, "settings must be two or more"),
        ({"data": None}, "data is missing"),
        ({"data": "nowhere/*.jsonl"}, "nowhere"),
        ({"decode_timeout": 0}, "decode_timeout must be a number of seconds above 0"),
    ],
)
def test_a_bad_request_decodes_nothing(
    asked: dict[str, Any], words: str, data: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Mistakes are named as arguments before the decoder is called, and nothing is written."""

    def never(prompts: list[str], settings: tuple[Any, ...]) -> Any:
        raise AssertionError("it was called")

    arguments = {"settings": SETTINGS, "data": str(data), **_GUARANTEE, **asked}
    with pytest.raises(calm.CalmBeamError, match=words) as raised:
        calm.calibrate(decoder=never, output=tmp_path / "swept", **arguments)
    assert "--" not in str(raised.value)
    assert not (tmp_path / "swept").exists()


def test_a_misspelt_argument(data: pathlib.Path) -> None:
    """Arguments that only the calibration of a model takes are refused by name."""
    with pytest.raises(TypeError, match="no argument 'grid_step'"):
        calm.calibrate(decoder=cut, settings=SETTINGS, data=str(data), grid_step=0.1)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="needs the argument 'settings'"):
        calm.calibrate(decoder=cut, data=str(data))  # type: ignore[call-overload]
