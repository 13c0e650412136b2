"""docs/serving.md: its commands and its code run, and what it says of manifests is so."""

import pathlib
import re
import shlex
from typing import Any

import pytest

from calm_beam.checkpoints import load_checkpoint
from calm_beam.exits.measures import MEASURES
from calm_beam.launch.cli import main
from calm_beam.manifest import ManifestError, write_manifest
from calm_beam.vocabulary import Vocabulary
from tests.calm_beam.serving.builders import build_entry, build_served_manifest
from tests.pipelines import write_model, write_vocabulary

_PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


_PROMISES = ((0.3, 0.05), (0.2, 0.1))


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
        tuple(build_entry(threshold, delta=delta, metric="rouge_l_unicode") for threshold, delta in _PROMISES),
        vocabulary=Vocabulary(tmp_path / "v.model"),
    )
    write_manifest(manifest, tmp_path / "demo" / "manifest.json")
    commands = [shlex.split(line) for block in _blocks("sh") for line in block.splitlines()]
    (generate,) = [command[1:] for command in commands if command[:2] == ["calm-beam", "generate"]]
    assert main([*generate, "--checkpoint=model"]) == 0
    assert capsys.readouterr().out.startswith("text[layer at which the token left, of 4]")
    serve, read, measure, _ = _blocks("python")
    names: dict[str, Any] = {"request_id": "a", "prompt": "the cat sees"}
    exec(serve, names)
    names["fingerprint_of_the_model_you_serve"] = manifest.model.fingerprint
    exec(read, names)
    assert (names["manifest"], names["entry"].threshold) == (manifest, 0.3)
    with pytest.raises(ManifestError):
        exec(read, names | {"fingerprint_of_the_model_you_serve": "sha256:" + "0" * 64})
    exec(measure.replace("share=0.01", "share=1"), names)
    (monitor,) = [command[1:] for command in commands if command[:2] == ["calm-beam", "monitor"]]
    assert main(monitor) == 0
    assert "1 loss, mean" in capsys.readouterr().out


def test_every_confidence_that_can_be_served_is_described() -> None:
    """Whoever writes a server of their own finds each measure, but for the oracle, which nobody can serve."""
    assert re.findall(r"^\| `(\w+)` \|", _PAGE, re.MULTILINE) == [name for name in MEASURES if name != "oracle"]
