"""`make flink`: its start, comparison and refusals; and, with the jars, a calibration on clusters."""

import contextlib
import dataclasses
import json
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from tools.flink import files
from tools.flink.checks import Checks, Outcome, differing_files
from tools.flink.cluster import running_cluster
from tools.flink.files import ENGINES, EngineError, Engines
from tools.flink.local_cluster import LocalCluster
from tools.flink.spark import running_spark

_NO_FLINK, _NO_SPARK = map(Engines.here().missing, ("flink", "spark"))
_COMMANDS = ("calibrate", "certify")
_NO_PRISM = "" if Engines.here().prism.is_file() else "no Prism; `make flink` builds it"


def test_files_are_compared_but_for_times(tmp_path: pathlib.Path) -> None:
    """A later date or another processor is no difference; another number or a missing file is."""
    for name, when, risk in (("one", 1, 0.5), ("later", 2, 0.5), ("other", 1, 0.6)):
        (tmp_path / name / "generations" / name).mkdir(parents=True)
        decoded = json.dumps({"settings": {"engine": {"name": "native", "instructions": name}}})
        (tmp_path / name / "generations" / name / "decode.json").write_text(decoded)
        (tmp_path / name / "manifest.json").write_text(json.dumps({"created": when, "digest": when, "risk": risk}))
        (tmp_path / name / "risk_table.csv").write_text("risk\n0.5\n")
    assert differing_files(tmp_path / "one", tmp_path / "later") == ()
    assert differing_files(tmp_path / "one", tmp_path / "other") == ("manifest.json",)
    (tmp_path / "later" / "risk_table.csv").unlink()
    assert differing_files(tmp_path / "one", tmp_path / "later") == ("risk_table.csv",)


def test_outcomes_in_words() -> None:
    """A line says whether files are equal, which are not, or the status."""
    assert Outcome(0, 3.2).in_words == "3 s"
    assert Outcome(0, 3.2, ()).in_words == "equal, 3 s"
    assert Outcome(0, 3.2, ("a", "b")).in_words == "not equal: a, b, 3 s"
    assert Outcome(1, 3.2).in_words == "status 1, 3 s"


@pytest.mark.parametrize(("engine", "other"), [("flink", "spark"), ("spark", "flink")])
def test_other_jars_are_refused(tmp_path: pathlib.Path, engine: str, other: str) -> None:
    """An unknown jar of an engine or of its job server is named, whatever the jars of the other engine are."""
    for part in ("beam", engine, other):
        (tmp_path / part).mkdir()
        (tmp_path / part / "0.jar").write_bytes(b"another")
    engines = Engines(folder=tmp_path)
    assert "fetches them" in engines.missing(engine) or "no Java" in engines.missing(engine)
    with pytest.raises(EngineError, match=r"beam/0\.jar.*is missing, unknown, or not the file of sha256\.txt"):
        engines.check(engine)
    assert list(engines.sums(engine)) == [f"{engine}/0.jar"]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_has_known_jars(tmp_path: pathlib.Path, engine: str) -> None:
    """Without any file, as many jars are missing as have checksums, those of the other engine left out."""
    known = pathlib.Path(files.__file__).with_name("sha256.txt").read_text(encoding="utf-8").split()[1::2]
    needed = [name for name in known if name.startswith((f"{engine}/", "beam/"))]
    assert 0 < len(needed) < len(known)
    missing = Engines(folder=tmp_path).missing(engine)
    assert missing.startswith(f"{len(needed)} jars are not in") or missing == "no Java on the PATH"


@pytest.mark.parametrize("run", [running_cluster, running_spark])
def test_no_cluster_is_started_without_its_jars(run: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    """A cluster without its jars is refused with their number, before any part of it runs."""
    engines = Engines(folder=tmp_path)
    with pytest.raises(EngineError, match=r"no cluster of (flink|spark): (\d+ jars are not in|no Java)"), run(engines):
        pytest.fail("a cluster was started")


def test_there_are_examples_enough(tmp_path: pathlib.Path) -> None:
    """Beyond the demo examples, there are more with ids and prompts of their own."""
    Checks(tmp_path, examples=2500)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len({row["id"] for row in rows}) == len({row["input"] for row in rows}) == 2500


@dataclasses.dataclass(frozen=True)
class _Data:
    checks: Checks
    folder: pathlib.Path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> _Data:
    """Some demo examples, and one process's results on them."""
    folder = tmp_path_factory.mktemp("checks")
    checks = Checks(folder, examples=12)
    for command in _COMMANDS:
        assert checks.run(command, runner="one process", flags=()).status == 0
    return _Data(checks, folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("runner", "running"),
    [
        pytest.param("flink", running_cluster, marks=pytest.mark.skipif(bool(_NO_FLINK), reason=_NO_FLINK)),
        pytest.param("spark", running_spark, marks=pytest.mark.skipif(bool(_NO_SPARK), reason=_NO_SPARK)),
    ],
)
def test_clusters_give_the_same_and_name_what_fails(
    data: _Data,
    tmp_path: pathlib.Path,
    runner: str,
    running: Callable[[Engines], contextlib.AbstractContextManager[LocalCluster]],
) -> None:
    """On a cluster of two workers every file equals one process's; a bad row ends the run with our message."""
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": "a", "input": "un chat"}\n{"id": "a", "input": "un chien"}\n', encoding="utf-8")
    with running(Engines.here()) as cluster:
        outcomes = {command: data.checks.run(command, runner=runner, flags=cluster.flags) for command in _COMMANDS}
        failed = data.checks.start("decode", tmp_path / "failed", (*cluster.flags, f"--data={bad}")).wait()
    for command, outcome in outcomes.items():
        assert outcome.differing == (), (data.folder / runner / f"{command}.log").read_text()
    assert failed == 1
    assert "id 'a' occurs 2 times" in (tmp_path / "failed.log").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(_NO_PRISM), reason=_NO_PRISM)
def test_prism_gives_the_same(data: _Data) -> None:
    """With a local Prism program every file equals that of one process, and the program is stopped."""
    prism = Engines.here().prism
    flags = ("--runner=PrismRunner", f"--prism_location={prism}")
    outcome = data.checks.run("calibrate", runner="prism", flags=flags)
    assert outcome.differing == (), (data.folder / "prism" / "calibrate.log").read_text()
    log = (data.folder / "prism" / "calibrate.log").read_text()
    assert "caution: Prism opens ports to the network" in log
    assert "Traceback" not in log
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert not [line for line in running.splitlines() if line.startswith(str(prism))]
