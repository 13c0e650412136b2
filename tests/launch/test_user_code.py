"""User code that would end the process fails the run, which names it and leaves nothing."""

import pathlib
import sys

import pytest

from calm_beam.launch.cli import main
from tests.pipelines import SHORT_FLAGS, id_rows, write_model, write_rows

_ENDS = "SystemExit: 0, which would have ended the process"
_RAISED = f"raised {_ENDS}."

_MODULES = {
    "calm_beam_ends": "import sys\nsys.exit(0)\n",
    "calm_beam_ends_later": """
import sys

def at_once(candidate, references):
    sys.exit(0)

def on_examples(candidate, references):
    if "text" not in candidate:
        sys.exit(0)
    return 0.5
""",
}


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder with a model, data, and modules that can be imported."""
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", id_rows(4))
    for name, content in _MODULES.items():
        (tmp_path / f"{name}.py").write_text(content, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--metric=calm_beam_ends:f"], 2, f'cannot import module "calm_beam_ends" (it raises {_ENDS}).'),
        (
            ["--metric=calm_beam_ends_later:at_once"],
            2,
            f':at_once" on example "of the trial before the run": {_RAISED}',
        ),
        (["--metric=calm_beam_ends_later:on_examples"], 1, f':on_examples" on example "row-0": {_RAISED}'),
        (["--runner=calm_beam_ends.Runner"], 1, "some code tried to end the process (SystemExit: 0)."),
    ],
    ids=["import", "trial", "example", "runner"],
)
def test_a_run_cannot_end_as_if_it_had_succeeded(
    flags: list[str], status: int, message: str, folder: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A metric or another module that calls `sys.exit(0)` is a clear failure, and no result is written."""
    paths = [f"--checkpoint={folder / 'model'}", f"--data={folder / 'rows.jsonl'}", f"--output={folder / 'out'}"]
    assert main(["calibrate", *paths, *SHORT_FLAGS, "--num_shards=1", "--metric=token_f1", *flags]) == status
    assert message in capsys.readouterr().err
    assert not (folder / "out" / "manifest.json").exists()


def test_a_module_of_seqio_cannot_either(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A module that `--seqio_module` names cannot end the process either."""
    pytest.importorskip("seqio")
    flags = ["--seqio_task=any", "--seqio_module=calm_beam_ends", f"--output={folder / 'out'}"]
    assert main(["calibrate", f"--checkpoint={folder / 'model'}", *flags]) == 2
    assert f"SeqIO module calm_beam_ends: cannot be imported ({_ENDS})" in capsys.readouterr().err
    assert not (folder / "out").exists()
