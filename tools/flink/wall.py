"""Times a calibration of thousands of prompts in one process, in two and on Flink.

    python -m tools.flink.wall
    python -m tools.flink.wall --checkpoint=model --data=rows.jsonl.gz

Without flags, the demo model and 5,000 prompts made of its examples. Seconds include the start of each command, but
not that of the cluster, which has two TaskManagers. Files are compared with those of one process. Prints a line for
each runner; the exit status is 1 if files differ.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from calm_beam.inputs.demo import embedded

from .checks import ENTRY, PROCESSES, Checks, outcome_of
from .cluster import running_cluster
from .files import EngineError, Engines

_PROMPTS = 5000
_FLAGS = (
    *("--engine=native", "--confidence=softmax", "--consistency=textual", "--metric=rouge_l_unicode"),
    *("--delta=0.05", "--num_shards=16"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; returns 1 if files differ, or an engine is not available."""
    parser = argparse.ArgumentParser(prog="python -m tools.flink.wall", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", default="build/flink-wall", help="folder of what runs write, and of their logs")
    parser.add_argument("--checkpoint", default=str(embedded.MODEL))
    parser.add_argument("--data", help=f"default: {_PROMPTS:,} prompts of the demo")
    flags = parser.parse_args(argv)
    folder = pathlib.Path(flags.output).absolute()
    data = flags.data or Checks(folder, examples=_PROMPTS).rows
    words = ("-c", ENTRY, "calibrate", f"--checkpoint={flags.checkpoint}", f"--data={data}", *_FLAGS)
    outcomes = []
    try:
        with running_cluster(Engines.here()) as cluster:
            for runner, own in {"one process": (), "two processes": PROCESSES, "flink": cluster.flags}.items():
                output = folder / runner.replace(" ", "-")
                asked = (*words, *own, f"--output={output}")
                outcomes.append(outcome_of(asked, output, one=folder / "one-process"))
                print(f"{runner}: {outcomes[-1].in_words}", flush=True)
    except EngineError as error:
        print(f"wall: {error}", file=sys.stderr)
        return 1
    return int(any(outcome.status or outcome.differing for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
