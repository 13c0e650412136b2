"""The rounds of a sequential calibration: which shards each round has, its counts, and what the rounds prove.

Rounds consist of whole shards, in the order of their numbers. The number of an example's shard is a hash of its id and
of a salt that was settled beforehand, so nobody chose the order, whatever the losses are. It must not be a
hash of the prompt, as where all shards count: examples with one prompt would come together, and a prompt that is drawn
often would look like evidence from many.

The counts of a round are stored with the generations, one file a round. A resumed run reads them there, and
scores nothing again.

The proof, for thresholds or for other settings, consists of running p-values and the looks that led to them. Why
that is valid at every round, for any rule of when to stop: see `calm_beam.risk.testing.GridTest`.
"""

import dataclasses
import glob
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from calm_beam.manifest import (
    Calibration,
    Look,
    Objective,
    Plan,
    SettingCalibration,
    SettingLook,
    SettingPlan,
    content_digest,
    looks_by_round,
)
from calm_beam.manifest.versions import run_versions
from calm_beam.metrics.registry import metric_source_digest
from calm_beam.outputs import FinishedSweep, OutputsError, StoredGenerations, StoredShard, stored_shard, whole_shard
from calm_beam.outputs.metric_checks import Contrast, Sample, Unseen, UnseenText
from calm_beam.outputs.totals import CalibrationTotals, Layout, Sums
from calm_beam.risk.evidence import RiskTotals
from calm_beam.risk.rules import Proved
from calm_beam.risk.testing import GridTest, LossesError, grid_tests
from calm_beam.storage import is_file, joined, list_files, open_input, replacing, strict_json

from . import certification
from .plan import layout_of
from .result import RiskRow, choose_thresholds, rows_of
from .settings_rounds import EvaluatedLosses

_SCHEMA = "calm-beam/round/v1"


def rounds_of(sizes: Mapping[int, int], *, round_examples: int) -> tuple[tuple[int, ...], ...]:
    """Returns the shards of every round, in order.

    Args:
      sizes: Number of examples of every shard that is not empty.
      round_examples: Each round takes as many shards as hold about this many examples, at least one shard; the last
        round may have fewer.

    >>> rounds_of({0: 40, 1: 60, 3: 60, 4: 50, 5: 40}, round_examples=100)
    ((0, 1), (3, 4), (5,))
    """
    shards = sorted(sizes)
    size = max(1, round(round_examples * len(shards) / sum(sizes.values())))
    return tuple(tuple(shards[start : start + size]) for start in range(0, len(shards), size))


def division_digest(sizes: Mapping[int, int], *, round_examples: int) -> str:
    """Returns a digest of the division of data into rounds, with their sizes; arguments as in `rounds_of`.

    Rounds counted under different divisions may miss shards, or count them twice.
    """
    rounds = rounds_of(sizes, round_examples=round_examples)
    return content_digest({"rounds": [[[shard, sizes[shard]] for shard in shards] for shards in rounds]})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """The counts of one round.

    Attributes:
      number: Number of the round, from 1.
      division: Digest of the division into rounds (`division_digest`), the same in all rounds.
      scored_by: What scored the round: versions by name, and digests of a user's own metrics.
      rounds: Number of rounds if all shards are decoded.
      examples: Number of examples in all rounds.
      shards: Generations of the round.
      totals: Sums over the examples of the round.
    """

    number: int
    division: str
    scored_by: Mapping[str, str]
    rounds: int
    examples: int
    shards: tuple[StoredShard, ...]
    totals: CalibrationTotals

    def __post_init__(self) -> None:
        self.totals.check(FinishedSweep(job="", shards=self.shards))

    def write(self, folder: str, plan: Plan) -> None:
        """Writes the round's file into the folder of its generations, atomically."""
        content = {
            "schema": _SCHEMA,
            "tests": plan.without_rule().digest,
            "number": self.number,
            "division": self.division,
            "scored_by": dict(self.scored_by),
            "rounds": self.rounds,
            "examples": self.examples,
            "shards": [shard.to_dict() for shard in self.shards],
            "totals": _totals_to_json(self.totals),
        }
        text = json.dumps({**content, "digest": content_digest(content)}, ensure_ascii=False) + "\n"
        with replacing(_path(folder, self.number)) as temporary:
            temporary.write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: str, number: int, plan: Plan) -> Self | None:
        """Returns a round that was counted before; None if it was not.

        Args:
          folder: Folder of its generations.
          number: Number of the round.
          plan: The plan under which it was counted; its stopping rule may have been another.

        Raises:
          OutputsError: If the file is damaged, or of another plan: its losses have been seen, so the tests are settled.
        """
        path = _path(folder, number)
        if not is_file(path):
            return None
        try:
            with open_input(path) as file:
                content = strict_json.loads(file.read())
            if content["schema"] != _SCHEMA or content["digest"] != content_digest(content):
                raise OutputsError(f"{path}: was changed after it was written. Decode again with --overwrite.")
            if content["tests"] != plan.without_rule().digest:
                raise OutputsError(
                    f"{path}: the losses of this round were counted for other tests, or in rounds of another size. "
                    "Neither can be changed once losses have been seen. Repeat that run as it was (another rule to "
                    "stop is allowed), or take another --output."
                )
            return cls(
                number=content["number"],
                division=content["division"],
                scored_by=content["scored_by"],
                rounds=content["rounds"],
                examples=content["examples"],
                shards=tuple(StoredShard(**shard) for shard in content["shards"]),
                totals=_totals_from_json(content["totals"], layout_of(plan)),
            )
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, OutputsError):
                raise
            raise OutputsError(f"{path}: is not as calm-beam writes it ({type(error).__name__}: {error}).") from error


def scored_by(plan: Plan) -> dict[str, str]:
    """Returns the versions of what scores in this process, for the objectives of a plan."""
    metrics = {spec.objective.metric for spec in plan.tests}
    own = {name: metric_source_digest(name) for name in metrics if ":" in name}
    return {**run_versions({}, metrics=metrics), **own}


def counted_rounds(
    stored: StoredGenerations, plan: Plan, *, known: Sequence[Round], now: range, scored_by: Mapping[str, str]
) -> list[Round]:
    """Returns the counted rounds stored with generations, after checking and reading new ones.

    Args:
      stored: The generations.
      plan: The plan; its grid is the decoded part.
      known: Rounds that are known already.
      now: Numbers of rounds that this run has counted, and whose generations it has read.
      scored_by: Versions of what scores now.

    Raises:
      OutputsError: If a round or its generations have changed since they were counted.
    """
    folder, rounds = stored.directory, list(known)
    while (following := Round.read(folder, len(rounds) + 1, plan)) is not None:
        if following.scored_by != scored_by:
            raise OutputsError(
                f"{folder}: round {following.number} was scored by {_differing(following.scored_by)}, and now "
                f"there is {_differing(scored_by)}: one risk must not be made of two metrics. Restore what "
                "scored it, or begin again with --overwrite."
            )
        if rounds and following.division != rounds[0].division:
            raise OutputsError(
                f"{folder}: rounds 1 and {following.number} are of different divisions of the data. Begin again, "
                "with --overwrite."
            )
        for shard in following.shards:
            path = stored.shard_path(shard.shard)
            # Rounds counted by this run have read their shards; shards of an earlier run may be damaged since.
            stored_as = stored_shard if following.number in now else whole_shard
            if not is_file(path) or stored_as(path) != shard:
                raise OutputsError(
                    f"{path}: is missing, or not what was counted in round {following.number}. Decode again, with "
                    "--overwrite."
                )
        rounds.append(following)
    return rounds


def _differing(scored_by: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(scored_by.items()))


def has_rounds(folder: str) -> bool:
    """Returns whether a folder has a counted round."""
    return bool(list_files(joined(glob.escape(folder), "round-*.json")))


def _path(folder: str, number: int) -> str:
    return joined(folder, f"round-{number:05d}.json")


def _totals_to_json(totals: CalibrationTotals) -> dict[str, Any]:
    assert not totals.table.chunks, "no p-value that may be watched needs single losses"
    return {
        **_sums_to_json(totals.whole),
        # Only if there are any: rounds of earlier versions have no such key.
        **({"groups": {name: _sums_to_json(group) for name, group in totals.groups}} if totals.groups else {}),
        **({"over_examples": _over_examples_to_json(totals.over_examples)} if totals.over_examples else {}),
        "scored": totals.scored,
        "by_shard": [list(pair) for pair in totals.by_shard],
        "failures": [list(pair) for pair in totals.failures],
        "truncated": totals.truncated,
        "duplicates": totals.duplicates,
        **({"several_turns": totals.several_turns} if totals.several_turns else {}),
        # JSON readers do not keep numbers that large.
        "content_sum": f"{totals.content_sum:064x}",
        "contrast": _contrast_to_json(totals.contrast),
    }


def _sums_to_json(totals: Sums) -> dict[str, Any]:
    return {
        "n": totals.risk.n,
        "sums": totals.risk.sums.tolist(),
        "layer_sums": list(totals.layer_sums),
        "token_counts": list(totals.token_counts),
        "tie_counts": list(totals.tie_counts),
    }


def _sums_from_json(content: Mapping[str, Any], layout: Layout) -> Sums:
    risk = RiskTotals(n=content["n"], sums=np.array(content["sums"], np.int64))
    if risk.sums.shape != (len(layout.rows), layout.thresholds):
        raise ValueError(f"sums have shape {risk.sums.shape}")
    return Sums(
        risk=risk,
        layer_sums=tuple(content["layer_sums"]),
        token_counts=tuple(content["token_counts"]),
        # Rounds of earlier versions have no tie counts.
        tie_counts=tuple(content.get("tie_counts", (risk.n, *(0,) * layout.thresholds) if risk.n else ())),
    )


def _totals_from_json(content: Mapping[str, Any], layout: Layout) -> CalibrationTotals:
    return CalibrationTotals(
        layout=layout,
        whole=_sums_from_json(content, layout),
        groups=tuple(
            (name, _sums_from_json(group, layout)) for name, group in sorted(content.get("groups", {}).items())
        ),
        over_examples=_over_examples_from_json(content.get("over_examples")),
        scored=content["scored"],
        by_shard=tuple((shard, count) for shard, count in content["by_shard"]),
        failures=tuple((name, reason) for name, reason in content["failures"]),
        truncated=content["truncated"],
        duplicates=content["duplicates"],
        several_turns=content.get("several_turns", 0),
        content_sum=int(content["content_sum"], 16),
        contrast=_contrast_from_json(content["contrast"]),
    )


def _over_examples_to_json(totals: RiskTotals) -> dict[str, Any]:
    return {"n": totals.n, "sums": totals.sums.tolist()}


def _over_examples_from_json(content: Mapping[str, Any] | None) -> RiskTotals | None:
    return None if content is None else RiskTotals(n=content["n"], sums=np.array(content["sums"], np.int64))


def _contrast_to_json(contrast: Contrast) -> dict[str, Any]:
    fields = dataclasses.asdict(contrast)
    unseen = fields.pop("unseen")
    # Omitted if empty, as in rounds of earlier versions.
    return {**fields, "best": [list(pair) for pair in fields["best"]], **({"unseen": unseen} if unseen else {})}


def _contrast_from_json(content: Mapping[str, Any]) -> Contrast:
    return Contrast(
        examples=content["examples"],
        best=tuple((score, _sample(sample)) for score, sample in content["best"]),
        moves=tuple(content["moves"]),
        samples=tuple(map(_sample, content["samples"])),
        changed=None if content["changed"] is None else _sample(content["changed"]),
        unseen=tuple(map(_unseen, content.get("unseen", ()))),
    )


def _unseen(content: Mapping[str, Any]) -> Unseen:
    samples = {
        key: tuple(UnseenText(**text) for text in content[key]) for key in ("no_token_samples", "few_letters_samples")
    }
    return Unseen(**{**content, **samples})


def _sample(content: Mapping[str, Any]) -> Sample:
    return Sample(**{**content, "references": tuple(content["references"])})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watched:
    """The proof from all rounds up to now.

    Attributes:
      totals: Totals over all rounds.
      rows: The risk table.
      calibrations: One manifest entry per spec, with a look after each round.
    """

    totals: CalibrationTotals
    rows: tuple[RiskRow, ...]
    calibrations: tuple[Calibration, ...]

    def ended_by(self, plan: Plan, *, of_rounds: int) -> str | None:
        """Returns what ends the calibration after these rounds, one of its plan's `ends`; None if it goes on.

        Args:
          plan: The plan with the whole grid and a stopping rule.
          of_rounds: Number of rounds that the data have.
        """
        assert plan.sequential is not None
        looks = looks_by_round(self.calibrations, plan.thresholds)
        return plan.sequential.ended_by(looks, grid=plan.thresholds, of_rounds=of_rounds)


def watched(rounds: Sequence[CalibrationTotals], plan: Plan, *, num_layers: int) -> Watched:
    """Returns the proof from some rounds.

    Args:
      rounds: Counts of each round, from the first on without a gap; at least one.
      plan: The plan; all of its p-values may be watched.
      num_layers: Decoder depth.

    Raises:
      EvidenceError: If the losses do not allow a p-value that was planned.

    Source: Ville (1939); CALM Algorithm 1, with p-values that hold at any time.
    """
    up_to = list(itertools.accumulate(rounds, CalibrationTotals.merge))
    tests = grid_tests(rounds, plan.tests)
    tested = [test.after(len(rounds)) for test in tests]
    rows = rows_of(up_to[-1], plan, tested=tested, num_layers=num_layers)
    entries = choose_thresholds(rows, plan, num_layers=num_layers)
    calibrations = tuple(
        dataclasses.replace(entry, looks=_looks(entry, test, up_to, plan=plan, num_layers=num_layers))
        for entry, test in zip(entries, tests, strict=True)
    )
    return Watched(totals=up_to[-1], rows=rows, calibrations=calibrations)


def proved_objectives(calibrations: Sequence[Calibration], plan: Plan) -> frozenset[Objective]:
    """Returns the objectives with nothing left to prove: all their entries have reached the end of the grid.

    Args:
      calibrations: One for each spec of the plan.
      plan: The plan. Entries of groups are ignored: nothing is ever proved about a group without examples.
    """
    open_objectives = {
        spec.objective
        for spec, entry in zip(plan.tests, calibrations, strict=True)
        if spec.group is None and entry.threshold != plan.thresholds[-1]
    }
    return frozenset(spec.objective for spec in plan.tests) - open_objectives


def _looks(
    entry: Calibration, test: GridTest, up_to: Sequence[CalibrationTotals], *, plan: Plan, num_layers: int
) -> tuple[Look, ...]:
    followed = 0 if entry.threshold is None else plan.thresholds.index(entry.threshold)
    looks = []
    for totals, found in zip(up_to, test.looks(followed=followed), strict=True):
        layers = totals.of_group(entry.group).mean_layers(num_layers)
        looks.append(
            Look(
                n=found.n,
                threshold=None if found.place < 0 else plan.thresholds[found.place],
                layers=float(num_layers) if found.place < 0 else layers[1 + found.place],
                risk=found.risk,
                log_capital=found.log_capital,
            )
        )
    return tuple(looks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchedSettings:
    """The proof from the rounds that have been looked at.

    Attributes:
      rounds: Number of these rounds; rounds after the one where the rule stops are not looked at.
      ended_by: What ends the certification there, one of the plan's `ends`; None if it goes on.
      rows: For every test, the rows of all settings.
      calibrations: For every test, its manifest entry, with a look after each round.
    """

    rounds: int
    ended_by: str | None
    rows: tuple[tuple[certification.SettingRow, ...], ...]
    calibrations: tuple[SettingCalibration, ...]


def watched_settings(
    evaluated: EvaluatedLosses,
    plan: SettingPlan,
    *,
    of_rounds: int,
    costs: Mapping[str, float] | None = None,
    looked_at: int = 1,
) -> WatchedSettings:
    """Returns the proof from the whole rounds, up to the first at which the rule stops.

    Args:
      evaluated: At least one whole round.
      plan: The plan with a stopping rule; all of its p-values may be watched.
      of_rounds: Number of rounds that the declared examples have.
      costs: Declared costs of settings; None takes the mean costs that rows give.
      looked_at: Number of rounds after which an earlier rule had stopped; 1 if there was none. This rule applies from
        then on.

    Raises:
      LossesError: If the rule needs costs, and there are none.

    Source: Ville (1939); Angelopoulos et al. (2021), "Learn then Test", with p-values that hold at any time.
    """
    assert plan.sequential is not None
    costs_by_round = evaluated.costs if costs is None else [costs] * len(evaluated.rounds)
    lacking = [name for name in plan.order if name not in costs_by_round[0]]
    if plan.sequential.needs_costs and lacking:
        raise LossesError(
            f"the rule to stop asks what settings cost, and nobody says it of setting {lacking[0]!r}. Declare costs "
            "(--costs), or give the losses a column cost, from the first round on."
        )
    tests = grid_tests([each.ordered(plan.order, salt=plan.salt) for each in evaluated.rounds], plan.tests)
    looks = [
        [_proved(each.places[number], of_round, plan.order) for each in tests]
        for number, of_round in enumerate(costs_by_round)
    ]
    rounds, ended_by = len(looks), None
    for number in range(looked_at, len(looks) + 1):
        ended_by = plan.sequential.ended_by(looks[:number], grid=plan.order, of_rounds=of_rounds)
        if ended_by is not None:
            rounds = number
            break
    rows = tuple(
        certification.rows_of(test, each.after(rounds), order=plan.order, costs=costs_by_round[rounds - 1])
        for test, each in zip(plan.tests, tests, strict=True)
    )
    entries = certification.entries_of(plan, rows)
    return WatchedSettings(
        rounds=rounds,
        ended_by=ended_by,
        rows=rows,
        calibrations=tuple(
            dataclasses.replace(
                entry, looks=_looks_of_settings(entry, each, order=plan.order, costs=costs_by_round[:rounds])
            )
            for entry, each in zip(entries, tests, strict=True)
        ),
    )


def _proved(place: int, costs: Mapping[str, float], order: Sequence[str]) -> Proved:
    return Proved(place, costs.get(order[place], math.inf) if place >= 0 else math.inf)


def _looks_of_settings(
    entry: SettingCalibration, test: GridTest, *, order: Sequence[str], costs: Sequence[Mapping[str, float]]
) -> tuple[SettingLook, ...]:
    """Returns the looks of a test's entry, one for each round whose costs are given."""
    followed = 0 if entry.setting is None else order.index(entry.setting)
    looks = []
    for found, of_round in zip(test.looks(followed=followed), costs, strict=False):
        setting = order[found.place] if found.place >= 0 else None
        looks.append(
            SettingLook(
                n=found.n,
                setting=setting,
                cost=None if setting is None else of_round.get(setting),
                risk=found.risk,
                log_capital=found.log_capital,
            )
        )
    return tuple(looks)
