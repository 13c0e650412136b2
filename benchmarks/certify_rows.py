"""Risk control of ten million losses on two worker processes: rows per second, and memory.

    python -m benchmarks.certify_rows --examples=2500000 --settings=4 --processes=2

Losses are made up by the workers themselves, so that nothing is read; `SumLosses` adds them up and `ControlRisk` tests
the settings. Every bundle that is made tells the most memory that its process has held.
"""

import argparse
import collections
import os
import pathlib
import random
import resource
import tempfile
import time
from collections.abc import Iterator

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from calm_beam.launch.runners import make_runner, run_pipeline
from calm_beam.risk.testing import LossSums, RiskTest, SettingResult
from calm_beam.transforms import ControlRisk, SumLosses

_TESTS = (RiskTest(delta=0.1, epsilon=0.05), RiskTest(delta=0.1, epsilon=0.05, p_value="signed_mixture"))
_BUNDLE = 10_000


def main() -> None:
    """Prints one line for every result, and the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--examples", type=int, default=2_500_000)
    parser.add_argument("--settings", type=int, default=4)
    parser.add_argument("--processes", type=int, default=2)
    flags = parser.parse_args()
    order = tuple(f"setting-{index}" for index in range(flags.settings))
    with tempfile.TemporaryDirectory() as folder:
        options = PipelineOptions([f"--direct_num_workers={flags.processes}", "--direct_running_mode=multi_processing"])
        pipeline = beam.Pipeline(runner=make_runner(options), options=options)
        _ = (
            pipeline
            | beam.Create(range(0, flags.examples, _BUNDLE))
            | beam.Reshuffle()
            | beam.FlatMap(_losses, order=order, examples=flags.examples, folder=folder)
            | beam.CombineGlobally(SumLosses(_TESTS))
            | "TellMemory" >> beam.Map(_told, folder=folder)
            | ControlRisk(_TESTS, order=order)
            | beam.Map(_tell)
        )
        start = time.perf_counter()
        run_pipeline(pipeline)
        seconds = time.perf_counter() - start
        peaks: collections.Counter[str] = collections.Counter()
        for path in pathlib.Path(folder).iterdir():
            peaks[path.name] = int(path.read_text())
    rows = flags.examples * flags.settings
    print(f"{rows:,} rows in {seconds:.0f} s: {rows / seconds:,.0f} rows/s on {flags.processes} processes")
    for name, peak in sorted(peaks.items()):
        print(f"worker {name}: at most {peak / 2**20:.0f} MiB")
    print(f"launcher: at most {_peak() / 2**20:.0f} MiB")


def _losses(first: int, *, order: tuple[str, ...], examples: int, folder: str) -> Iterator[tuple[str, str, float]]:
    draw = random.Random(first)
    for index in range(first, min(first + _BUNDLE, examples)):
        for place, setting in enumerate(order):
            yield f"example-{index}", setting, float(draw.random() < 0.03 * (place + 1))
    _keep_peak(folder)


def _told(sums: LossSums, *, folder: str) -> LossSums:
    _keep_peak(folder)
    return sums


def _keep_peak(folder: str) -> None:
    pathlib.Path(folder, str(os.getpid())).write_text(str(_peak()))


def _peak() -> int:
    # Linux counts in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _tell(result: SettingResult) -> None:
    verdict = "proved" if result.accepted else "not proved"
    print(f"{result.test.p_value:<18} {result.setting:<10} n {result.n} risk {result.risk:.4f} {verdict}", flush=True)


if __name__ == "__main__":
    main()
