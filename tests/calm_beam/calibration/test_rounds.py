"""The division of shards into rounds, and the files that store a round's counts."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm_beam.calibration.plan import layout_of
from calm_beam.calibration.rounds import Round, division_digest, has_rounds, rounds_of
from calm_beam.manifest import Plan, SequentialPlan
from calm_beam.outputs import OutputsError, StoredShard
from calm_beam.outputs.metric_checks import Contrast, Unseen, UnseenText
from calm_beam.outputs.totals import CalibrationTotals
from tests.plans import all_specs

from .builders import build_generation, build_plan, build_totals

_SPECS = all_specs(
    consistencies=("textual", "risk"),
    metrics=("token_f1",),
    deltas=(0.3,),
    epsilons=(0.1,),
    p_value="signed_mixture",
)
_PLAN = build_plan(_SPECS, (0.9, 0.5), sequential=SequentialPlan(round_examples=3, stop_gain=0.02))


@given(
    sizes=st.dictionaries(st.integers(0, 99), st.integers(1, 50), min_size=1, max_size=30),
    round_examples=st.integers(1, 200),
)
def test_rounds_are_the_shards_in_order(sizes: dict[int, int], round_examples: int) -> None:
    """Every shard is in one round, in ascending order; rounds but the last have equally many, of about the size."""
    rounds = rounds_of(sizes, round_examples=round_examples)
    assert [shard for shards in rounds for shard in shards] == sorted(sizes)
    *full, last = rounds
    mean = sum(sizes.values()) / len(sizes)
    for shards in full:
        assert len(shards) == len(rounds[0]) >= len(last)
        assert len(shards) == 1 or abs(len(shards) * mean - round_examples) <= mean / 2 + 1e-9


def test_every_change_of_the_data_is_another_division() -> None:
    """One shard more, less or larger changes the division's digest, even if no round begins elsewhere."""
    sizes = {0: 10, 1: 12, 3: 9}
    digests = {
        division_digest(changed, round_examples=10)
        for changed in (sizes, {**sizes, 4: 1}, {**sizes, 3: 10}, {0: 10, 1: 12}, {**sizes, 2: 1})
    }
    assert len(digests) == 5
    assert division_digest(dict(reversed(sizes.items())), round_examples=10) in digests
    assert division_digest(sizes, round_examples=25) not in digests


def _round(plan: Plan = _PLAN, *, seed: int = 0, number: int = 2, unseen: tuple[Unseen, ...] = ()) -> Round:
    losses = np.random.default_rng(seed).uniform(size=(5, 2, 2))
    generation = build_generation()
    totals = dataclasses.replace(
        build_totals(losses, layout_of(plan)),
        by_shard=((3, 4), (7, 1)),
        failures=(("a", "why"), ("b", "ünd")),
        truncated=1,
        duplicates=2,
        content_sum=2**255 + 3,
        contrast=Contrast.of(
            generation.example, ["cat", "cat", "dog"], scores=[[1.0, 0.5], [1 / 3, 1 / 3]], unseen=unseen
        ),
    )
    shards = tuple(StoredShard(shard=shard, examples=size, failed=0, digest="x") for shard, size in totals.by_shard)
    return Round(
        number=number,
        division="sha256:1",
        scored_by={"python": "3"},
        rounds=9,
        examples=60,
        shards=shards,
        totals=totals,
    )


def test_a_round_comes_back_as_it_was(tmp_path: pathlib.Path) -> None:
    """A round's counts are read back exactly; an uncounted round is None."""
    counted = _round()
    counted.write(str(tmp_path), _PLAN)
    found = Round.read(str(tmp_path), 2, _PLAN)
    assert found == counted
    assert found.totals.merge(found.totals) == counted.totals.merge(counted.totals)
    assert has_rounds(str(tmp_path))
    assert Round.read(str(tmp_path), 1, _PLAN) is None


def test_what_metrics_did_not_see_comes_back(tmp_path: pathlib.Path) -> None:
    """Unseen texts are read back with their samples; without them, a round's file has no such field."""
    texts = (UnseenText(id="a", text="...", against="!"),)
    for unseen in ((), (Unseen(metric="rouge_l", no_token=1, no_token_samples=texts),)):
        counted = _round(unseen=unseen)
        counted.write(str(tmp_path), _PLAN)
        assert Round.read(str(tmp_path), 2, _PLAN) == counted
        assert ('"unseen"' in (tmp_path / "round-00002.json").read_text(encoding="utf-8")) == bool(unseen)


def test_the_rule_to_stop_may_change(tmp_path: pathlib.Path) -> None:
    """Counts do not depend on the stopping rule."""
    _round().write(str(tmp_path), _PLAN)
    other = dataclasses.replace(_PLAN, sequential=SequentialPlan(round_examples=3, stop_at_layers=4))
    assert Round.read(str(tmp_path), 2, other) == _round()


@pytest.mark.parametrize(
    "change",
    [
        {"salt": "another"},
        {"sequential": SequentialPlan(round_examples=4)},
        {"tests": tuple(dataclasses.replace(spec, delta=0.2) for spec in _SPECS)},
    ],
    ids=["order", "rounds", "tolerance"],
)
def test_tests_may_not_change_once_losses_were_seen(change: dict[str, object], tmp_path: pathlib.Path) -> None:
    """After a round has been counted, other tests are refused."""
    _round().write(str(tmp_path), _PLAN)
    with pytest.raises(OutputsError, match="Neither can be changed once losses have been seen"):
        Round.read(str(tmp_path), 2, dataclasses.replace(_PLAN, **change))  # type: ignore[arg-type]


def test_a_file_that_was_changed_is_refused(tmp_path: pathlib.Path) -> None:
    """A changed or missing number is refused, and so is invalid JSON."""
    _round().write(str(tmp_path), _PLAN)
    (path,) = tmp_path.iterdir()
    content = json.loads(path.read_text())
    content["totals"]["n"] = 6
    path.write_text(json.dumps(content))
    with pytest.raises(OutputsError, match="was changed after it was written"):
        Round.read(str(tmp_path), 2, _PLAN)
    for text in ("{}", "[]", "no JSON"):
        path.write_text(text)
        with pytest.raises(OutputsError, match="is not as calm-beam writes it"):
            Round.read(str(tmp_path), 2, _PLAN)


def test_a_round_is_what_its_shards_hold() -> None:
    """A round whose totals have fewer examples than its shards is refused."""
    counted = _round()
    with pytest.raises(OutputsError, match="shard 7: 1 example was counted, but it has 2"):
        dataclasses.replace(counted, shards=(counted.shards[0], dataclasses.replace(counted.shards[1], examples=2)))


def test_merged_rounds_are_the_whole() -> None:
    """Totals that were read back merge like others."""
    first, second = _round(seed=1).totals, _round(seed=2).totals
    assert isinstance(first.merge(second), CalibrationTotals)
    assert first.merge(second).risk == second.merge(first).risk
