"""The pipeline on the in-process runner gives the results of plain functions: the same table to the byte."""

import collections
import csv
import dataclasses
import math
import pathlib
import re
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest

from calm_beam.calibration.plan import layout_of
from calm_beam.calibration.publish import decode_record
from calm_beam.calibration.result import RiskRow, choose_thresholds, risk_rows, risk_table_text
from calm_beam.checkpoints import CheckpointError, load_checkpoint
from calm_beam.decoding.branches import sweep_branches
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.isolation import DecodeError
from calm_beam.inputs import read_examples
from calm_beam.inputs.examples import DataError
from calm_beam.inputs.prompts import encode_prompt
from calm_beam.inputs.vocabularies.vocabulary import EOS_ID, Vocabulary, VocabularyError
from calm_beam.manifest import Calibration, VocabularyRecord
from calm_beam.metrics.registry import METRICS, MetricError
from calm_beam.outputs import Generation, Output, read_generations
from calm_beam.outputs.scoring import score_generation
from calm_beam.outputs.totals import CalibrationTotals
from calm_beam.outputs.worker import load_model
from tests.pipelines import (
    BATCH_SIZE,
    BROKEN_ID,
    CONFIG,
    SETTINGS,
    SPECS,
    TEXTUAL,
    assert_same_generations,
    build_assignment,
    id_rows,
    run_calibration,
    split_rows,
    text_rows,
    without_time,
    write_model,
    write_rows,
    write_vocabulary,
)
from tests.plans import all_specs, build_plan
from tests.sampling import sampled


@dataclasses.dataclass(frozen=True)
class _Plain:
    """The results of plain functions on a data set."""

    generations: dict[str, Generation]
    totals: CalibrationTotals
    rows: tuple[RiskRow, ...]
    calibrations: tuple[Calibration, ...]


def _plainly(model: pathlib.Path, paths: Sequence[str]) -> _Plain:
    """Calibrates in a loop, one example after the other."""
    checkpoint = load_checkpoint(model)
    vocabulary = Vocabulary(checkpoint.vocabulary_path) if checkpoint.vocabulary_path else None
    decoder = Decoder(
        checkpoint,
        sweep_branches(SETTINGS.rule, SETTINGS.thresholds, max_decode_length=SETTINGS.max_decode_length),
        max_input_length=SETTINGS.max_input_length,
        batch_size=BATCH_SIZE,
    )
    examples = [example for i, path in enumerate(paths) for example in read_examples(path, file_index=i)]
    plan = build_plan(SPECS, SETTINGS)
    layout = layout_of(plan)
    totals = CalibrationTotals.zero(layout)
    ids: collections.Counter[str] = collections.Counter()
    prompts_seen = set()
    generations = {}
    for example in examples:
        ids[example.id] += 1
        if ids[example.id] > 1:
            example = dataclasses.replace(example, id=f"{example.id}-{ids[example.id]}")
        prompt = encode_prompt(example, vocabulary, settings=SETTINGS, vocab_size=64, on_long="error")
        example = prompt.example
        ((_, result),) = decoder.decode([prompt.ids])
        outputs = []
        for lane, length in enumerate(result.lengths):
            tokens = tuple(int(token) for token in result.tokens[lane, :length])
            as_ids = " ".join(str(token) for token in tokens if token != EOS_ID)
            outputs.append(
                Output(
                    text=vocabulary.decode(tokens) if vocabulary else as_ids,
                    tokens=tokens,
                    exit_layers=tuple(int(layer) for layer in result.exit_layers[lane, :length]),
                    confidences=tuple(float(value) for value in result.confidences[lane, :length]),
                    near_tie=None if result.near_ties is None else bool(result.near_ties[lane]),
                )
            )
        generation = Generation(
            example=example,
            truncated=prompt.truncated,
            duplicate=prompt.ids in prompts_seen,
            failure=None,
            outputs=tuple(outputs),
        )
        prompts_seen.add(prompt.ids)
        generations[example.id] = generation
        losses = score_generation(generation, layout.objectives, metrics=METRICS, num_thresholds=layout.thresholds)
        totals = totals.merge(CalibrationTotals.of_examples([generation], layout))
        totals = totals.merge(CalibrationTotals.of_losses([example.id], losses[None], layout=layout, salt=plan.salt))
    rows = risk_rows(totals, plan, num_layers=4)
    return _Plain(generations, totals, rows, choose_thresholds(rows, plan, num_layers=4))


def _check_equal(output: pathlib.Path, model: pathlib.Path, paths: Sequence[str]) -> None:
    """Checks generations, table and manifest of a run in `output` against plain functions."""
    plain = _plainly(model, paths)
    stored = [item for path in (output / "generations").rglob("*.parquet") for item in read_generations(path)]
    # Which of equal prompts counts as the duplicate depends on the order; the number of duplicates does not.
    found, expected = (
        [dataclasses.replace(item, duplicate=False) for item in sorted(items, key=lambda item: item.example.id)]
        for items in (stored, plain.generations.values())
    )
    assert_same_generations(found, expected)
    assert (output / "risk_table.csv").read_text() == risk_table_text(plain.rows)


@pytest.fixture(scope="module")
def id_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A model without a vocabulary."""
    return write_model(tmp_path_factory.mktemp("models") / "ids")


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A model with a vocabulary of 40 ids, and a head of 64."""
    folder = tmp_path_factory.mktemp("models")
    return write_model(folder / "text", vocabulary=write_vocabulary(folder / "trained.model"))


def _at_every_position(entries: Sequence[Calibration]) -> tuple[Calibration, ...]:
    """Returns entries as a manifest spells them out, for a schedule that is constant."""
    assert SETTINGS.rule.schedule == "constant"
    return tuple(
        entry
        if entry.threshold is None
        else dataclasses.replace(
            entry,
            threshold_by_position=(float(np.float32(entry.threshold)),) * SETTINGS.max_decode_length,
            rule=decode_record(SETTINGS).rule(),
        )
        for entry in entries
    )


def test_token_ids(id_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Prompts given as ids: generations, table and manifest are those of plain functions."""
    paths = split_rows(tmp_path / "data", id_rows(30), files=2)
    manifest = run_calibration(tmp_path / "out", model=id_model, paths=paths)
    _check_equal(tmp_path / "out", id_model, paths)
    plain = _plainly(id_model, paths)
    assert manifest.calibrations == _at_every_position(plain.calibrations)
    assert manifest.vocabulary is None
    assert (manifest.data.examples, manifest.data.duplicates, manifest.data.failed) == (30, plain.totals.duplicates, 0)
    assert manifest.data.duplicates == 4
    assert manifest.data.fingerprint == plain.totals.data_fingerprint()
    # The choices differ, so a mixed-up entry would show.
    assert len({entry.threshold for entry in manifest.calibrations}) > 1


def test_texts(text_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Prompts given as text without ids, some of them equal, give the results of plain functions."""
    paths = split_rows(tmp_path / "data", text_rows(25), files=3)
    manifest = run_calibration(tmp_path / "out", model=text_model, paths=paths)
    _check_equal(tmp_path / "out", text_model, paths)
    plain = _plainly(text_model, paths)
    assert manifest.calibrations == _at_every_position(plain.calibrations)
    assert manifest.data.duplicates == plain.totals.duplicates == 5
    assert manifest.data.fingerprint == plain.totals.data_fingerprint()
    assert manifest.vocabulary is not None


@pytest.mark.parametrize(
    ("num_shards", "files", "options"),
    sampled(
        [
            (1, 1, ()),
            (7, 1, ()),
            (64, 3, ()),
            (2, 5, ()),
            (3, 2, ("--direct_runner_bundle_repeat=1",)),
            (4, 3, ("--direct_num_workers=3", "--direct_running_mode=multi_threading")),
        ],
        keep=(2, 5),
    ),
)
def test_results_do_not_depend_on_how_work_is_split(
    id_model: pathlib.Path, tmp_path: pathlib.Path, num_shards: int, files: int, options: Sequence[str]
) -> None:
    """Shards, files, repeated bundles and threads leave the table identical, and the manifest but for its time."""
    rows = id_rows(20, seed=1)
    base = run_calibration(
        tmp_path / "base", model=id_model, paths=split_rows(tmp_path / "whole", rows, files=2), num_shards=3
    )
    paths = split_rows(tmp_path / "split", rows, files=files)
    manifest = run_calibration(
        tmp_path / "out",
        model=id_model,
        paths=paths,
        num_shards=num_shards,
        options=options,
        created="2027-01-31T12:00:00Z",
    )
    tables = [(tmp_path / name / "risk_table.csv").read_bytes() for name in ("base", "out")]
    assert tables[0] == tables[1]
    assert manifest != base
    assert without_time(manifest) == without_time(base)


_EVERY_P_VALUE = [
    *all_specs(consistencies=("textual",), metrics=("token_f1",), deltas=(0.6,), epsilons=(0.1,), p_value="hoeffding"),
    *(
        spec
        for p_value in ("empirical_bernstein", "signed_mixture", "wsr", "star_bets")
        for spec in all_specs(
            consistencies=("textual",), metrics=("token_f1",), deltas=(0.5,), epsilons=(0.1,), p_value=p_value
        )
    ),
    *all_specs(
        consistencies=("textual",), metrics=("exact_match",), deltas=(0.9,), epsilons=(0.1,), p_value="exact_binomial"
    ),
    *(
        spec
        for p_value in ("signed_mixture", "wsr", "star_bets")
        for spec in all_specs(
            consistencies=("risk",), metrics=("token_f1",), deltas=(0.3,), epsilons=(0.1,), p_value=p_value
        )
    ),
]


@pytest.mark.parametrize("cluster_key", sampled([None, "page"], keep=(0,)))
def test_every_p_value_is_the_same_however_work_is_split(
    id_model: pathlib.Path, tmp_path: pathlib.Path, cluster_key: str | None
) -> None:
    """Sums, tables of single losses and clusters across shards give one risk table, to the last bit."""
    rows = [{**row, "page": index % 11} for index, row in enumerate(id_rows(30))]
    specs = [spec for spec in _EVERY_P_VALUE if cluster_key is None or spec.p_value != "exact_binomial"]
    tables = set()
    for name, num_shards, files, options in (
        ("one", 1, 1, ()),
        ("many", 7, 3, ()),
        ("twice", 3, 2, ("--direct_runner_bundle_repeat=1",)),
        ("threads", 5, 3, ("--direct_num_workers=3", "--direct_running_mode=multi_threading")),
    ):
        manifest = run_calibration(
            tmp_path / name,
            model=id_model,
            paths=split_rows(tmp_path / f"data-{name}", rows, files=files),
            num_shards=num_shards,
            specs=specs,
            options=options,
            cluster_key=cluster_key,
        )
        tables.add((tmp_path / name / "risk_table.csv").read_bytes())
        assert manifest.data.examples == 30
        assert manifest.data.clusters == (None if cluster_key is None else 11)
    assert len(tables) == 1


def test_clusters_count_once(id_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Losses of a cluster are averaged exactly, wherever its examples are stored, and examples are still counted."""
    rows = [{**row, "page": f"p{index % 4}"} for index, row in enumerate(id_rows(14))]
    run_calibration(
        tmp_path / "single", model=id_model, paths=[str(write_rows(tmp_path / "a.jsonl", rows))], specs=TEXTUAL
    )
    manifest = run_calibration(
        tmp_path / "out",
        model=id_model,
        paths=split_rows(tmp_path / "data", rows, files=3),
        specs=TEXTUAL,
        cluster_key="page",
    )
    assert (manifest.data.examples, manifest.data.clusters, manifest.data.duplicates) == (14, 4, 2)
    stored = [
        item for path in (tmp_path / "single" / "generations").rglob("*.parquet") for item in read_generations(path)
    ]
    page_of = {row["id"]: row["page"] for row in rows}
    objective = TEXTUAL[0].objective
    pages: dict[str, list[list[int]]] = {}
    for item in stored:
        losses = score_generation(item, [objective], metrics=METRICS, num_thresholds=len(SETTINGS.thresholds))
        pages.setdefault(page_of[item.example.id], []).append(losses[0].tolist())
    expected = [
        sum(math.ceil(Fraction(sum(column), len(column))) for column in columns)
        for columns in zip(*(zip(*losses, strict=True) for losses in pages.values()), strict=True)
    ]
    with open(tmp_path / "out" / "risk_table.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [int(row["loss_sum"]) for row in table] == expected
    assert {row["n"] for row in table} == {"4"}


def test_seed_decides_the_betting_order_alone(id_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Another seed is another plan and may change wsr; sums stay."""
    specs = [spec for spec in _EVERY_P_VALUE if spec.p_value in ("wsr", "hoeffding")]
    paths = split_rows(tmp_path / "data", id_rows(30), files=2)
    rows, digests = [], set()
    for seed in (0, 1):
        manifest = run_calibration(tmp_path / str(seed), model=id_model, paths=paths, specs=specs, seed=seed)
        assert manifest.plan is not None
        digests.add(manifest.plan.digest)
        with open(tmp_path / str(seed) / "risk_table.csv", newline="") as file:
            rows.append(list(csv.DictReader(file)))
    assert len(digests) == 2
    assert [row["loss_sum"] for row in rows[0]] == [row["loss_sum"] for row in rows[1]]
    hoeffding = len(SETTINGS.thresholds)
    assert rows[0][:hoeffding] == rows[1][:hoeffding]
    assert [row["p_value"] for row in rows[0][hoeffding:]] != [row["p_value"] for row in rows[1][hoeffding:]]


def test_settings_of_the_pipeline_reach_the_decoder(id_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Long prompts are cut and counted, or refused by name."""
    long = {"id": "long", "input_ids": list(range(2, 40))}
    paths = [str(write_rows(tmp_path / "rows.jsonl", [*id_rows(5), long]))]
    manifest = run_calibration(tmp_path / "out", model=id_model, paths=paths, specs=TEXTUAL)
    assert manifest.data.truncated == 1
    with pytest.raises(DataError, match="example long: its input has 38 tokens, max_input_length is 32"):
        run_calibration(tmp_path / "other", model=id_model, paths=paths, specs=TEXTUAL, on_long="error")
    assert not (tmp_path / "other" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (CONFIG.vocab_size, "example beyond: its input_ids have 64; the model knows ids from 0 to 63."),
        (2**31, "rows.jsonl, line 6: input_ids must be at most 2147483647, got 2147483648."),
        (2**70, "rows.jsonl, line 6: input_ids must be at most 2147483647, got 1180591620717411303424."),
    ],
)
def test_ids_beyond_the_embedding_are_refused(
    id_model: pathlib.Path, tmp_path: pathlib.Path, index: int, message: str
) -> None:
    """An id that the model lacks ends the run, with its example or line."""
    paths = [str(write_rows(tmp_path / "rows.jsonl", [*id_rows(5), {"id": "beyond", "input_ids": [5, index]}]))]
    with pytest.raises(DataError, match=re.escape(message)):
        run_calibration(tmp_path / "out", model=id_model, paths=paths, specs=TEXTUAL)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_prompts_that_cannot_be_encoded_count_with_loss_1(id_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """With worst_case, unknown ids and over-long prompts count with loss 1 at every threshold, and are not dropped."""
    rows = [*id_rows(5), {"id": "beyond", "input_ids": [5, 64]}, {"id": "long", "input_ids": [5] * 99}]
    paths = [str(write_rows(tmp_path / "rows.jsonl", rows))]
    manifest = run_calibration(
        tmp_path / "out", model=id_model, paths=paths, specs=TEXTUAL, on_error="worst_case", on_long="error"
    )
    assert (manifest.data.examples, manifest.data.failed) == (7, 2)
    with open(tmp_path / "out" / "risk_table.csv", newline="") as file:
        assert all(int(row["loss_sum"]) >= 2 * 2**32 for row in csv.DictReader(file))


def _always_fails(candidate: str, references: Sequence[str]) -> float:
    """A user's metric that fails on every output."""
    raise ZeroDivisionError(candidate)


def test_a_failing_metric_counts_with_loss_1(id_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """With worst_case, an example on which the metric fails counts with loss 1; by default it ends the run."""
    specs = all_specs(consistencies=["textual"], metrics=[f"{__name__}:_always_fails"], deltas=[0.5], epsilons=[0.1])
    paths = [str(write_rows(tmp_path / "rows.jsonl", id_rows(4)))]
    manifest = run_calibration(tmp_path / "out", model=id_model, paths=paths, specs=specs, on_error="worst_case")
    assert (manifest.data.examples, manifest.data.failed) == (4, 4)
    assert manifest.calibrations[0].path[0].risk == 1
    with pytest.raises(MetricError, match="ZeroDivisionError"):
        run_calibration(tmp_path / "fails", model=id_model, paths=paths, specs=specs)


def _rows_with_broken_ones() -> list[dict[str, object]]:
    broken = [{"id": f"broken-{i}", "input_ids": [5, BROKEN_ID, i + 2, 1], "reference_ids": [[5]]} for i in range(3)]
    return [*id_rows(12), *broken]


def test_failures_count_with_loss_1(tmp_path: pathlib.Path) -> None:
    """Examples with logits that are not finite have loss 1 at every threshold, and change no other example."""
    sound = write_model(tmp_path / "sound")
    model = write_model(tmp_path / "broken", is_broken=True)
    paths = [str(write_rows(tmp_path / "rows.jsonl", _rows_with_broken_ones()))]
    manifest = run_calibration(tmp_path / "out", model=model, paths=paths, on_error="worst_case")
    assert (manifest.data.examples, manifest.data.failed) == (15, 3)
    stored = {
        item.example.id: item
        for path in (tmp_path / "out" / "generations").rglob("*.parquet")
        for item in read_generations(path)
    }
    assert {name for name, item in stored.items() if item.failure} == {"broken-0", "broken-1", "broken-2"}
    assert stored["broken-0"].failure == "the model gave logits that are not finite"
    assert stored["broken-0"].outputs == ()
    # Without the broken rows the sums are less by exactly 3, at every threshold.
    few = [str(write_rows(tmp_path / "few.jsonl", id_rows(12)))]
    run_calibration(tmp_path / "few", model=model, paths=few)
    sums = []
    for name in ("out", "few"):
        with open(tmp_path / name / "risk_table.csv", newline="") as file:
            sums.append([int(row["loss_sum"]) for row in csv.DictReader(file)])
    assert [with_broken - without for with_broken, without in zip(*sums, strict=True)] == [3 * 2**32] * len(sums[0])
    # With a model whose embedding is valid, the same rows never fail (the twin).
    assert run_calibration(tmp_path / "whole", model=sound, paths=paths, on_error="worst_case").data.failed == 0


def test_a_failure_ends_the_run(tmp_path: pathlib.Path) -> None:
    """By default the run ends with a message naming the example, and writes neither table nor manifest."""
    model = write_model(tmp_path / "broken", is_broken=True)
    paths = [str(write_rows(tmp_path / "rows.jsonl", [*_rows_with_broken_ones()[:13]]))]
    with pytest.raises(DecodeError, match=r"example broken-0: the model gave logits that are not finite\. Check the"):
        run_calibration(tmp_path / "out", model=model, paths=paths)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"generations", "plans"}


def test_a_set_without_examples_is_no_result(id_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A file without examples is an error that names it: a lost part would bias the result."""
    paths = [str(write_rows(tmp_path / "rows.jsonl", []))]
    with pytest.raises(DataError, match=re.escape(f"{paths[0]}: holds no examples.")):
        run_calibration(tmp_path / "out", model=id_model, paths=paths)


def test_a_checkpoint_that_changed_is_refused(id_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """If the weights have changed since the run was started, workers do not decode."""
    assignment = build_assignment(str(tmp_path), model=str(id_model))
    with pytest.raises(CheckpointError, match=r"fingerprint is sha256:[0-9a-f]{64}, the run was started for sha256:0"):
        load_model(assignment)


def test_a_vocabulary_that_changed_is_refused(id_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """If the vocabulary has changed since the run was started, workers do not decode."""
    path = write_vocabulary(tmp_path / "other.model")
    fingerprint = load_checkpoint(id_model).fingerprint()
    assignment = build_assignment(
        str(tmp_path), model=str(id_model), model_fingerprint=fingerprint, vocabulary=str(path)
    )
    with pytest.raises(VocabularyError, match=r"fingerprint is sha256:[0-9a-f]{64}, the run was started for sha256:1"):
        load_model(assignment)
    found = VocabularyRecord(fingerprint=Vocabulary(path).fingerprint, extra_ids=0)
    job = dataclasses.replace(assignment.job, vocabulary=found)
    load_model(dataclasses.replace(assignment, job=job))


def test_progress_is_reported(id_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Lines about what was read and decoded are appended to what is there, and add up to all examples."""
    log = tmp_path / "progress"
    log.write_text("read 100\n")
    paths = split_rows(tmp_path / "data", id_rows(9), files=2)
    run_calibration(tmp_path / "out", model=id_model, paths=paths, specs=TEXTUAL, progress=str(log))
    counts: collections.Counter[str] = collections.Counter()
    for line in log.read_text().splitlines():
        event, count = line.split()
        counts[event] += int(count)
    shards = counts.pop("loading")
    assert shards > 0
    assert counts == {"read": 109, "compiling": shards, "decoded": 9}
