"""Exit layers by position, counted in columns, against a loop."""

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np
import pytest

from calm_beam.outputs import Generation, write_generations
from calm_beam.report.examples import ExitCounts, count_exits
from tests.calm_beam.calibration.builders import build_generation
from tests.calm_beam.report.builders import GRID, NUM_LAYERS, build_output, random_generations

_LONGEST = 9


def _counted(
    path: pathlib.Path, generations: Sequence[Generation], lanes: Sequence[int], *, end_ids: Sequence[int] = (1,)
) -> ExitCounts:
    write_generations(path, generations)
    return count_exits(str(path), lanes, num_layers=NUM_LAYERS, max_decode_length=_LONGEST, end_ids=end_ids)


@pytest.mark.parametrize(
    ("lanes", "end_ids"), [(range(len(GRID) + 1), (1,)), ((0, 3), (1,)), (range(len(GRID) + 1), tuple(range(3, 20)))]
)
def test_against_a_loop(tmp_path: pathlib.Path, lanes: Sequence[int], end_ids: tuple[int, ...]) -> None:
    """Counts of tokens by branch, position and layer, and of cut outputs, equal a loop's, without failures."""
    generations = random_generations(40)
    generations[5] = dataclasses.replace(generations[5], outputs=(), failure="broken")
    counts = _counted(tmp_path / "shard.parquet", generations, lanes, end_ids=end_ids)
    expected = np.zeros(counts.tokens.shape, int)
    cut = [0] * len(lanes)
    for generation in generations:
        for place, lane in enumerate(lanes if generation.outputs else ()):
            output = generation.outputs[lane]
            for position, layer in enumerate(output.exit_layers):
                expected[place, position, layer - 1] += 1
            cut[place] += len(output.tokens) == _LONGEST and output.tokens[-1] not in end_ids
    assert counts.tokens.tolist() == expected.tolist()
    assert counts.tokens.shape[1] == _LONGEST
    assert counts.cut.tolist() == cut
    assert sum(cut) > 0
    assert counts.outputs == 39


def test_parts_add_up(tmp_path: pathlib.Path) -> None:
    """Counts of two shards with different longest outputs, merged either way, are those of both together."""
    one, other = random_generations(10, length=4), random_generations(10, seed=1)
    parts = [_counted(tmp_path / "a", one, (0, 1)), _counted(tmp_path / "b", other, (0, 1))]
    whole = _counted(tmp_path / "c", [*one, *other], (0, 1))
    for merged in (parts[0].merge(parts[1]), parts[1].merge(parts[0])):
        assert merged.tokens.tolist() == whole.tokens.tolist()
        assert (merged.cut.tolist(), merged.outputs) == (whole.cut.tolist(), whole.outputs)


def test_nothing_to_count(tmp_path: pathlib.Path) -> None:
    """Shards of failures alone, and outputs without a token, count nothing."""
    failed = build_generation(outputs=(), failure="broken")
    empty = build_generation(outputs=(build_output((), ()),) * 2)
    assert _counted(tmp_path / "a", [failed], (0, 1)).outputs == 0
    counts = _counted(tmp_path / "b", [empty], (0, 1))
    assert (counts.outputs, counts.tokens.sum(), counts.cut.tolist()) == (1, 0, [0, 0])
