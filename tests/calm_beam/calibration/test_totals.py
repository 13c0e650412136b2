"""Totals over a calibration set: exact, whatever the order and the shards."""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calm_beam.calibration.totals import CalibrationTotals
from calm_beam.generations import Generation
from tests.calm_beam.calibration.builders import build_example, build_generation, build_output

_ZERO = CalibrationTotals.zero(objectives=2, thresholds=3)
_LOSS = st.floats(0, 1, allow_subnormal=True)


@st.composite
def _totals(draw: st.DrawFn) -> CalibrationTotals:
    """Totals of one example with arbitrary losses and layers; sometimes a failed one."""
    losses = np.array(draw(st.lists(st.lists(_LOSS, min_size=3, max_size=3), min_size=2, max_size=2)))
    example = build_example(id=draw(st.text(min_size=1, max_size=3)))
    if draw(st.booleans()):
        return CalibrationTotals.of(build_generation(example=example, outputs=(), failure="x"), np.ones((2, 3)))
    layers = st.lists(st.integers(1, 4), min_size=1, max_size=4)
    outputs = tuple(build_output("t", exit_layers=draw(layers)) for _ in range(4))
    generation = build_generation(
        example=example, outputs=outputs, truncated=draw(st.booleans()), duplicate=draw(st.booleans())
    )
    return CalibrationTotals.of(generation, losses)


def _merged(parts: list[CalibrationTotals]) -> CalibrationTotals:
    return functools.reduce(CalibrationTotals.merge, parts, _ZERO)


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(_totals(), max_size=8), data=st.data())
def test_any_sharding_gives_the_same_totals(parts: list[CalibrationTotals], data: st.DataObject) -> None:
    """Any order, dealt to any shards, merged in any order, gives the identical value."""
    shuffled = data.draw(st.permutations(parts))
    owners = data.draw(st.lists(st.integers(0, 3), min_size=len(parts), max_size=len(parts)))
    shards = [_merged([part for part, owner in zip(shuffled, owners, strict=True) if owner == i]) for i in range(4)]
    assert _merged(data.draw(st.permutations(shards))) == _merged(parts)


@settings(max_examples=40, deadline=None)
@given(_totals(), _totals(), _totals())
def test_merge_laws(a: CalibrationTotals, b: CalibrationTotals, c: CalibrationTotals) -> None:
    """Merging is associative and commutative, with zero as its unit."""
    assert a.merge(b).merge(c) == a.merge(b.merge(c))
    assert a.merge(b) == b.merge(a)
    assert a.merge(_ZERO) == a
    assert _ZERO.merge(a) == a


def test_one_example() -> None:
    """One example's totals are its losses, layers, tokens and flags."""
    outputs = tuple(build_output("t", exit_layers=layers) for layers in ((4, 4, 4), (4, 2), (1,), (1, 1)))
    generation = build_generation(outputs=outputs, truncated=True, duplicate=True)
    totals = CalibrationTotals.of(generation, np.array([[0, 0.25, 1], [0, 0, 0.5]]))
    assert totals.risk.n == 1
    assert totals.risk.empirical_risk().tolist() == [[0, 0.25, 1], [0, 0, 0.5]]
    assert totals.layer_sums == (12, 6, 1, 2)
    assert totals.token_counts == (3, 2, 1, 2)
    assert (totals.failed, totals.truncated, totals.duplicates) == (0, 1, 1)


def test_layers_are_means_over_tokens() -> None:
    """Layers are averaged over all tokens, not over examples, and failed examples have none."""
    long = build_generation(outputs=tuple(build_output("t", exit_layers=(4, 1, 1)) for _ in range(4)))
    short = build_generation(outputs=tuple(build_output("t", exit_layers=(2,)) for _ in range(4)))
    failed = build_generation(outputs=(), failure="x")
    losses = np.ones((2, 3))
    totals = _merged([CalibrationTotals.of(generation, losses) for generation in (long, short, failed)])
    assert totals.mean_layers(4) == (2.0,) * 4
    assert totals.failed == 1
    assert totals.risk.n == 3


def test_layers_without_tokens_are_all_layers() -> None:
    """Where nothing was generated, nothing was saved."""
    assert _ZERO.mean_layers(6) == (6.0,) * 4


def test_totals_over_other_grids_do_not_merge() -> None:
    """Totals over another number of thresholds are refused."""
    with pytest.raises(ValueError, match="Only totals over the same objectives and grid can be added"):
        _ZERO.merge(CalibrationTotals.zero(objectives=2, thresholds=4))


def _fingerprint(*generations: Generation) -> str:
    return _merged([CalibrationTotals.of(item, np.zeros((2, 3))) for item in generations]).data_fingerprint()


_OUTPUTS = tuple(build_output("t") for _ in range(4))


def test_fingerprint_does_not_depend_on_order_or_outputs() -> None:
    """The same examples have the same fingerprint in any order, from any file, whatever became of them."""
    one = build_generation(outputs=_OUTPUTS)
    two = build_generation(outputs=_OUTPUTS, example=build_example(id="b", file_index=3, line=9))
    moved = build_generation(outputs=(), failure="x", example=build_example(file_index=1, line=5))
    assert _fingerprint(one, two) == _fingerprint(two, moved)
    assert _fingerprint(one).startswith("sha256-sum:")
    assert len(_fingerprint(one)) == len("sha256-sum:") + 64


@pytest.mark.parametrize(
    "change",
    [
        {"id": "z"},
        {"input": "the dog"},
        {"input": None, "input_ids": (5, 1)},
        {"references": ("dog",)},
        {"references": ("cat", "cat")},
        {"references": ()},
    ],
)
def test_fingerprint_depends_on_content(change: dict[str, object]) -> None:
    """Another id, prompt or reference gives another fingerprint."""
    example = build_example()
    changed = dataclasses.replace(example, **change)  # type: ignore[arg-type]
    assert _fingerprint(build_generation(outputs=_OUTPUTS, example=example)) != _fingerprint(
        build_generation(outputs=_OUTPUTS, example=changed)
    )


def test_fingerprint_counts_examples_that_occur_twice() -> None:
    """A set with an example twice is another set: digests are summed, not xor-ed."""
    one = build_generation(outputs=_OUTPUTS)
    assert len({_fingerprint(), _fingerprint(one), _fingerprint(one, one), _fingerprint(one, one, one)}) == 4
