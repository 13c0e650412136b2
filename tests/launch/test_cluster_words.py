"""With clusters as the independent units, every headline says what is bounded and shows both means."""

import pathlib

import pytest

from calm_beam.inputs.losses.tables import LossRow
from calm_beam.launch.cli import main
from calm_beam.manifest import clusters_in_words, read_manifest, read_setting_manifest
from calm_beam.report.notebook import manifest_html, setting_manifest_html
from tests.calm_beam.inputs.losses.builders import write_csv
from tests.pipelines import SHORT_FLAGS, id_rows, write_model, write_rows

_SENTENCE = (
    "Every cluster weighs the same, however many examples it has: delta bounds the expected loss per cluster. Nothing "
    "is promised of the mean over examples."
)


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


def _one_large_cluster(clusters: int, large: int) -> list[LossRow]:
    """Returns losses of clusters of one example, which lose nothing, and of a large one that loses everything."""
    sizes = [("large", large, 1.0), *((f"small-{index}", 1, 0.0) for index in range(clusters - 1))]
    return [
        LossRow(id=f"{name}/{index}", setting=setting, loss=loss, cost=None, group=None, cluster=name)
        for name, size, loss in sizes
        for index in range(size)
        for setting in ("a", "b")
    ]


def test_a_certification_shows_both_means(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The headline shows both means where the risk per cluster is 0.0050 and the mean over examples 0.7153."""
    losses, output = write_csv(tmp_path / "losses.csv", _one_large_cluster(200, 500)), tmp_path / "out"
    asked = [f"--losses={losses}", "--order=a,b", "--delta=0.05", "--cluster_key=cluster", f"--output={output}"]
    assert main(["certify", *asked]) == 0
    manifest = read_setting_manifest(output / "manifest.json")
    (entry,) = manifest.calibrations
    assert entry.risk == pytest.approx(1 / 200)
    assert entry.example_risk == pytest.approx(500 / 699)
    words = f"{_SENTENCE} Measured per cluster and over examples: 0.0050 and 0.7153 (delta 0.05)."
    assert clusters_in_words(manifest) == words
    assert words in capsys.readouterr().out
    assert main(["inspect", str(output)]) == 0
    printed = capsys.readouterr().out
    assert words in printed
    assert "loss per" in printed
    page = (output / "report.html").read_text(encoding="utf-8")
    assert "loses per cluster in expectation at most" in page
    assert "0.0050 and 0.7153" in page
    assert "0.0050 and 0.7153" in setting_manifest_html(manifest)


def test_a_sequential_certification_shows_both_means(tmp_path: pathlib.Path) -> None:
    """A sequential certification shows both means, over the examples of the rounds it has looked at."""
    rows = _one_large_cluster(400, 3)
    ids = write_csv(tmp_path / "ids.csv", rows)
    ids.write_text("id,cluster\n" + "".join(f"{row.id},{row.cluster}\n" for row in rows[::2]))
    losses, output = write_csv(tmp_path / "losses.csv", rows), tmp_path / "out"
    asked = [f"--losses={losses}", f"--ids={ids}", "--order=a,b", "--delta=0.1", f"--output={output}"]
    assert main(["certify", "--sequential", "--cluster_key=cluster", *asked]) == 0
    manifest = read_setting_manifest(output / "manifest.json")
    (entry,) = manifest.calibrations
    assert entry.example_risk is not None
    assert round(entry.example_risk * manifest.data.examples) in (0, 3)


@pytest.mark.parametrize(
    "flags",
    [(), ("--sequential", "--round_examples=100"), ("--holdout_share=0.4", "--seed=1"), ("--min_exit_layer=1,2",)],
)
def test_a_calibration_shows_both_means(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    """A calibration shows both means on the terminal: sequential, with a holdout, or with several variants."""
    rows = [{**row, "page": max(0, index - 29)} for index, row in enumerate(id_rows(100))]
    model, data = write_model(tmp_path / "model"), write_rows(tmp_path / "rows.jsonl", rows)
    asked = [f"--checkpoint={model}", f"--data={data}", "--cluster_key=page", "--delta=0.97", *SHORT_FLAGS]
    asked += ["--metric=token_f1", "--epsilon=0.3", f"--output={tmp_path / 'out'}", *flags]
    assert main(["calibrate", *asked]) == 0
    manifest = read_manifest(tmp_path / "out" / "manifest.json")
    (entry,) = manifest.calibrations
    assert (entry.example_risk is None) == (entry.threshold is None)
    assert entry.threshold is not None
    assert entry.example_risk != entry.risk
    printed = capsys.readouterr().out
    assert clusters_in_words(manifest) in printed
    assert f"{entry.risk:.4f} and {entry.example_risk:.4f} (delta 0.97)" in printed
    assert "per cluster" in manifest_html(manifest)


def test_examples_have_nothing_to_say_of_clusters(tmp_path: pathlib.Path) -> None:
    """Without clusters, a manifest has no fields about them."""
    losses, output = write_csv(tmp_path / "losses.csv", _one_large_cluster(200, 5)), tmp_path / "out"
    assert main(["certify", f"--losses={losses}", "--order=a,b", "--delta=0.1", f"--output={output}"]) == 0
    manifest = read_setting_manifest(output / "manifest.json")
    assert manifest.calibrations[0].example_risk is None
    assert clusters_in_words(manifest) == ""
