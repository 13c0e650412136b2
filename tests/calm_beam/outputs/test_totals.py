"""Exact totals over a calibration set, for any order and shards."""

import dataclasses
import functools
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calm_beam.calibration.guarantee import Guarantee
from calm_beam.outputs import Generation
from calm_beam.outputs.totals import CalibrationTotals, Layout
from calm_beam.risk.evidence import IsFraction, Loss, SquaredLoss
from calm_beam.risk.losses import LOSS_SCALE
from calm_beam.risk.pvalues import P_VALUES
from tests.calm_beam.calibration.builders import build_example, build_generation, build_output

# Every statistic, and a table: one spec for each p-value and loss.
_SPECS = [
    *(Guarantee("textual", "rouge_l", delta=0.1, p_value=p_value).planned() for p_value in P_VALUES),
    *(Guarantee("risk", "rouge_l", delta=delta).planned() for delta in (0.1, 0.9)),
]
_LAYOUT = Layout.of(_SPECS, thresholds=3)
_ZERO = CalibrationTotals.zero(_LAYOUT)
_UNIT = st.one_of(st.integers(0, LOSS_SCALE), st.sampled_from([0, 1, LOSS_SCALE - 1, LOSS_SCALE]))
_SIGNED_UNIT = st.one_of(st.integers(-LOSS_SCALE, LOSS_SCALE), st.sampled_from([-LOSS_SCALE, 0, LOSS_SCALE]))


def _totals_of(generations: Sequence[Generation], losses: np.ndarray | None = None) -> CalibrationTotals:
    """Returns totals of examples that are units by themselves, by default without any loss."""
    fixed = np.zeros((len(generations), 2, 3), np.int64) if losses is None else losses
    ids = [generation.example.id for generation in generations]
    return CalibrationTotals.of_examples(generations, _LAYOUT).merge(
        CalibrationTotals.of_losses(ids, fixed, layout=_LAYOUT, salt="s")
    )


@st.composite
def _example(draw: st.DrawFn) -> tuple[Generation, np.ndarray]:
    """Returns an example with arbitrary losses and layers; sometimes a failed one."""
    textual, signed = (draw(st.lists(unit, min_size=3, max_size=3)) for unit in (_UNIT, _SIGNED_UNIT))
    losses = np.array([textual, signed], np.int64)
    example = build_example(id=draw(st.uuids()).hex)
    if draw(st.booleans()):
        return build_generation(example=example, outputs=(), failure="x"), np.full((2, 3), LOSS_SCALE)
    layers = st.lists(st.integers(1, 4), min_size=1, max_size=4)
    outputs = tuple(build_output("t", exit_layers=draw(layers)) for _ in range(4))
    flags: dict[str, Any] = {"truncated": draw(st.booleans()), "duplicate": draw(st.booleans())}
    return build_generation(example=example, outputs=outputs, **flags), losses


def _all_totals(examples: Sequence[tuple[Generation, np.ndarray]]) -> CalibrationTotals:
    """Returns totals of one batch."""
    if not examples:
        return _ZERO
    return _totals_of([generation for generation, _ in examples], np.stack([losses for _, losses in examples]))


_TOTALS = _example().map(lambda example: _all_totals([example]))


def _merged(parts: list[CalibrationTotals]) -> CalibrationTotals:
    return functools.reduce(CalibrationTotals.merge, parts, _ZERO)


@settings(max_examples=60, deadline=None)
@given(examples=st.lists(_example(), max_size=8), data=st.data())
def test_any_sharding_gives_the_same_totals(examples: list[tuple[Generation, np.ndarray]], data: st.DataObject) -> None:
    """Any order, divided into any shards in batches or one by one, merged in any tree, gives the identical value."""
    shuffled = data.draw(st.permutations(examples))
    owners = data.draw(st.lists(st.integers(0, 3), min_size=len(examples), max_size=len(examples)))
    dealt = [[part for part, owner in zip(shuffled, owners, strict=True) if owner == i] for i in range(4)]
    one_by_one = [_merged([_all_totals([example]) for example in shard]) for shard in dealt[:2]]
    parts = data.draw(st.permutations([*one_by_one, *(_all_totals(shard) for shard in dealt[2:])]))
    left = data.draw(st.integers(0, 4))
    tree = _merged(parts[:left]).merge(_merged(parts[left:]))
    whole = _all_totals(examples)
    assert tree == whole
    if examples:
        assert _p_values(tree) == _p_values(whole)


def _p_values(totals: CalibrationTotals) -> list[list[float]]:
    """Returns every p-value, to the last bit, except the binomial one, which is for coins only."""
    return [
        P_VALUES[spec.p_value].p_values(totals.evidence(spec), spec.delta, spec.epsilon).tolist()
        for spec in _SPECS
        if spec.p_value != "exact_binomial"
    ]


@settings(max_examples=40, deadline=None)
@given(_TOTALS, _TOTALS, _TOTALS)
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
    losses = np.array([[[0, 2**30, LOSS_SCALE], [-(2**30), 0, 7]]])
    totals = _totals_of([generation], losses)
    textual_spec, risk_spec = (
        next(spec for spec in _SPECS if spec.objective == objective) for objective in _LAYOUT.objectives
    )
    for spec, row in zip((textual_spec, risk_spec), losses[0], strict=True):
        evidence = totals.evidence(spec)
        assert evidence.n == 1
        assert evidence.sums[Loss()].tolist() == row.tolist()
    textual = totals.evidence(textual_spec)
    assert textual.sums[SquaredLoss()].tolist() == [0, 2**28, LOSS_SCALE]
    assert textual.sums[IsFraction()].tolist() == [0, 1, 0]
    assert textual.table is not None
    assert textual.table.tolist() == losses[0, :1].tolist()
    assert totals.evidence(risk_spec).table is None
    assert totals.whole.layer_sums == (12, 6, 1, 2)
    assert totals.whole.token_counts == (3, 2, 1, 2)
    assert (totals.examples, totals.failed, totals.truncated, totals.duplicates) == (1, 0, 1, 1)


def test_layers_are_means_over_tokens() -> None:
    """Layers are averaged over all tokens, not over examples, and failed examples have none."""
    long = build_generation(outputs=tuple(build_output("t", exit_layers=(4, 1, 1)) for _ in range(4)))
    short = build_generation(outputs=tuple(build_output("t", exit_layers=(2,)) for _ in range(4)))
    failed = build_generation(outputs=(), failure="x")
    totals = _totals_of([long, short, failed])
    assert totals.whole.mean_layers(4) == (2.0,) * 4
    assert totals.failed == 1
    assert totals.risk.n == totals.examples == 3


def test_layers_without_tokens_are_all_layers() -> None:
    """Without tokens, nothing was saved, so the mean is all layers."""
    assert _ZERO.whole.mean_layers(6) == (6.0,) * 4


def test_totals_over_other_grids_do_not_merge() -> None:
    """Totals over another number of thresholds are refused."""
    with pytest.raises(ValueError, match=r"only totals with the same layout .* can be added"):
        _ZERO.merge(CalibrationTotals.zero(dataclasses.replace(_LAYOUT, thresholds=4)))


def test_totals_survive_pickling() -> None:
    """Pickled totals, as between workers, are equal."""
    totals = _totals_of([build_generation(outputs=_OUTPUTS)])
    assert pickle.loads(pickle.dumps(totals)) == totals
    assert totals != _ZERO


def _fingerprint(*generations: Generation) -> str:
    return CalibrationTotals.of_examples(generations, _LAYOUT).data_fingerprint()


_OUTPUTS = tuple(build_output("t") for _ in range(4))


def test_fingerprint_does_not_depend_on_order_or_outputs() -> None:
    """The same examples have the same fingerprint in any order, from any file, with any outputs."""
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
        {"cluster": "p"},
    ],
)
def test_fingerprint_depends_on_content(change: dict[str, object]) -> None:
    """Another id, prompt, reference or cluster gives another fingerprint."""
    example = build_example()
    changed = dataclasses.replace(example, **change)  # type: ignore[arg-type]
    assert _fingerprint(build_generation(outputs=_OUTPUTS, example=example)) != _fingerprint(
        build_generation(outputs=_OUTPUTS, example=changed)
    )


def test_fingerprint_counts_examples_that_occur_twice() -> None:
    """A set with an example twice has another fingerprint: digests are summed, not xor-ed."""
    one = build_generation(outputs=_OUTPUTS)
    assert len({_fingerprint(), _fingerprint(one), _fingerprint(one, one), _fingerprint(one, one, one)}) == 4
