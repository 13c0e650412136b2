"""Makes both pictures, on the embedded model and data, by the commands; takes about ten minutes on two cores.

python -m tools.pictures --output=docs/pictures
"""

import argparse
import pathlib
import sys
import tempfile
from collections.abc import Sequence

from calm_beam.demo import embedded
from calm_beam.launch.cli import main as calm_beam
from calm_beam.storage import replacing
from tools.demo_task import write_data

from .report import find_browser, photographed
from .tradeoff import draw, measure_times, read_points

_THRESHOLDS = "0.999,0.99,0.97,0.95,0.9,0.8,0.7,0.5,0.3"
_TIMED_PROMPTS = 15


def make_report(folder: pathlib.Path, picture: pathlib.Path) -> None:
    """Calibrates into `folder`, and writes the picture of the report."""
    browser = find_browser()
    _run("calibrate", f"--output={folder / 'calibration'}")
    shot = photographed(folder / "calibration" / "report.html", consistency="textual", delta=0.1, browser=browser)
    with replacing(str(picture)) as temporary:
        temporary.write_bytes(shot)


def make_tradeoff(folder: pathlib.Path, picture: pathlib.Path) -> None:
    """Trains an exit classifier for the embedded model in `folder`, measures with it, and writes the plot."""
    _write_training_data(folder / "data")
    model, data = str(folder / "model"), str(embedded.CALIBRATION_SET)
    _run(
        "train",
        "--stage=classifier",
        f"--checkpoint={embedded.MODEL}",
        f"--data={folder / 'data' / 'training.jsonl.gz'}",
        f"--validation_data={folder / 'data' / 'validation.jsonl.gz'}",
        "--max_input_length=48",
        "--max_target_length=48",
        f"--output={model}",
    )
    _run(
        "evaluate",
        "--experiment=tradeoff",
        f"--checkpoint={model}",
        f"--data={data}",
        "--metric=rouge_l_unicode",
        "--confidence=softmax,state,classifier",
        f"--thresholds={_THRESHOLDS}",
        f"--output={folder / 'tradeoff'}",
    )
    points = read_points(folder / "tradeoff" / "tradeoff.csv")
    draw(points, measure_times(points, model=model, data=data, prompts=_TIMED_PROMPTS), path=picture)


def _write_training_data(folder: pathlib.Path) -> None:
    write_data.write_data(
        folder,
        seed=write_data.SEED,
        training=write_data.TRAINING,
        validation=write_data.VALIDATION,
        calibration=write_data.CALIBRATION,
    )


def _run(*argv: str) -> None:
    if calm_beam(argv) != 0:
        raise RuntimeError(f"calm-beam {' '.join(argv)} failed.")


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the pictures and returns an exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.pictures", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=pathlib.Path, required=True, help="directory to write to")
    output: pathlib.Path = parser.parse_args(argv).output
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        make_report(folder, output / "report.webp")
        make_tradeoff(folder, output / "tradeoff.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
