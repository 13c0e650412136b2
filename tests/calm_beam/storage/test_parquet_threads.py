"""Parquet is read on the calling thread."""

import pathlib
import subprocess
import sys

import pytest

# Arrow's threads outlive the read that started them; jemalloc's does not touch Python.
_COUNTED = """
import os, pathlib, sys
import pyarrow
from calm_beam.evaluation.outcomes import read_grid, write_grid
from calm_beam.inputs.examples import Example
from calm_beam.outputs import Generation
from calm_beam.outputs import Output
from calm_beam.outputs import read_generations
from calm_beam.outputs import stored_examples
from calm_beam.outputs import stored_failures
from calm_beam.outputs import stored_prompts
from calm_beam.outputs import stored_shard
from calm_beam.outputs import write_generations
from calm_beam.inputs import read_examples
from calm_beam.report.examples import count_exits

def threads():
    names = [pathlib.Path(f"/proc/self/task/{task}/comm").read_text() for task in os.listdir("/proc/self/task")]
    return sum("jemalloc" not in name for name in names)

folder = sys.argv[1]
shard, data, grid = f"{folder}/shard.parquet", f"{folder}/data.parquet", f"{folder}/grid.parquet"
example = Example(
    id="a", has_own_id=True, input="in", input_ids=None, references=("out",), cluster=None, file_index=0, line=1
)
output = Output(text="out", tokens=(5, 1), exit_layers=(2, 2), confidences=(0.5, 0.5))
generation = Generation(example=example, truncated=False, duplicate=False, failure=None, outputs=(output, output))
write_generations(shard, [generation], shard=0, digest="")
pyarrow.parquet.write_table(pyarrow.table({"input": ["in"], "target": ["out"], "id": ["a"]}), data)
write_grid(grid, [])

pyarrow.set_cpu_count(4)
before = threads()
assert [*read_generations(shard)] == [generation]
assert stored_examples(shard) == [example]
assert (stored_failures(shard), stored_prompts(shard), stored_shard(shard).examples) == ([], {("in", None, None)}, 1)
assert count_exits(shard, [0, 1], num_layers=2, max_decode_length=4, end_ids=[1]).outputs == 1
assert [each.input for each in read_examples(data)] == ["in"]
assert read_grid(grid) == []
assert threads() == before, (before, threads())
pyarrow.parquet.read_table(shard)
assert threads() > before, "a read with threads was not seen"
"""


@pytest.mark.skipif(not pathlib.Path("/proc/self/task").exists(), reason="counts threads as Linux lists them")
def test_reading_starts_no_threads(tmp_path: pathlib.Path) -> None:
    """Reading starts none of Arrow's threads, which can abort the process by freeing Python's memory at its end."""
    done = subprocess.run(
        [sys.executable, "-c", _COUNTED, str(tmp_path)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
