"""Makes the documentation's pictures by running commands on the demo model and data; takes about ten minutes.

python -m tools.pictures --output=docs/pictures
python -m tools.pictures --output=docs/pictures --only=report,proof
"""

import argparse
import functools
import pathlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence

from calm_beam.inputs.demo import embedded
from calm_beam.launch.cli import main as calm_beam
from calm_beam.manifest import MANIFEST, read_manifest
from calm_beam.storage import replacing
from tools.demo_task import write_data

from . import throughput
from .badges import badges
from .report import Scheme, find_browser, photographed, photographed_section
from .terminal import drawn, printed
from .tradeoff import Point, draw, measure_times, proved_threshold, read_points

_THRESHOLDS = (0.999, 0.99, 0.97, 0.95, 0.9, 0.8, 0.7, 0.5, 0.3)
_TIMED_PROMPTS = 15
_PROVED = 0.05
_PAGE = pathlib.Path(__file__).parents[2] / "docs" / "measurements.md"
_PROMPT = "Do they want to repair their car?"


@functools.cache
def _calibrated(folder: pathlib.Path, *flags: str) -> pathlib.Path:
    """Returns the output directory of a calibration, which runs only once."""
    output = folder / "-".join(["calibration", *(flag.strip("-").replace("=", "-") for flag in flags)])
    # The paper's rule by default, so that pictures do not depend on the machine.
    _run("calibrate", *(flags or ("--confidence=softmax",)), f"--output={output}")
    return output


def make_report(folder: pathlib.Path, output: pathlib.Path) -> None:
    """Makes the picture of a report's outputs, light and dark."""
    report = _calibrated(folder) / "report.html"
    schemes: dict[str, Scheme] = {"report.webp": "light", "report-dark.webp": "dark"}
    for name, scheme in schemes.items():
        shot = photographed(report, consistency="textual", delta=0.1, browser=find_browser(), scheme=scheme)
        _write(output / name, shot)


def make_risk(folder: pathlib.Path, output: pathlib.Path) -> None:
    """Makes the picture of a report's risk curve."""
    shot = photographed_section(
        _calibrated(folder) / "report.html",
        heading="Risk at every threshold",
        browser=find_browser(),
        promise=("textual", 0.1),
    )
    _write(output / "risk.webp", shot)


def make_proof(folder: pathlib.Path, output: pathlib.Path) -> None:
    """Makes the picture of a sequential proof, round by round."""
    # Small shards make many rounds.
    sequential = _calibrated(
        folder, "--sequential", "--num_shards=20", "--round_examples=50", "--delta=0.1", "--consistency=textual"
    )
    shot = photographed_section(sequential / "report.html", heading="The proof, round by round", browser=find_browser())
    _write(output / "proof.webp", shot)


def make_evaluation(folder: pathlib.Path, output: pathlib.Path) -> None:
    """Makes the picture of the page of repeated splits, for two measures."""
    generations = ",".join(map(str, (_calibrated(folder), _calibrated(folder, "--confidence=state"))))
    _run(
        "evaluate",
        f"--generations={generations}",
        "--metric=rouge_l_unicode",
        "--consistency=textual",
        "--delta=0.05,0.1,0.25",
        f"--output={folder / 'splits'}",
    )
    shot = photographed_section(
        folder / "splits" / "splits.html",
        heading="Risk and layers over the tolerance",
        browser=find_browser(),
    )
    _write(output / "evaluation.webp", shot)


def make_terminal(folder: pathlib.Path, output: pathlib.Path) -> None:
    """Makes the picture of a terminal: a plan, and an answer in the colours of its exit layers."""
    calibration = _calibrated(folder)
    plan = ["plan", "--delta=0.1", "--risk_guess=0.03,0.05,0.07"]
    answer = ["generate", "--consistency=textual", "--delta=0.05", f"--prompt={_PROMPT}", "--show_layers"]
    session = [
        (f"calm-beam {' '.join(plan)}", printed(plan, cwd=str(folder))),
        (
            "calm-beam generate --manifest=calibration --consistency=textual \\\n"
            f"    --delta=0.05 --prompt='{_PROMPT}' --show_layers",
            printed([*answer, f"--manifest={calibration}"], cwd=str(folder)),
        ),
    ]
    _write(output / "terminal.svg", drawn(session).encode())


def make_throughput(folder: pathlib.Path, output: pathlib.Path) -> None:
    """Makes the plot of tokens per second, from the table in docs/measurements.md."""
    throughput.draw(throughput.read_rates(_PAGE), path=output / "throughput.svg")


def _exit_flags(min_exit_layer: int, exit_interval: int) -> tuple[str, str]:
    return f"--min_exit_layer={min_exit_layer}", f"--exit_interval={exit_interval}"


def _tradeoff_points(
    folder: pathlib.Path,
    measures: str,
    *,
    model: str,
    data: str,
    proved: float,
    min_exit_layer: int = 1,
    exit_interval: int = 1,
) -> list[Point]:
    """Returns the points that `evaluate` measures for some measures, if these layers may exit; one is at `proved`."""
    thresholds = sorted({*_THRESHOLDS, proved}, reverse=True)
    output = folder / f"tradeoff-{min_exit_layer}-{exit_interval}"
    _run(
        "evaluate",
        "--experiment=tradeoff",
        f"--checkpoint={model}",
        f"--data={data}",
        "--metric=rouge_l_unicode",
        f"--confidence={measures}",
        f"--thresholds={','.join(map(str, thresholds))}",
        *_exit_flags(min_exit_layer, exit_interval),
        f"--output={output}",
    )
    return read_points(output / "tradeoff.csv", min_exit_layer=min_exit_layer, exit_interval=exit_interval)


def make_tradeoff(folder: pathlib.Path, output: pathlib.Path) -> None:
    """Trains an exit classifier for the demo model in `folder`, measures with it and a calibration, and plots."""
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
    # `suitability` recommends every second layer for this model.
    lowest = interval = 2
    manifests = [
        read_manifest(str(calibration / MANIFEST))
        for calibration in (_calibrated(folder), _calibrated(folder, *_exit_flags(lowest, interval)))
    ]
    every, second = (proved_threshold(manifest, consistency="textual", delta=_PROVED) for manifest in manifests)
    tradeoff = functools.partial(_tradeoff_points, folder, model=model, data=data)
    points = tradeoff("softmax,state,classifier", proved=every)
    sparse = tradeoff("softmax", proved=second, min_exit_layer=lowest, exit_interval=interval)
    points += [point for point in sparse if point.confidence == "softmax"]
    proved = [
        point
        for point in points
        if (point.series, point.threshold) in {("softmax", every), (f"softmax, every {interval} layers", second)}
    ]
    times = measure_times(points, model=model, data=data, prompts=_TIMED_PROMPTS)
    for point in points:
        seconds = f"{times[point]:.2f}" if point in times else "-"
        print(
            f"{point.series} {point.threshold}: {point.layers:.2f} layers, quality {point.quality:.3f}, time {seconds}"
        )
    draw(points, times, proved=(f"proved for δ = {_PROVED}", proved), path=output / "tradeoff.svg")


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


def make_badges(_: pathlib.Path, output: pathlib.Path) -> None:
    """Makes README's badges."""
    for name, drawing in badges().items():
        _write(output / name, drawing.encode())


_MAKERS: Mapping[str, Callable[[pathlib.Path, pathlib.Path], None]] = {
    "report": make_report,
    "risk": make_risk,
    "proof": make_proof,
    "evaluation": make_evaluation,
    "terminal": make_terminal,
    "throughput": make_throughput,
    "tradeoff": make_tradeoff,
    "badges": make_badges,
}


def _write(path: pathlib.Path, content: bytes) -> None:
    with replacing(str(path)) as temporary:
        temporary.write_bytes(content)


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the pictures and returns an exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.pictures", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=pathlib.Path, required=True, help="directory to write to")
    parser.add_argument(
        "--only", default=",".join(_MAKERS), help=f"which, comma-separated, of {', '.join(_MAKERS)}; default: all"
    )
    flags = parser.parse_args(argv)
    names = flags.only.split(",")
    if unknown := [name for name in names if name not in _MAKERS]:
        parser.error(f"--only: there is no picture {unknown[0]}. Choose from {', '.join(_MAKERS)}.")
    flags.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        for each in names:
            _MAKERS[each](pathlib.Path(name), flags.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
