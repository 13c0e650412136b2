"""The comparison of serving with the calibration, on a tiny model."""

import pathlib

import pytest

from benchmarks.serving_parity import difference, main
from calm_beam.launch.cli import main as calm_beam
from calm_beam.outputs import Output
from calm_beam.serving import Answer
from tests.pipelines import SHORT_FLAGS, id_rows, write_model, write_rows

_THRESHOLDS = (0.5, 0.5, 0.25)


@pytest.mark.timeout(240)
def test_a_calibration_is_served_as_it_was_decoded(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From calibrate's output alone, serving gives every stored prompt its stored tokens and exit layers."""
    model, data = write_model(tmp_path / "model"), write_rows(tmp_path / "rows.jsonl", id_rows(30))
    output = tmp_path / "out"
    flags = [f"--checkpoint={model}", f"--data={data}", f"--output={output}", "--metric=token_f1", "--delta=0.6"]
    assert calm_beam(["calibrate", *flags, *SHORT_FLAGS]) == 0
    capsys.readouterr()
    assert main([f"--calibration={output}", "--batch_size=2"]) == 0
    printed = capsys.readouterr().out
    assert "threshold 0" in printed
    assert "\n0 of 30 outputs (" in printed


def _output(tokens: tuple[int, ...], exit_layers: tuple[int, ...], confidences: tuple[float, ...]) -> Output:
    return Output(text="", tokens=tokens, exit_layers=exit_layers, confidences=confidences)


def _answer(tokens: tuple[int, ...], exit_layers: tuple[int, ...], confidences: tuple[float, ...]) -> Answer:
    return Answer(
        text="", tokens=tokens, exit_layers=exit_layers, confidences=confidences, num_layers=4, truncated=False
    )


_STORED = _output((7, 9, 1), (2, 3, 1), (0.6, 0.5, 0.3))


@pytest.mark.parametrize(
    ("served", "step", "margin", "is_near"),
    [
        # The served token exited lower, where it just reached the threshold.
        (_answer((7, 9, 1), (2, 2, 1), (0.6, 0.50001, 0.3)), 1, 0.00001, True),
        # The stored token did.
        (_answer((7, 9, 1), (2, 3, 4), (0.6, 0.5, 0.9)), 2, 0.05, False),
        (_answer((7, 8, 1), (2, 3, 1), (0.6, 0.5, 0.3)), 1, None, True),
        (_answer((7, 9, 5, 1), (2, 3, 1, 1), (0.6, 0.5, 0.3, 0.4)), 2, None, True),
    ],
)
def test_the_first_difference_is_told(served: Answer, step: int, margin: float | None, is_near: bool) -> None:
    """Step and distance to the threshold are those of the token that exited lower; a far one is no near tie."""
    found = difference("a", _STORED, served=served, thresholds=_THRESHOLDS)
    assert found is not None
    assert (found.step, found.is_near_tie) == (step, is_near)
    assert found.margin == (None if margin is None else pytest.approx(margin))
    assert f"  a, step {step}: " in found.in_words()


def test_equal_outputs_differ_nowhere() -> None:
    """Outputs with equal tokens and layers are equal, although confidences may differ by rounding."""
    assert (
        difference("a", _STORED, served=_answer((7, 9, 1), (2, 3, 1), (0.6000001, 0.5, 0.3)), thresholds=_THRESHOLDS)
        is None
    )


def test_an_output_that_goes_on_differs_at_its_end() -> None:
    """If one output has ended and the other has not, that step is the first that differs."""
    found = difference("a", _output((7,), (2,), (0.6,)), served=_answer((7, 9), (2, 3), (0.6, 0.5)), thresholds=None)
    assert found is not None
    assert (found.step, found.tokens, found.exit_layers) == (1, (None, 9), (0, 3))
