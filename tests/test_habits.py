"""Project files agree with the sources: metadata, citation, workflows and hooks."""

import os
import pathlib
import re
import subprocess
import sys
import tomllib
from typing import Any

import pytest
import yaml

from calm_beam import __version__
from tests.setup_file import read_setup
from tools.matrix import PYTHONS, RESOLUTIONS

_ROOT = pathlib.Path(__file__).parents[1]
_WORKFLOWS = sorted((_ROOT / ".github" / "workflows").glob("*.yml"))
_TARGETS = set(re.findall(r"^([a-z-]+):", (_ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def _yaml(name: str) -> Any:
    return yaml.safe_load((_ROOT / name).read_text(encoding="utf-8"))


def test_the_version_is_the_same_everywhere() -> None:
    """Sources, citation and the newest part of the changelog name one version and the same day."""
    citation = _yaml("CITATION.cff")
    changelog = (_ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.findall(r"^## (\d\S*) \((\S+)\)$", changelog, re.MULTILINE)[0]
    assert citation["version"] == newest[0] == __version__
    assert citation["date-released"] == newest[1]


def test_pythons_are_the_same_everywhere() -> None:
    """setup.py's Python versions are those of the classifiers, of `make matrix`, and of the workflows."""
    setup = read_setup()
    low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", setup["python_requires"]).groups()  # type: ignore[union-attr]
    allowed = [f"3.{minor}" for minor in range(int(low), int(high))]
    named = [line.rpartition(" ")[2] for line in setup["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert allowed == named == list(PYTHONS)
    assert _yaml(".github/workflows/tests.yml")["jobs"]["matrix"]["strategy"]["matrix"] == {
        "python": allowed,
        "resolution": list(RESOLUTIONS),
    }
    assert _yaml(".github/workflows/release.yml")["jobs"]["try"]["strategy"]["matrix"]["python"] == allowed


@pytest.mark.parametrize("path", _WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_targets_that_exist(path: pathlib.Path) -> None:
    """Every `make` target in a workflow exists, and no workflow has more write permissions than it lists."""
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            words = step.get("run", "").split()
            if words[:1] == ["make"]:
                assert {word for word in words[1:] if re.fullmatch(r"[a-z-]+", word)} <= _TARGETS


def test_what_the_fast_tests_are() -> None:
    """Every path that `make test-fast` and `make matrix` pass to pytest, or exclude, is a folder or module of tests."""
    words = _commands("test-fast")[-1].split()
    paths = [
        _ROOT / word.removeprefix("--ignore=") for word in words if re.match("(--ignore=)?(tests|calm_beam)", word)
    ]
    assert len(paths) > 40
    assert [path for path in paths if not path.is_dir() and not (path.is_file() and path.match("test_*.py"))] == []


def test_every_slow_test_is_run_once() -> None:
    """The two commands of `make test-slow` cover all modules once, as `make test`'s do; all named modules exist."""
    slow, running = map(_modules_of, _commands("test-slow")[-2:])
    ((compiled,), (old,)) = (map(_modules_of, _commands(target)[-1:]) for target in ("test-compiled", "test-old"))
    modules = {path.relative_to(_ROOT).as_posix() for path in (_ROOT / "tests").rglob("test_*.py")}
    assert running | slow == modules
    assert not running & slow
    most, rest = _commands("test")[-2:]
    assert {word.removeprefix("--ignore=") for word in most.split() if "tests/" in word} == _modules_of(rest) == running
    assert len(compiled) > 30
    assert [path for path in old if not (_ROOT / path).exists()] == []
    # make's `filter` silently drops names that it does not find.
    assert {"decoding", "exits", "model", "serving"} == {path.split("/")[2] for path in compiled}
    chosen = re.search(r"(?ms)^COMPILED = .*?^# ", (_ROOT / "Makefile").read_text(encoding="utf-8"))
    assert chosen is not None
    left_out = re.findall(r"(\w+\.py)", chosen[0])
    assert len(left_out) == 2
    assert [name for name in left_out if not any(path.endswith(f"/test_{name}") for path in modules)] == []


def _modules_of(command: str) -> set[str]:
    return {word for word in command.split() if word.startswith("tests/")}


def _commands(*words: str) -> list[str]:
    """Returns the commands that `make` would run for a target and variables, one a line."""
    # `make test` would pass its flags and variables on to this `make`.
    from_make = ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS")
    own = {name: value for name, value in os.environ.items() if name not in from_make}
    command = ["make", "--just-print", "--no-print-directory", *words]
    return subprocess.run(command, cwd=_ROOT, env=own, capture_output=True, text=True, check=True).stdout.splitlines()


def test_what_checks_sources_is_named_once() -> None:
    """The developers' extra takes ruff from the groups of pyproject.toml, which hold nothing heavy."""
    groups = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    dev = read_setup()["extras_require"]["dev"]
    assert set(groups["lint"]) <= set(dev)
    assert not [name for group in groups.values() for name in group if re.match("apache-beam|tensorflow", name)]
    assert len([name for name in dev if name.startswith("ruff")]) == 1


# Modules that come with a package of the group `types`, or that have another name there.
_BROUGHT = {
    "PIL": "pillow",
    "h11": "uvicorn",
    "ml_dtypes": "jax",
    "pydantic": "fastapi",
    "prometheus_client": "prometheus-client",
    "requests": "types-requests",
    "starlette": "fastapi",
}
_IMPORT = re.compile(r"^\s*(?:from (\w+)[\w.]* import |import (\w+)[\w. ,]*$)", re.MULTILINE)


def test_types_are_checked_where_nothing_else_is_installed() -> None:
    """Every package whose types mypy follows in our sources is in the group that `make types` installs."""
    settings = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    overrides = settings["tool"]["mypy"]["overrides"]
    skipped = {
        name.partition(".")[0] for each in overrides if each.get("ignore_missing_imports") for name in each["module"]
    }
    own = {"calm_beam", "transforms", "launch", "tests", "benchmarks", "tools", "examples"}
    imported = {
        first or second
        for folder in own
        for path in (_ROOT / folder).rglob("*.py")
        for first, second in _IMPORT.findall(path.read_text(encoding="utf-8"))
    }
    followed = imported - skipped - own - {"_typeshed", *sys.stdlib_module_names}
    assert {"jax", "uvicorn", "PIL"} <= followed
    installed = {re.split("[<>=]", name)[0] for name in settings["dependency-groups"]["types"]}
    assert {_BROUGHT.get(name, name) for name in followed} <= installed


def test_hooks_run_what_make_installs() -> None:
    """The hooks run the commands of `make lint` and `make types`."""
    makefile = (_ROOT / "Makefile").read_text(encoding="utf-8")
    hooks = {hook["id"]: hook for repo in _yaml(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]}
    assert hooks["mypy"]["entry"].removeprefix(".venv/bin/") in makefile
    for name in ("ruff", "ruff-format"):
        assert hooks[name]["entry"].removeprefix(".venv/bin/").replace("--fix", "").strip() in makefile
