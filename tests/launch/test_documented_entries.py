"""Commands that pages, examples and help show name one entry of the manifests that README and the Makefile make."""

import pathlib
import re
import shlex

import pytest

from calm_beam.checkpoints import load_checkpoint
from calm_beam.inputs.demo import embedded
from calm_beam.launch.calibrate.request import CalibrateRequest
from calm_beam.launch.cli import main
from calm_beam.launch.commands import flag_parsers
from calm_beam.launch.flags import UsageError, request_of
from calm_beam.launch.flags.parser import examples
from calm_beam.launch.flags.shared_options import one_entry
from calm_beam.launch.generate.request import GenerateRequest
from calm_beam.launch.monitor import MonitorRequest
from calm_beam.launch.serve.request import ServeRequest
from calm_beam.manifest import EntryChoice, Manifest, write_manifest
from calm_beam.options.groups import Entry
from tests.calm_beam.serving.builders import build_entry, build_served_manifest
from tests.snippets import ROOT, commands

_REQUESTS: dict[str, type[GenerateRequest] | type[MonitorRequest] | type[ServeRequest]] = {
    "generate": GenerateRequest,
    "monitor": MonitorRequest,
    "serve": ServeRequest,
}
_PAGES = ("docs/serve.md", "docs/serving.md", "docs/how-to/serve-in-a-pipeline.md", "examples/web_service/README.md")
_FIRST = "--output=calibration"
_EXAMPLES = ("batch_inference.py", "streaming.py")


def _request(command: str, flags: list[str]) -> Entry:
    parser = flag_parsers(command)[0]
    return request_of(_REQUESTS[command], parser.parse_known_args(flags)[0], parser=parser)


def _calibrations() -> dict[str, list[str]]:
    """Returns the flags of the calibrations that README's first block and `make calibrate` run."""
    (readme,) = (words for words in commands(ROOT / "README.md") if words[:3] == ["calm-beam", "calibrate", _FIRST])
    (made,) = re.findall(
        r"^calibrate:.*\n\t\S*calm-beam calibrate (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    return {"README.md": readme[2:], "Makefile": shlex.split(made)}


def _manifest(calibration: str) -> Manifest:
    """Returns a manifest with the entries that a calibration asks for, whose plan names none of them."""
    parser = flag_parsers("calibrate")[0]
    request = request_of(CalibrateRequest, parser.parse_known_args(_calibrations()[calibration])[0], parser=parser)
    asked = request.asked_of({name: name for name in request.metrics})
    names = ("consistency", "metric", "delta", "epsilon")
    losses = {"textual": "dissimilarity", "risk": "relu"}
    entries = [
        build_entry(0.5, loss=losses[each.consistency], **{name: getattr(each, name) for name in names})
        for each in asked
    ]
    return build_served_manifest(load_checkpoint(str(embedded.MODEL)), entries)


def _of_pages() -> list[list[str]]:
    """Returns the words of the commands on pages and in help that serve or watch a manifest of `calibrate`."""
    found = [words for page in _PAGES for words in commands(ROOT / page)]
    for name in _REQUESTS:
        blocks = [block for parser in flag_parsers(name) for _, block in examples(parser._doc)]
        found += [shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    of_image = [words[words.index("calm-beam-serve") :] for words in found if words[:2] == ["docker", "run"]]
    of_command = [words[words.index("calm-beam") + 1 :] for words in found if "calm-beam" in words]
    return [*(["serve", *words[1:]] for words in of_image), *(words for words in of_command if words[0] in _REQUESTS)]


@pytest.mark.parametrize("calibration", ["README.md", "Makefile"])
def test_commands_name_one_entry(calibration: str) -> None:
    """Every command that serves or watches a manifest names one entry of the calibration that a newcomer has run."""
    manifest = _manifest(calibration)
    shown = _of_pages()
    assert {words[0] for words in shown} == set(_REQUESTS)
    assert len(shown) > 12
    for command, *flags in shown:
        choice = one_entry(_request(command, flags), manifest)
        assert choice.delta == 0.05, (command, flags)


@pytest.mark.parametrize("calibration", ["README.md", "Makefile"])
@pytest.mark.parametrize("example", _EXAMPLES)
def test_examples_name_one_entry(calibration: str, example: str) -> None:
    """The command in an example's docstring names one entry too."""
    text = (ROOT / "examples" / example).read_text().partition('"""')[2].partition('"""')[0].replace("\\\n", " ")
    (line,) = (line for line in text.splitlines() if line.strip().startswith("python examples/"))
    words = dict(re.findall(r"--(consistency|delta)=(\S+)", line))
    choice = EntryChoice(consistency=words.get("consistency"), delta=float(words["delta"]))
    assert _manifest(calibration).calibration(choice).delta == 0.05


def test_what_names_several_entries_lists_their_flags(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where several entries match, the error has a line for each, with flags that distinguish it."""
    manifest = _manifest("README.md")
    with pytest.raises(UsageError) as caught:
        one_entry(_request("serve", ["--manifest=calibration", "--delta=0.05"]), manifest)
    first, *lines = str(caught.value).splitlines()
    assert first == "2 calibrations have delta=0.05. Say which consistency and loss:"
    assert lines == ["  --consistency=textual", "  --consistency=risk"]
    write_manifest(manifest, tmp_path / "manifest.json")
    assert main(["generate", f"--manifest={tmp_path}", "--prompt=a", "--delta=0.3"]) == 2
    printed = capsys.readouterr().err
    assert "no calibration has delta=0.3. The manifest has:\n  --consistency=textual --delta=0.02\n" in printed
    assert "p_value" not in printed
