"""Outputs of an external decoder are certified and verified as losses and scores are."""

import pathlib
import re
import shlex
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

import calm_beam as calm
from calm_beam.errors import UsageError
from calm_beam.inputs.examples import DataError
from calm_beam.inputs.losses.tables import LossRow
from calm_beam.launch.cli import main
from calm_beam.launch.commands import flag_parsers
from calm_beam.launch.flags.parser import examples
from calm_beam.manifest import read_setting_manifest
from calm_beam.metrics.registry import MetricError
from calm_beam.outputs import OutputsError
from calm_beam.transforms import ReadExamples, SweepWith
from tests.calm_beam.inputs.losses.builders import write_lm_eval
from tests.pipelines import write_rows
from tests.transforms.setting_decoders import SETTINGS, cut, sweep, write_texts


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Holds a decoder's outputs on a hundred texts and on fresh ones, and another decoder's on the fresh ones."""
    folder = tmp_path_factory.mktemp("swept")
    sweep(write_texts(folder / "data.jsonl", 100), folder / "swept")
    texts = [" ".join(f"x{index}{place}" for place in range(1 + index % 8)) for index in range(100)]
    fresh = write_rows(folder / "fresh.jsonl", [{"id": f"f{i}", "input": each} for i, each in enumerate(texts)])
    sweep(fresh, folder / "fresh")
    sweep(fresh, folder / "other", decoder_name="cut 2")
    return folder


def test_outputs_are_certified_and_verified(
    swept: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command proves a setting, `inspect` and the report name the decoder, and `verify` takes fresh outputs."""
    output = tmp_path / "certification"
    asked = [f"--outputs={swept / 'swept'}", "--metric=token_f1", "--delta=0.3", f"--output={output}"]
    assert main(["certify", *asked]) == 0
    manifest = read_setting_manifest(output / "manifest.json")
    assert manifest.calibrations[0].setting == "4"
    printed = capsys.readouterr().out.replace("\n", " ")
    assert "decoded elsewhere, by what its user calls cut 1" in printed
    assert "Tests: star_bets of dissimilarity losses." in printed
    # A word costs 1, and texts have one to eight words.
    assert re.search(r" all \(baseline\) +4.42 +0 ", printed)
    assert "given" not in printed
    assert main(["inspect", str(output)]) == 0
    said = capsys.readouterr().out
    assert "Decoded elsewhere, by cut 1." in said
    assert "Losses: token_f1, textual consistency (a higher score is better), against all." in said
    assert "cut 1" in (output / "report.html").read_text(encoding="utf-8")
    assert main(["verify", f"--manifest={output}", f"--outputs={swept / 'fresh'}"]) == 0
    assert "proved again" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"outputs": "other"}, "were decoded by cut 2, and the manifest is about cut 1"),
        ({"losses": "none.csv"}, r"the manifest was made of outputs \(outputs\): name fresh ones"),
        ({"outputs": "swept"}, "certified"),
    ],
)
def test_what_cannot_verify_is_refused(
    given: dict[str, Any], words: str, swept: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Outputs of another decoder, losses, and the certified outputs cannot verify a manifest of outputs."""
    output = tmp_path / "certification"
    calm.certify(outputs=swept / "swept", metric="token_f1", delta=0.3, output=output)
    named = {name: swept / value for name, value in given.items()}
    with pytest.raises(UsageError, match=words):
        calm.verify(manifest=output, **named)


@pytest.mark.parametrize(
    ("asked", "kind", "words"),
    [
        ({"outputs": "none"}, UsageError, r"outputs .*none: no decode\.json there and no generations below it"),
        (
            {"losses": "x.csv"},
            UsageError,
            r"name either the losses .* or the outputs of a decoder of yours \(outputs\)",
        ),
        ({"metric": "bleurt"}, UsageError, "metric='bleurt': needs a checkpoint, which is not asked for here"),
        ({"metric": "rouge"}, ValueError, 'metric "rouge" is not known'),
        ({"loss": "relu"}, UsageError, "loss='relu' is not a loss of consistency='textual'"),
        ({"group_key": "topic"}, UsageError, "the examples were read with group_key=None"),
        ({"cluster_key": "topic"}, UsageError, "the examples were read with cluster_key=None"),
        ({"order": "2"}, UsageError, "order must name every setting once: it lacks 1 setting"),
        ({"order_by": "cost"}, UsageError, "differs between examples"),
        ({"sequential": True, "order": "4,2"}, UsageError, "outputs names logs of a whole evaluation"),
        ({"outputs": "fresh", "consistency": "risk"}, DataError, "risk consistency needs references, it has none"),
    ],
)
def test_what_cannot_be_certified_is_refused(
    asked: dict[str, Any], kind: type[Exception], words: str, swept: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Options that do not go with outputs are refused with a clear message, and nothing is written."""
    given = {"outputs": "swept", **asked}
    with pytest.raises(kind, match=words):
        calm.certify(**{**given, "outputs": swept / given["outputs"], "delta": 0.3, "output": tmp_path / "out"})
    assert not (tmp_path / "out").exists()


def test_plans_of_outputs_are_listed_beside_them(tmp_path: pathlib.Path) -> None:
    """The second plan on the same outputs is reported as the second, whatever the output directory."""
    sweep(write_texts(tmp_path / "data.jsonl"), tmp_path / "swept")
    first = calm.certify(outputs=tmp_path / "swept", metric="token_f1", delta=0.3, output=tmp_path / "one")
    again = calm.certify(outputs=tmp_path / "swept", metric="token_f1", delta=0.3, output=tmp_path / "again")
    second = calm.certify(outputs=tmp_path / "swept", metric="exact_match", delta=0.5, output=tmp_path / "two")
    assert first is not None
    assert again is not None
    assert second is not None
    assert (first.earlier_plans, again.earlier_plans) == (None, None)
    assert [plan.plan for plan in second.earlier_plans or ()] == [first.plan.digest]


def test_a_shard_that_was_replaced_is_refused(tmp_path: pathlib.Path) -> None:
    """A shard of another sweep, put in place of a completed one, ends the run."""
    data = write_texts(tmp_path / "data.jsonl")
    sweep(data, tmp_path / "swept")
    sweep(data, tmp_path / "other", decoder_name="cut 2")
    (mine, *_), (theirs, *_) = (sorted((tmp_path / name).rglob("*.parquet")) for name in ("swept", "other"))
    mine.write_bytes(theirs.read_bytes())
    with pytest.raises(OutputsError, match="was replaced after decoding was complete"):
        calm.certify(outputs=tmp_path / "swept", metric="token_f1", delta=0.3, output=tmp_path / "out")


def test_a_metric_that_tells_nothing_is_refused(tmp_path: pathlib.Path) -> None:
    """A metric that scores 0 on every example under the first setting ends the run, since no setting could be worse."""
    rows = [{"id": f"e{i}", "input": f"one two three {i}", "references": ["vier"]} for i in range(12)]
    sweep(write_rows(tmp_path / "data.jsonl", rows), tmp_path / "swept")
    with pytest.raises(MetricError, match="token_f1"):
        calm.certify(
            outputs=tmp_path / "swept", metric="token_f1", consistency="risk", delta=0.3, output=tmp_path / "out"
        )


def test_groups_and_clusters_are_those_of_the_data(tmp_path: pathlib.Path) -> None:
    """Every group has its own entry, and clusters are counted, by the keys with which the examples were read."""
    rows = [
        {"id": f"e{i}", "input": "b c d e f g" if i % 4 else "b c", "topic": "xy"[i % 2], "page": f"p{i // 4}"}
        for i in range(40)
    ]
    data = write_rows(tmp_path / "data.jsonl", rows)
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        _ = (
            pipeline
            | ReadExamples(str(data), group_key="topic", cluster_key="page")
            | SweepWith(cut, settings=SETTINGS, output=str(tmp_path / "swept"))
        )
    asked: dict[str, Any] = {
        "outputs": tmp_path / "swept",
        "metric": "token_f1",
        "output": tmp_path / "out",
        "delta": 0.4,
    }
    with pytest.raises(UsageError, match="examples were read with cluster_key='page', which says what was drawn"):
        calm.certify(**asked)
    manifest = calm.certify(**asked, group_key="topic", cluster_key="page")
    assert manifest is not None
    found = [(entry.group, entry.path[0].n, entry.path[0].risk) for entry in manifest.calibrations]
    # Of four examples on a page, three of six words keep four; one of two words loses nothing.
    long = 1 - 8 / 10
    assert [(group, units) for group, units, _ in found] == [(None, 10), ("x", 10), ("y", 10)]
    assert [risk for _, _, risk in found] == pytest.approx([0.75 * long, 0.5 * long, long])


def test_the_examples_of_the_help_run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every example of `--help` proves something of losses, logs and outputs of the kind that it names."""
    monkeypatch.chdir(tmp_path)
    rows = [LossRow(f"e{index}", setting, 0.0) for index in range(100) for setting in ("8bit", "6bit", "4bit")]
    columns = {name: [getattr(row, name) for row in rows] for name in ("id", "setting", "loss")}
    pq.write_table(pa.table(columns), "losses-0.parquet")
    for name in ("full", "int8", "int4"):
        # As the harness logs gsm8k: one task with two filters.
        scores = [1.0] * 400
        write_lm_eval(tmp_path / "runs" / name, {"strict-match": scores, "flexible-extract": scores})
    # Every text has one word, which is kept under every setting.
    prompts = [{"id": f"e{index}", "input": f"x{index}"} for index in range(100)]
    sweep(write_rows(tmp_path / "data.jsonl", prompts), tmp_path / "swept")
    (parser,) = flag_parsers("certify")
    blocks = [block for _, block in examples(parser._doc) if block.startswith("calm-beam")]
    assert len(blocks) == 3
    for block in blocks:
        words = shlex.split(block.replace("\\\n", " "))
        assert main([*words[1:], "--overwrite"]) == 0
        (entry,) = read_setting_manifest("certification/manifest.json").calibrations
        assert entry.setting is not None
