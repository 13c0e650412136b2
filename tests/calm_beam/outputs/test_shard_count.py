"""The default number of shards."""

import pathlib

from hypothesis import given
from hypothesis import strategies as st

from calm_beam.inputs import DataFiles
from calm_beam.outputs.sharding import LEAST_SHARDS, MOST_SHARDS, default_shards, shards_for

_EXAMPLES = st.integers(min_value=0, max_value=10**9)
_WORKERS = st.integers(min_value=1, max_value=500)


@given(examples=_EXAMPLES, more=st.integers(min_value=0, max_value=10**8), workers=st.none() | _WORKERS)
def test_more_examples_never_take_fewer_shards(examples: int, more: int, workers: int | None) -> None:
    """The number grows with the data, between its bounds."""
    few, many = shards_for(examples, workers=workers), shards_for(examples + more, workers=workers)
    assert LEAST_SHARDS <= few <= many <= MOST_SHARDS


@given(examples=_EXAMPLES, workers=_WORKERS)
def test_every_worker_has_as_many_shards(examples: int, workers: int) -> None:
    """Shards are a multiple of the workers, up to the limit, and at least the number without workers."""
    shards = shards_for(examples, workers=workers)
    assert shards % workers == 0 or shards == MOST_SHARDS
    assert shards >= shards_for(examples)


def test_small_data_stay_in_four_shards(tmp_path: pathlib.Path) -> None:
    """Up to four thousand examples there are four shards."""
    path = tmp_path / "rows.jsonl"
    for examples, shards in ((1, 4), (4000, 4), (4001, 5), (20_000, 20)):
        path.write_text('{"input": "a"}\n' * examples)
        assert default_shards(DataFiles.found(str(path))) == shards
    assert shards_for(None) == 4
