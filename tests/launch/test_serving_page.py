"""docs/serving.md: its commands and its code run, and what it says of manifests is so."""

import pathlib
import re
import shlex

import pytest

from calm_beam.checkpoints import load_checkpoint
from calm_beam.exits.measures import MEASURES
from calm_beam.launch.cli import main
from calm_beam.manifest import write_manifest
from calm_beam.vocabulary import Vocabulary
from tests.calm_beam.serving.builders import build_entry, build_served_manifest
from tests.pipelines import write_model, write_vocabulary

_PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", _PAGE, re.DOTALL)


def test_what_the_page_shows_runs(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first command answers, the code answers and measures, and the page's last command reads what was measured."""
    monkeypatch.chdir(tmp_path)
    model = write_model(tmp_path / "model", vocabulary=write_vocabulary(tmp_path / "v.model"))
    (tmp_path / "demo").mkdir()
    manifest = build_served_manifest(
        load_checkpoint(model),
        (build_entry(0.3, delta=0.05), build_entry(0.2, delta=0.1)),
        vocabulary=Vocabulary(tmp_path / "v.model"),
    )
    write_manifest(manifest, tmp_path / "demo" / "manifest.json")
    commands = [shlex.split(line) for block in _blocks("sh") for line in block.splitlines()]
    (generate,) = [command[1:] for command in commands if command[:2] == ["calm-beam", "generate"]]
    assert main([*generate, "--checkpoint=model"]) == 0
    assert capsys.readouterr().out.startswith("text[layer at which the token left, of 4]")
    serve, measure, _ = _blocks("python")
    names: dict[str, object] = {"request_id": "a", "prompt": "the cat sees"}
    exec(serve, names)
    exec(measure.replace("share=0.01", "share=1"), names)
    (monitor,) = [command[1:] for command in commands if command[:2] == ["calm-beam", "monitor"]]
    assert main(monitor) == 0
    assert "1 loss, mean" in capsys.readouterr().out


def test_every_confidence_that_can_be_served_is_described() -> None:
    """Whoever writes a server of their own finds each measure, but for the oracle, which nobody can serve."""
    assert re.findall(r"^\| `(\w+)` \|", _PAGE, re.MULTILINE) == [name for name in MEASURES if name != "oracle"]
