"""docs/serving.md: its commands and code run, and its statements about manifests are true."""

import dataclasses
import gzip
import pathlib
import re
from typing import Any

import pytest

from calm_beam.checkpoints import load_checkpoint
from calm_beam.errors import UsageError
from calm_beam.exits.measures import MEASURES
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary
from calm_beam.launch.cli import main
from calm_beam.manifest import ManifestError, write_manifest
from calm_beam.outputs import read_answers
from calm_beam.serving import Generator
from tests.calm_beam.serving.builders import build_entry, build_served_manifest
from tests.pipelines import write_model, write_vocabulary
from tests.snippets import ROOT, blocks, own_commands

_PAGE = ROOT / "docs" / "serving.md"


_PROMISES = ((0.3, 0.05), (0.2, 0.1))


def _code(part: str) -> str:
    """Returns the block of Python that contains a text."""
    (block,) = [block for block in blocks(_PAGE, "python") if part in block]
    return block


@pytest.mark.slow
def test_what_the_page_shows_runs(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page's commands and code answer prompts, alone, together and in pipelines; the last one monitors losses."""
    monkeypatch.chdir(tmp_path)
    model = write_model(tmp_path / "model", vocabulary=write_vocabulary(tmp_path / "v.model"))
    (tmp_path / "demo").mkdir()
    manifest = build_served_manifest(
        load_checkpoint(model),
        tuple(build_entry(threshold, delta=delta, metric="rouge_l_unicode") for threshold, delta in _PROMISES),
        vocabulary=Vocabulary(tmp_path / "v.model"),
    )
    engine = Generator.from_manifest(manifest, model, delta=0.05).engine.batch
    manifest = dataclasses.replace(
        manifest,
        model=dataclasses.replace(manifest.model, uri=str(model)),
        decode=dataclasses.replace(manifest.decode, engine=engine),
    )
    write_manifest(manifest, tmp_path / "demo" / "manifest.json")
    (tmp_path / "prompts").mkdir()
    with gzip.open(tmp_path / "prompts" / "some.jsonl.gz", "wt") as file:
        file.writelines(f'{{"id": "{number}", "input": "the cat sees"}}\n' for number in range(3))
    commands = own_commands(_PAGE)
    one, many = [command for command in commands if command[0] == "generate"]
    assert main(one) == 0
    assert capsys.readouterr().out.startswith("text[layer at which the token left, of 4]")
    assert main(many) == 0
    assert sorted(row["id"] for row in read_answers("answers")) == ["0", "1", "2"]
    names: dict[str, Any] = {"request_id": "a", "prompt": "the cat sees"}
    exec(_code("generator.warm_up()"), names)
    exec(_code("ContinuousGenerator("), names)
    assert names["answer"].tokens
    exec(_code("transforms.Generate("), names)
    assert len(list(read_answers("answers_in_beam"))) == 3
    with pytest.raises(UsageError, match=r"^output .*Pass resume=True to go on with them, overwrite=True to begin"):
        exec(_code("transforms.Generate("), names)
    exec(_code("answers = pipeline | beam.Create(["), names)
    capsys.readouterr()
    exec(_code("MonitorRisk(").replace("probe_share=0.01", "probe_share=1"), names)
    assert "delta 0.05, 1 loss" in capsys.readouterr().out
    names["fingerprint_of_the_model_you_serve"] = manifest.model.fingerprint
    exec(_code("read_manifest("), names)
    assert (names["manifest"], names["entry"].threshold) == (manifest, 0.3)
    with pytest.raises(ManifestError):
        exec(_code("read_manifest("), names | {"fingerprint_of_the_model_you_serve": "sha256:" + "0" * 64})
    exec(_code("LossProbe(").replace("share=0.01", "share=1"), names)
    (monitor,) = [command for command in commands if command[0] == "monitor"]
    assert main(monitor) == 0
    assert "1 loss, mean" in capsys.readouterr().out


def test_every_confidence_that_can_be_served_is_described() -> None:
    """The page describes every confidence except the oracle, which cannot be served."""
    assert re.findall(r"^\| `(\w+)` \|", _PAGE.read_text(encoding="utf-8"), re.MULTILINE) == [
        name for name in MEASURES if name != "oracle"
    ]
