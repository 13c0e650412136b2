"""The combined verdict of several runs of `verify --anytime`."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm_beam.calibration.anytime import AnytimeEvidence, PromiseEvidence
from calm_beam.risk.losses import LOSS_SCALE
from calm_beam.risk.pvalues import p_values_of
from calm_beam.risk.pvalues.signed_mixture import BETS
from tests.calm_beam.serving.builders import build_entry


def _after(losses: list[float], *, delta: float = 0.1, is_signed: bool = False) -> PromiseEvidence:
    array = np.array(losses)
    return PromiseEvidence().after(array, array, delta=delta, is_signed=is_signed)


@given(losses=st.lists(st.floats(-1, 1), min_size=1, max_size=20), delta=st.floats(0.01, 0.9), is_signed=st.booleans())
def test_p_values_are_those_of_the_mixture_written_out(losses: list[float], delta: float, is_signed: bool) -> None:
    """The p-value for an excess is 1 / W of bettors on large losses; that for a proof is `signed_mixture`'s."""
    taken = losses if is_signed else [abs(loss) for loss in losses]
    fixed = [math.ceil(loss * LOSS_SCALE) / LOSS_SCALE for loss in taken]
    lowest = -1 if is_signed else 0
    wealth = sum(
        part * math.prod(1 + share / (delta - lowest) * (loss - delta) for loss in fixed)
        for share, part in BETS.items()
    )
    evidence = _after(taken, delta=delta, is_signed=is_signed)
    assert evidence.excess_p_value == pytest.approx(min(1, 1 / wealth), rel=1e-6)
    assert evidence.excess_p_value >= min(1, 1 / wealth) * (1 - 1e-12)
    assert evidence.p_value == p_values_of(np.array(taken), p_value="signed_mixture", delta=delta)


def test_runs_add_up() -> None:
    """Capitals after three runs, stored in between, are those of one run; p-values are the least after any run."""
    losses = np.random.default_rng(0).random(90) ** 3
    entry = build_entry(0.5, delta=0.2)
    evidence = AnytimeEvidence.start("sha256:0", promises=1, alpha=0.05)
    p_values = []
    for number, part in enumerate(np.split(losses, 3)):
        evidence = evidence.after_run([f"{number}"], [(part, part)], entries=[entry])
        evidence = AnytimeEvidence.from_dict(json.loads(json.dumps(evidence.to_dict())))
        p_values.append(_after(losses[: 30 * number + 30].tolist(), delta=0.2))
    (promise,) = evidence.promises
    whole = p_values[-1]
    assert (promise.n, promise.loss_sum, promise.proof, promise.excess) == (
        90,
        whole.loss_sum,
        whole.proof,
        whole.excess,
    )
    assert promise.p_value == min(each.p_value for each in p_values)
    assert promise.excess_p_value == min(each.excess_p_value for each in p_values)
    assert (evidence.runs, evidence.come_again(["0", "2", "3"])) == (3, 2)


@given(losses=st.lists(st.floats(0, 1), max_size=30), seed=st.integers(0, 100))
def test_the_order_of_the_examples_changes_nothing(losses: list[float], seed: int) -> None:
    """Sums of integers do not depend on the order of examples."""
    shuffled = np.random.default_rng(seed).permutation(losses).tolist()
    assert _after(losses) == _after(shuffled)


def test_failures_prove_no_excess_and_no_promise() -> None:
    """A failed output counts with its lowest loss for an excess, and with 1 for a proof."""
    strict, lenient = np.array([1.0] * 50 + [0.0] * 50), np.zeros(100)
    evidence = PromiseEvidence().after(strict, lenient, delta=0.1, is_signed=False)
    assert evidence.excess_p_value == 1
    assert evidence.p_value == 1
    assert PromiseEvidence().after(strict, strict, delta=0.1, is_signed=False).excess_p_value < 1e-6
    assert PromiseEvidence().after(lenient, lenient, delta=0.1, is_signed=False).p_value < 0.01


def test_a_broken_promise_stays_broken_and_others_share_alpha() -> None:
    """Holm's procedure covers all promises, also those that no run has tested; a broken one stays broken."""
    entries = [build_entry(0.2, delta=0.1), build_entry(0.5, delta=0.2), build_entry(0.6, delta=0.3)]
    bad, good = np.ones(3), np.zeros(300)
    evidence = AnytimeEvidence.start("sha256:0", promises=3, alpha=0.05)
    evidence = evidence.after_run(["a"], [(bad, bad), None, (good, good)], entries=entries)
    first, last = evidence.verdicts(entries)
    assert (first.entry, last.entry) == (entries[0], entries[2])
    assert 0.05 / 3 >= first.excess_p_value > 0.05 / 30
    assert first.is_broken
    assert (last.is_broken, last.is_proved_again) == (False, True)
    later = evidence.after_run(["b"], [(good, good), None, None], entries=entries)
    assert later.verdicts(entries)[0].is_broken
    assert later.verdicts(entries)[0].risk == pytest.approx(3 / 303)
    # With alpha for thirty promises the same losses are too few.
    many = AnytimeEvidence.start("sha256:0", promises=30, alpha=0.05)
    many = many.after_run(["a"], [(bad, bad)] + [None] * 29, entries=[entries[0]] * 30)
    assert not many.verdicts([entries[0]] * 30)[0].is_broken
