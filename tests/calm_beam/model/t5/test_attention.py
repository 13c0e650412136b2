"""Relative position buckets and the bias computed from them."""

import jax.numpy as jnp
import numpy as np
import pytest

from calm_beam.model.t5.attention import RelativePositionBias, relative_position_bucket
from tests.builders import build_config
from tests.numpy_t5 import bucket_of

_DISTANCES = np.arange(-300, 301)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (16, 128), (32, 64), (8, 32)])
def test_buckets_equal_a_count_in_whole_numbers(buckets: int, max_distance: int, bidirectional: bool) -> None:
    """Every distance has the bucket computed in integers, also where a bucket starts exactly at it."""
    found = relative_position_bucket(
        _DISTANCES, buckets=buckets, max_distance=max_distance, bidirectional=bidirectional
    )
    counted = [bucket_of(int(each), buckets, max_distance, both_ways=bidirectional) for each in _DISTANCES]
    assert found.tolist() == counted


def test_where_the_decoders_buckets_begin() -> None:
    """There is one bucket per distance below 16, then wider ones, the last from 113 on."""
    behind = relative_position_bucket(-np.arange(400), buckets=32, max_distance=128, bidirectional=False)
    starts = [0, *(np.flatnonzero(np.diff(behind)) + 1).tolist()]
    assert starts == [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]


def test_where_the_encoders_buckets_begin() -> None:
    """Each direction has 16 buckets; 8, 16, 32 and 64 start buckets exactly."""
    behind = relative_position_bucket(-np.arange(400), buckets=32, max_distance=128, bidirectional=True)
    starts = [0, *(np.flatnonzero(np.diff(behind)) + 1).tolist()]
    assert starts == [*range(8), 8, 12, 16, 23, 32, 46, 64, 91]


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_never_fall_with_distance(bidirectional: bool) -> None:
    """The bucket number never falls with the distance on either side, and stays in range."""
    for side in (_DISTANCES[_DISTANCES >= 1], -_DISTANCES[_DISTANCES <= 0][::-1] * -1):
        found = relative_position_bucket(side, buckets=32, max_distance=128, bidirectional=bidirectional)
        assert np.all(np.diff(found) >= 0)
        assert found.min() >= 0
        assert found.max() <= 31


def test_keys_after_the_query() -> None:
    """To a decoder all keys after the query are distance 0; to an encoder they have the upper half of the buckets."""
    ahead = np.arange(1, 200)
    one_way = relative_position_bucket(ahead, buckets=32, max_distance=128, bidirectional=False)
    assert not one_way.any()
    upper = relative_position_bucket(ahead, buckets=32, max_distance=128, bidirectional=True)
    lower = relative_position_bucket(-ahead, buckets=32, max_distance=128, bidirectional=True)
    assert (upper == lower + 16).all()


@pytest.mark.parametrize("bidirectional", [True, False])
def test_the_bias_is_a_look_up(bidirectional: bool) -> None:
    """The bias of query q to key k is the table's entry for the bucket of k - q, in float32."""
    config = build_config(relative_buckets=8, relative_max_distance=20)
    table = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    module = RelativePositionBias(config, bidirectional=bidirectional)
    bias = module.apply({"params": {"rel_embedding": jnp.asarray(table)}}, 30)
    assert bias.shape == (2, 30, 30)
    assert bias.dtype == jnp.float32
    for query in range(30):
        columns = [bucket_of(key - query, 8, 20, both_ways=bidirectional) for key in range(30)]
        np.testing.assert_array_equal(bias[:, query], table[:, columns])
