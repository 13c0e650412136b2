"""Lists of settings that make variants, from flags to files, and the commands on a manifest of variants."""

import csv
import json
import pathlib
import re
import shutil
from collections.abc import Sequence

import apache_beam as beam
import numpy as np
import pytest

from calm_beam.calibration.pareto import TESTING, pareto_calibration, part_of
from calm_beam.calibration.publish import decode_record
from calm_beam.launch.cli import main
from calm_beam.launch.runners import run_pipeline
from calm_beam.manifest import Calibration, Manifest, Variant, read_manifest
from calm_beam.metrics.squad import token_f1
from calm_beam.outputs import DecodeJob, Generation, read_generations
from calm_beam.report import first_shown
from calm_beam.risk.evidence import betting_order
from calm_beam.risk.pvalues import p_values_of
from calm_beam.serving import Generator, LossProbe
from tests.calm_beam.report.accessibility import violations
from tests.calm_beam.report.browser import in_a_browser, opened, started_browser
from tests.pipelines import SETTINGS, SHORT_FLAGS, id_rows, without_time, write_model, write_rows

_ROWS = 60
_ASKED = ("--metric=token_f1", "--delta=0.45,0.6", "--epsilon=0.2", "--schedule=decay")
_EACH = ("--tau=0,6", "--min_exit_layer=1,2")
# With so few variants, no part of the data selects unless a flag asks for it.
_LISTS = (*_EACH, "--selection_share=0.3")
_VARIANTS = tuple(Variant(tau=tau, min_exit_layer=layer) for tau in (0.0, 6.0) for layer in (1, 2))


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny random model without a vocabulary."""
    return write_model(tmp_path_factory.mktemp("variants") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Prompts of token ids, each of a cluster of up to three."""
    rows = [{**row, "page": f"page {index // 3}"} for index, row in enumerate(id_rows(_ROWS))]
    return write_rows(tmp_path_factory.mktemp("variants") / "rows.jsonl", rows)


@pytest.fixture(scope="module")
def calibrated(model: pathlib.Path, data: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The output of a calibration of four variants."""
    output = tmp_path_factory.mktemp("variants") / "out"
    assert _calibrate(model, data, output, *_LISTS) == 0
    return output


def _calibrate(model: pathlib.Path, data: pathlib.Path, output: pathlib.Path, *flags: str) -> int:
    base = ["calibrate", f"--checkpoint={model}", f"--data={data}", f"--output={output}"]
    return main([*base, *SHORT_FLAGS, *_ASKED, *flags])


def _manifest(output: pathlib.Path) -> Manifest:
    return read_manifest(output / "manifest.json")


def _stored(output: pathlib.Path) -> dict[Variant, list[Generation]]:
    """Returns the generations of every variant, in the order of their ids."""
    found = {}
    for folder in (output / "generations").iterdir():
        rule = DecodeJob.read(str(folder)).settings.rule
        items = [item for path in folder.glob("*.parquet") for item in read_generations(path)]
        variant = Variant(tau=rule.tau, min_exit_layer=rule.min_exit_layer)
        found[variant] = sorted(items, key=lambda item: item.example.id)
    return found


def _losses(items: Sequence[Generation]) -> np.ndarray:
    """Returns textual losses, shape (examples, thresholds)."""
    return np.array(
        [[1 - token_f1(output.text, [item.outputs[0].text]) for output in item.outputs[1:]] for item in items]
    )


def test_the_pipeline_comes_to_what_plain_functions_come_to(calibrated: pathlib.Path) -> None:
    """Every variant has its own sweep; path and choice equal those computed from single losses and layers."""
    stored, manifest = _stored(calibrated), _manifest(calibrated)
    assert set(stored) == set(_VARIANTS)
    assert manifest.plan is not None
    items = [stored[variant] for variant in _VARIANTS]
    grid = [(variant, threshold) for variant in _VARIANTS for threshold in SETTINGS.thresholds]
    for entry in manifest.calibrations:
        expected = pareto_calibration(
            np.concatenate([_losses(of_variant) for of_variant in items], axis=1),
            np.concatenate([_counts(of_variant, layers=True) for of_variant in items], axis=1),
            sizes=np.concatenate([_counts(of_variant, layers=False) for of_variant in items], axis=1),
            keys=[item.example.id for item in items[0]],
            delta=entry.delta,
            epsilon=entry.epsilon,
            p_value=entry.p_value,
            salt=manifest.plan.salt,
            selection_share=0.3,
        )
        assert [(step.variant, step.threshold) for step in entry.path] == [
            grid[place] for place in expected.path if expected.test.tested[place]
        ]
        assert (entry.variant, entry.threshold) == ((None, None) if expected.chosen is None else grid[expected.chosen])
    # Otherwise the tests below would prove little.
    assert {entry.variant for entry in manifest.calibrations}.isdisjoint({None, _VARIANTS[0]})


def _counts(items: Sequence[Generation], *, layers: bool) -> np.ndarray:
    """Returns how many layers, or tokens, the outputs have; shape (examples, thresholds)."""
    return np.array([[sum(o.exit_layers) if layers else len(o.tokens) for o in item.outputs[1:]] for item in items])


def test_what_is_told(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan is printed first; variants are named while they are decoded, and in the choices."""
    assert _calibrate(model, data, tmp_path / "out", *_LISTS, "--selection_share=40%", "--joint", "--verbose") == 0
    printed = capsys.readouterr()
    manifest = _manifest(tmp_path / "out")
    assert manifest.plan is not None
    assert manifest.plan.pareto is not None
    assert (manifest.plan.pareto.variants, manifest.plan.pareto.choosing_share) == (_VARIANTS, 0.4)
    assert [entry.epsilon for entry in manifest.calibrations] == [0.1, 0.1]
    told = printed.err[printed.err.index("plan ") :].splitlines()
    assert told[:3] == [
        f"plan {manifest.plan.digest}",
        "tested by hoeffding_bentkus, since no --p_value is named",
        "one sweep of tau 0, from layer 1; tau 0, from layer 2; tau 6, from layer 1; tau 6, from layer 2",
    ]
    assert "Mean loss at every threshold, tau 6, from layer 2" in " ".join(printed.out.split())
    assert "Cheapest variant and threshold with expected loss <= delta" in printed.out
    assert "chosen by a part of the calibration set that a hash had drawn beforehand" in " ".join(printed.out.split())
    assert main(["inspect", str(tmp_path / "out"), f"--checkpoint={model}"]) == 0
    shown = capsys.readouterr().out
    assert "Variants: tau 0, from layer 1; tau 0, from layer 2; tau 6, from layer 1; tau 6, from layer 2." in shown
    assert f"{manifest.data.choosing} of 60 examples chose what the others tested" in shown


def test_each_variant_is_tested_by_itself(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With few variants all examples test each at an equal share of epsilon, by bets; the cheapest proved is taken."""
    output = tmp_path / "out"
    assert _calibrate(model, data, output, *_EACH, "--verbose") == 0
    printed, manifest, stored = capsys.readouterr(), _manifest(output), _stored(output)
    assert "tested by star_bets, since no --p_value is named" in printed.err
    assert "Cheapest variant and threshold with expected loss <= delta" in printed.out
    assert manifest.plan is not None
    assert manifest.plan.pareto is not None
    assert (manifest.plan.pareto.choosing_share, manifest.data.choosing) == (None, None)
    keys = [item.example.id for item in stored[_VARIANTS[0]]]
    order = betting_order(keys, salt=manifest.plan.salt)
    for entry in manifest.calibrations:
        assert (entry.procedure, entry.p_value, entry.path[0].n) == ("each_variant", "star_bets", _ROWS)
        found = {}
        for variant in _VARIANTS:
            p_values = p_values_of(
                _losses(stored[variant])[order], p_value="star_bets", delta=entry.delta, epsilon=entry.epsilon / 4
            )
            steps = [step for step in entry.path if step.variant == variant]
            assert [step.p_value for step in steps] == p_values[: len(steps)].tolist()
            layers = [step.layers for step in steps if step.rejected]
            if layers:
                found[layers[-1]] = variant
        assert entry.variant == (found[min(found)] if found else None)
    assert any(entry.threshold is not None for entry in manifest.calibrations)
    assert main(["inspect", str(output)]) == 0
    assert "Each was tested by itself, at an equal share of epsilon." in capsys.readouterr().out
    assert "Each of 4 variants was tested by itself by 60 examples" in (output / "report.html").read_text()
    assert _calibrate(model, data, output, *_EACH, "--resume") == 0
    printed = capsys.readouterr()
    assert "is finished; nothing is left to do" in printed.err
    assert f"Report: {output / 'report.html'}\nNext:\n  calm-beam inspect {output}\n" in printed.out


def test_what_an_earlier_version_finished_is_finished(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An earlier version's plan, where a part selected and sums were tested, is finished if the flags do not differ."""
    output = tmp_path / "out"
    assert _calibrate(model, data, output, *_LISTS, "--p_value=hoeffding_bentkus") == 0
    assert _calibrate(model, data, output, *_EACH, "--resume") == 0
    assert "is finished; nothing is left to do" in capsys.readouterr().err


def test_table_and_report(calibrated: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The table has every variant and threshold; the page shows the choice, and how far the path was proved."""
    manifest = _manifest(calibrated)
    with (calibrated / "risk_table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(manifest.calibrations) * len(_VARIANTS) * len(SETTINGS.thresholds)
    assert {(float(row["tau"]), int(row["min_exit_layer"])) for row in rows} == {
        (variant.tau, variant.min_exit_layer) for variant in _VARIANTS
    }
    page = (calibrated / "report.html").read_text(encoding="utf-8")
    # The header names the model and the time, as that of a page with scripts does.
    created = manifest.created
    assert f'id="made">model · {created[:10]} {created[11:16]} UTC<' in page
    entry = manifest.calibrations[0]
    assert entry.variant is not None
    assert f"{entry.threshold:g} ({entry.variant.in_words()})" in page
    assert f"tested {len(entry.path)} of them" in page
    assert f"{manifest.data.choosing} examples, drawn by a hash, chose a path of" in page
    assert page.count("<script") == 1
    assert main(["report", f"--calibration={calibrated}", f"--output={tmp_path / 'again.html'}"]) == 0
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == page


def test_the_report_shows_outputs_of_the_chosen_variant(calibrated: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Ten examples are shown as the first promise's variant decoded them, each token in its exit layer's colour."""
    manifest = _manifest(calibrated)
    entry = first_shown(manifest)
    assert entry.threshold is not None
    place = 1 + SETTINGS.thresholds.index(entry.threshold)
    stored = {
        generation.example.id: generation.outputs
        for folder in (calibrated / "generations").iterdir()
        if decode_record(DecodeJob.read(str(folder)).settings) == manifest.decode_of(entry)
        for path in folder.glob("*.parquet")
        for generation in read_generations(str(path))
    }
    page = (calibrated / "report.html").read_text(encoding="utf-8")
    _, *cards = page.split('<div class="example">')
    assert len(cards) == 10
    changed = 0
    for card in cards:
        name = re.search(r'<p class="id"><bdi>(.*?)</bdi>', card)
        assert name is not None
        output, full = stored[name[1]][place], stored[name[1]][0]
        assert tuple(map(int, re.findall(r"l(\d+) coloured", card))) == output.exit_layers
        is_same = "the same" in card
        assert is_same == (output.tokens == full.tokens)
        changed += not is_same
    assert 0 < changed < 10
    bare = tmp_path / "bare"
    shutil.copytree(calibrated, bare, ignore=shutil.ignore_patterns("generations"))
    assert main(["report", f"--calibration={bare}"]) == 0
    assert '<div class="example">' not in (bare / "report.html").read_text(encoding="utf-8")
    assert main(["report", f"--calibration={bare}", f"--generations={calibrated}"]) == 0
    assert (bare / "report.html").read_text(encoding="utf-8") == page


def test_a_killed_run_goes_on(
    model: pathlib.Path,
    data: pathlib.Path,
    calibrated: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Killed within the second variant, with one done and two not begun, a run resumes to the same manifest."""
    output = tmp_path / "out"
    shutil.copytree(calibrated, output)
    for path in output.glob("*.*"):
        path.unlink()
    manifest = _manifest(calibrated)
    assert manifest.plan is not None
    _, second, third, fourth = (output / "generations" / name for name in manifest.plan.outputs.split(","))
    (second / "complete.json").unlink()
    next(second.glob("*.parquet")).unlink()
    shutil.rmtree(third)
    shutil.rmtree(fourth)
    assert _calibrate(model, data, output, *_LISTS) == 2
    assert "holds generations of a run that did not finish" in capsys.readouterr().err
    assert _calibrate(model, data, output, "--tau=0.5,6", *_LISTS[1:], "--resume") == 2
    assert "settings.rule.tau is 0.0 there" in capsys.readouterr().err
    assert _calibrate(model, data, output, *_LISTS, "--resume") == 0
    assert without_time(_manifest(output)) == without_time(manifest)
    assert (output / "risk_table.csv").read_bytes() == (calibrated / "risk_table.csv").read_bytes()
    capsys.readouterr()
    assert _calibrate(model, data, output, *_LISTS, "--resume") == 0
    assert "is finished; nothing is left to do" in capsys.readouterr().err
    assert _calibrate(model, data, output, *_LISTS, "--resume", "--selection_share=0.5") == 2
    assert "is finished, and was asked for something else" in capsys.readouterr().err


def test_a_failed_sweep_is_gone_on_with(
    model: pathlib.Path,
    data: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run that fails after decoding its variants says how to resume, and shows no result."""
    done: list[beam.Pipeline] = []

    def failing(pipeline: beam.Pipeline) -> object:
        if done:
            raise OSError("the disk is full")
        done.append(pipeline)
        return run_pipeline(pipeline)

    monkeypatch.setattr("calm_beam.launch.calibrate.run.run_pipeline", failing)
    assert _calibrate(model, data, tmp_path / "out", *_LISTS) == 1
    assert "--resume goes on from there" in capsys.readouterr().err
    assert not (tmp_path / "out" / "manifest.json").exists()
    monkeypatch.undo()
    assert _calibrate(model, data, tmp_path / "out", *_LISTS, "--resume") == 0
    assert "60 were stored already" in capsys.readouterr().err


def test_clusters_choose_or_test_as_a_whole(model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Every cluster is in one part, with all its prompts."""
    assert _calibrate(model, data, tmp_path / "out", *_LISTS, "--cluster_key=page") == 0
    manifest, pages = _manifest(tmp_path / "out"), [f"page {index}" for index in range(_ROWS // 3)]
    assert manifest.plan is not None
    tests = [part_of(page, salt=manifest.plan.salt, selection_share=0.3) == TESTING for page in pages]
    assert (manifest.data.clusters, manifest.data.choosing) == (20, 20 - sum(tests))
    step = manifest.calibrations[0].path[0]
    assert step.n == sum(tests)
    assert step.variant is not None
    losses = _losses(_stored(tmp_path / "out")[step.variant])[:, SETTINGS.thresholds.index(step.threshold)]
    clusters = [item.example.cluster for item in _stored(tmp_path / "out")[step.variant]]
    means = [losses[[cluster == page for cluster in clusters]].mean() for page in pages]
    assert step.risk == pytest.approx(np.array(means)[tests].mean(), abs=1e-8)


def test_a_single_value_is_as_before(model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """One value of each is one sweep, tested down its grid on all examples, without a mention of variants."""
    assert _calibrate(model, data, tmp_path / "out", "--tau=6", "--min_exit_layer=2") == 0
    text = (tmp_path / "out" / "manifest.json").read_text()
    assert not any(word in text for word in ('"variant"', "pareto", "choosing"))
    manifest = _manifest(tmp_path / "out")
    assert {entry.procedure for entry in manifest.calibrations} == {"fixed_sequence"}
    assert manifest.calibrations[0].path[0].n == _ROWS
    assert (tmp_path / "out" / "risk_table.csv").read_text().splitlines()[0].endswith(",layers,near_ties")


def _entries(output: pathlib.Path) -> tuple[Calibration, ...]:
    return _manifest(output).calibrations


def test_each_entry_is_served_by_its_own_variant(calibrated: pathlib.Path, model: pathlib.Path) -> None:
    """Tokens and exit layers are those that the entry's variant stored at its threshold."""
    stored = _stored(calibrated)
    for entry in _entries(calibrated):
        assert entry.variant is not None
        assert entry.threshold is not None
        generator = Generator.from_manifest(_manifest(calibrated), model, delta=entry.delta)
        for item in stored[entry.variant][:8]:
            output = item.outputs[1 + SETTINGS.thresholds.index(entry.threshold)]
            assert item.example.input_ids is not None
            answer = generator.generate(item.example.input_ids)
            assert (answer.tokens, answer.exit_layers) == (output.tokens, output.exit_layers)
            full = generator.full_model().generate(item.example.input_ids)
            assert full.tokens == item.outputs[0].tokens


def test_generate_and_monitor_name_the_variant(
    calibrated: pathlib.Path, model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`generate` and `monitor` name the variant that they serve or watch."""
    (entry, _) = _entries(calibrated)
    assert entry.variant is not None
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"input_ids": [5, 9, 1]}])
    flags = [f"--manifest={calibrated}", f"--delta={entry.delta}"]
    assert main(["generate", *flags, f"--checkpoint={model}", f"--input={prompts}"]) == 0
    words = f"(threshold {entry.threshold:g}, {entry.variant.in_words()})"
    assert words in capsys.readouterr().err
    generator = Generator.from_manifest(calibrated / "manifest.json", model, delta=entry.delta)
    probe = LossProbe(generator, tmp_path / "losses.jsonl", share=1, salt="s")
    probe.observe("1", [5, 9, 1], answer=generator.generate([5, 9, 1]))
    assert main(["monitor", *flags, f"--losses={tmp_path / 'losses.jsonl'}"]) == 0
    assert words in capsys.readouterr().out


def test_verify_decodes_each_entry_by_its_variant(
    calibrated: pathlib.Path,
    model: pathlib.Path,
    data: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On the calibration's own prompts, verify finds the risks of the variants' generations."""
    rows = [json.loads(line) for line in data.read_text().splitlines()][:40]
    fresh = write_rows(tmp_path / "fresh.jsonl", rows)
    flags = ["verify", f"--manifest={calibrated}", f"--checkpoint={model}", f"--data={fresh}", "--batch_size=4"]
    assert main(flags) == 0
    shown = capsys.readouterr().out
    ids, stored = {str(row["id"]) for row in rows}, _stored(calibrated)
    for entry in _entries(calibrated):
        assert entry.variant is not None
        assert entry.threshold is not None
        items = [item for item in stored[entry.variant] if item.example.id in ids]
        risk = _losses(items)[:, SETTINGS.thresholds.index(entry.threshold)].mean()
        assert f"{risk:.4f}" in shown
        assert (entry.variant.in_words().split(", ")[1]) in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tau=1,4,1",), "--tau lists 1 twice. Give every value once."),
        (("--min_exit_layer=2,2",), "--min_exit_layer lists 2 twice"),
        (("--tau=1,x",), "expected numbers separated by commas, got '1,x'"),
        (("--tau=1", "--min_exit_layer=1,0"), "expected a whole number of at least 1, got '0'"),
        (("--tau=1,-2",), "--tau must be a finite number of at least 0, got -2.0"),
        (("--tau=1", "--min_exit_layer=1,5"), "min_exit_layer must be at most 4, the decoder's depth; got 5"),
        (("--tau=1,4", "--schedule=constant"), "tau must not be given with schedule 'constant', got 1.0"),
        (("--min_exit_layer=1,2",), "schedule 'decay' needs a finite tau of at least 0, got None"),
        (
            ("--tau=1", "--selection_share=0.5"),
            "--selection_share belongs to lists of --confidence or --tau or --min_exit",
        ),
        (("--tau=1", "--confidence=softmax,softmax"), "--confidence lists softmax twice. Give every value once."),
        (("--tau=1", "--confidence=softmax,none"), "invalid choice: 'none' (choose from 'softmax', 'softmax_max',"),
        (("--tau=1", "--confidence=softmax,oracle"), "--confidence lists oracle, which has to be calibrated by itself"),
        (
            ("--tau=1", "--confidence=patience,state"),
            "--confidence lists patience, which has to be calibrated by itself",
        ),
        (("--tau=1", "--confidence=softmax,static"), "schedule must be constant with confidence 'static'"),
        (
            ("--tau=1", "--confidence=softmax,classifier"),
            "confidence 'classifier' needs decoder/meta_cls in the checkpoint",
        ),
        (("--tau=1", "--exit_interval=2,0"), "expected a whole number of at least 1, got '0'"),
        (("--tau=1,4", "--max_cache_tokens=60"), "max_cache_tokens must be at least"),
        (("--tau=1,4", "--sequential"), "and --sequential goes through one grid in rounds. Give one value of each"),
        (("--tau=1,4", "--sweep=lazy"), "and --sweep=lazy goes down one grid"),
        (("--tau=1,4", "--group_key=page"), "and --group_key gives groups entries of their own"),
        (("--tau=1,4", "--procedure=holm"), "--procedure=holm tests the grid of one"),
        (("--tau=1,4", "--selection_share=0.3", "--p_value=wsr"), "and --p_value=wsr needs every single one"),
        (
            ("--tau=1,2,3,4,5,6,7", "--p_value=wsr"),
            "Take another p-value, or at most 6 variants without --selection_share",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_before_work(
    model: pathlib.Path,
    data: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    message: str,
) -> None:
    """Flags that do not go together are named with what to do before work; nothing is written."""
    assert _calibrate(model, data, tmp_path / "out", *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_stored_generations_are_of_one_variant(
    calibrated: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of stored generations, only a single variant's folder can be recalibrated, since decoding settings are fixed."""
    asked = ["calibrate", "--metric=token_f1", "--delta=0.6", f"--output={tmp_path / 'out'}"]
    assert main([*asked, f"--generations={calibrated}", "--tau=0,6"]) == 2
    assert "--tau decides what is decoded" in capsys.readouterr().err
    assert main([*asked, f"--generations={calibrated}"]) == 2
    refusal = capsys.readouterr().err
    assert "holds 4 folders. Name one" in refusal
    assert re.search(r"generations/\w{24}  \(softmax, tau 6, from layer 2\)\n", refusal)
    folder = next((calibrated / "generations").iterdir())
    assert main([*asked, f"--generations={folder}"]) == 0
    assert _entries(tmp_path / "out")[0].variant is None


def test_a_cost_is_forecast_from_one_variant(calibrated: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`plan` takes the folder of a variant, and compares no threshold that was chosen for other exits."""
    manifest = read_manifest(calibrated / "manifest.json")
    rules = {
        folder: DecodeJob.read(str(folder)).settings.rule for folder in sorted((calibrated / "generations").iterdir())
    }
    for folder, rule in rules.items():
        assert main(["plan", f"--pilot={folder}", "--examples=1e4"]) == 0
        printed = capsys.readouterr()
        chosen = [(each.variant.tau, each.variant.min_exit_layer) for each in manifest.calibrations if each.variant]
        has_others = any(each != (rule.tau, rule.min_exit_layer) for each in chosen)
        assert ("other exits" in printed.out) == has_others
        assert "simulating sequential calibrations of textual, token_f1, delta " in printed.err


def test_examples_that_fail_count_against_their_variant(
    data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt that cannot be decoded counts with loss 1 for every variant, and is listed once."""
    broken = write_model(tmp_path / "broken", is_broken=True)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    rows[7]["input_ids"] = [63, 1]
    bad = write_rows(tmp_path / "bad.jsonl", rows)
    assert _calibrate(broken, bad, tmp_path / "failed", *_LISTS) == 1
    capsys.readouterr()
    assert _calibrate(broken, bad, tmp_path / "out", *_LISTS, "--on_error=worst_case") == 0
    manifest = _manifest(tmp_path / "out")
    assert (manifest.data.failed, manifest.data.examples) == (1, _ROWS)
    assert len((tmp_path / "out" / "failures.jsonl").read_text().splitlines()) == 1
    for step in manifest.calibrations[0].path:
        assert step.n == _ROWS - (manifest.data.choosing or 0)


def test_a_metric_that_tells_nothing_ends_the_run(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A constant metric ends a run of several variants, as of one: its losses would prove each of them safe."""
    name = "tests.launch.test_variants:constant_score"
    assert _calibrate(model, data, tmp_path / "out", *_LISTS, f"--metric={name}") == 1
    assert "says nothing here" in capsys.readouterr().err
    assert not (tmp_path / "out" / "manifest.json").exists()


def constant_score(candidate: str, references: Sequence[str]) -> float:
    """Returns the same score for all texts."""
    return 0.5


@pytest.mark.slow
def test_two_workers_come_to_the_same(
    model: pathlib.Path, data: pathlib.Path, calibrated: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Worker processes and another number of shards change no entry."""
    flags = ("--direct_num_workers=2", "--num_shards=5")
    assert _calibrate(model, data, tmp_path / "out", *_LISTS, *flags) == 0
    assert _entries(tmp_path / "out") == _entries(calibrated)


def test_objectives_share_the_sweeps(model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Several metrics and tails are entries with paths of their own, from the same generations."""
    flags = ("--tau=0,6", "--metric=token_f1,edit_distance", "--tail=0.3", "--delta=0.6")
    assert _calibrate(model, data, tmp_path / "out", *flags) == 0
    found = [(entry.metric, entry.known_loss) for entry in _entries(tmp_path / "out")]
    assert found == [
        (metric, loss) for loss in ("dissimilarity", "dissimilarity>0.3") for metric in ("token_f1", "edit_distance")
    ]
    assert len(list((tmp_path / "out" / "generations").iterdir())) == 2


@in_a_browser
def test_everybody_can_use_the_report(calibrated: pathlib.Path) -> None:
    """Axe finds no accessibility problem in the report, and its tables sort."""
    with started_browser() as browser:
        assert violations(browser, calibrated / "report.html") == []
        with opened(browser, calibrated / "report.html") as seen:
            assert seen.page.locator("table.sortable").count() == 2
