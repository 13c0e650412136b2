"""Imports point down: core, then transforms, then launch; light modules import nothing heavy."""

import ast
import graphlib
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from calm_beam.launch.commands import COMMANDS

_ROOT = pathlib.Path(__file__).parent.parent

_CLOUD_CLIENTS = ("google.cloud", "google.api_core", "google.auth", "google_crc32c")
# Floor, and the packages that its modules must not import, wherever in the module the import is.
_FORBIDDEN = {
    "calm_beam": ("apache_beam", *_CLOUD_CLIENTS, "calm_beam.transforms", "calm_beam.launch", "tests"),
    "transforms": ("calm_beam.launch", "tests"),
    "launch": ("tests",),
}
# The only module that opens object stores.
_MAY_USE_CLOUD = ("calm_beam/storage/_google.py",)


def _imported(module: ast.AST, package: str) -> Iterator[str]:
    """Yields the absolute names that a module imports, at its top or in functions; `from a import b` gives a.b."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parent, *(node.module.split(".") if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            yield from (str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant))


def _violations(source: str, *, package: str, forbidden: tuple[str, ...]) -> list[str]:
    names = _imported(ast.parse(source), package)
    return sorted({name for name in names if any(f"{name}.".startswith(f"{root}.") for root in forbidden)})


def _modules(floor: str) -> list[pathlib.Path]:
    # The symlinks in calm_beam lead to the other floors.
    links = {path for path in (_ROOT / floor).iterdir() if path.is_symlink()}
    return [path for path in sorted((_ROOT / floor).rglob("*.py")) if not links & set(path.parents)]


@pytest.mark.parametrize("floor", _FORBIDDEN)
def test_no_module_imports_upwards(floor: str) -> None:
    """No module of a floor imports a floor above it, nor does the core import Beam or a cloud client."""
    modules = _modules(floor)
    assert len(modules) >= 5
    found = {}
    for path in modules:
        name = path.relative_to(_ROOT).as_posix()
        package = ".".join(path.parent.relative_to(_ROOT).parts)
        if floor != "calm_beam":
            package = f"calm_beam.{package}"
        forbidden = tuple(
            root for root in _FORBIDDEN[floor] if name not in _MAY_USE_CLOUD or root not in _CLOUD_CLIENTS
        )
        found[name] = _violations(path.read_text(encoding="utf-8"), package=package, forbidden=forbidden)
    assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import apache_beam",
        "import apache_beam.io as io, os",
        "from apache_beam.io import filesystems",
        "def f():\n    from google.cloud import storage",
        "from google import cloud",
        "from .. import transforms",
        "from ..launch.flags import texts",
        "from calm_beam import launch",
        "if True:\n    from calm_beam.transforms import ReadExamples",
        "import importlib\nimportlib.import_module('calm_beam.launch.cli')",
    ],
)
def test_the_scan_sees_a_violation(source: str) -> None:
    """Every way of importing a forbidden module into a core module is found."""
    assert _violations(source, package="calm_beam.risk", forbidden=_FORBIDDEN["calm_beam"])


@pytest.mark.parametrize(
    "source", ["import google.protobuf", "from . import launch_pad", "from ..metrics import registry", "import apache"]
)
def test_the_scan_lets_others_pass(source: str) -> None:
    """Names with a common beginning, and imports within the floor, are no violation."""
    assert _violations(source, package="calm_beam.risk", forbidden=_FORBIDDEN["calm_beam"]) == []


class _WithoutTypes(ast.NodeTransformer):
    """Removes imports that only type checkers see."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        return node.orelse if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)


def _imports(sources: Mapping[str, str], *, packages: Mapping[str, str]) -> dict[str, set[str]]:
    """Returns by module which of the others it imports, at its top or in functions.

    Args:
      sources: Source by name of a module.
      packages: The package of each, against which it names others.
    """
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        seen = _imported(_WithoutTypes().visit(ast.parse(source)), packages[module])
        # Of `from a import b`, b is a module, or something in a.
        names = {name if name in sources else name.rpartition(".")[0] for name in seen}
        graph[module] = (names & sources.keys()) - {module}
    return graph


def _circle(imports: Mapping[str, set[str]]) -> list[str]:
    """Returns a circle of modules, each of which imports the one before it; empty if there is none."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def _floors(imports: Mapping[str, set[str]]) -> dict[str, int]:
    """Returns the floor of every room: 1, or one above the highest room that any module of it imports.

    Rooms are the packages in `calm_beam`, transforms, launch, and single modules next to them.
    """
    rooms: dict[str, set[str]] = {}
    for module, others in imports.items():
        room, *_ = module.split(".")[1:]
        rooms.setdefault(room, set()).update({other.split(".")[1] for other in others} - {room})
    floors: dict[str, int] = {}
    for room in graphlib.TopologicalSorter(rooms).static_order():
        floors[room] = 1 + max((floors[below] for below in rooms[room]), default=0)
    return floors


@pytest.fixture(scope="module")
def all_imports() -> dict[str, set[str]]:
    """Which modules each module of the three floors imports."""
    sources, packages = {}, {}
    for floor in _FORBIDDEN:
        for path in _modules(floor):
            parts = path.relative_to(_ROOT).parent.parts
            package = ".".join(parts if floor == "calm_beam" else ("calm_beam", *parts))
            name = package if path.stem == "__init__" else f"{package}.{path.stem}"
            sources[name], packages[name] = path.read_text(encoding="utf-8"), package
    assert len(sources) > 300
    return _imports(sources, packages=packages)


def test_no_modules_import_each_other_in_a_circle(all_imports: dict[str, set[str]]) -> None:
    """No module of any floor imports, at its top or in functions, a module that imports it directly or indirectly."""
    assert _circle(all_imports) == []


def test_few_rooms_stand_on_few_floors(all_imports: dict[str, set[str]]) -> None:
    """calm_beam's 16 packages and 4 single modules, transforms and launch are on 10 floors at most."""
    # The package itself loads a public name when it is first used.
    package = "calm_beam"
    floors = _floors({name: others - {package} for name, others in all_imports.items() if name != package})
    is_package = {name.split(".")[1] for name in all_imports if name.count(".") > 1}
    assert len(is_package - {"transforms", "launch"}) <= 16
    assert len(floors.keys() - is_package) <= 4
    assert max(floors.values()) <= 10
    assert floors["launch"] == max(floors.values())


def test_floors_are_counted() -> None:
    """A room is one floor above the highest that any of its modules imports, whatever imports it."""
    imports: dict[str, set[str]] = {
        "p.low.a": set(),
        "p.low.b": {"p.low.a", "p.text"},
        "p.text": set(),
        "p.high": {"p.text"},
        "p.high.c": {"p.low.b"},
        "p.top.d": {"p.high.c", "p.text"},
    }
    assert _floors(imports) == {"text": 1, "low": 2, "high": 3, "top": 4}


def test_the_check_sees_a_circle() -> None:
    """A circle of three modules, one of which imports in a function, is found; type-only imports make none."""
    sources = {"p": "from .a import f", "p.a": "import p.b", "p.b": "def f():\n    from . import a\n    import p"}
    packages = dict.fromkeys(sources, "p")
    assert set(_circle(_imports(sources, packages=packages))) >= {"p.a", "p.b"}
    sources["p.b"] = "if TYPE_CHECKING:\n    from . import a\n    import p"
    assert _circle(_imports(sources, packages=packages)) == []


def _loaded_by(absent: Mapping[str, tuple[str, ...]]) -> dict[str, list[str]]:
    """Returns which packages a fresh interpreter has loaded, in whole or part, when it has imported each module.

    Some of Google's packages put their empty parents into every interpreter at its start; those do not count.

    Args:
      absent: The packages to look for, by module, in the order of the imports. What one module loads counts for those
        after it too: if nothing is found for any of them, none of them loads what it must not.
    """
    code = (
        "import importlib, json, sys\n"
        "before, found = set(sys.modules), {}\n"
        f"for module, names in {dict(absent)}.items():\n"
        "    importlib.import_module(module)\n"
        "    new = set(sys.modules) - before\n"
        "    found[module] = [name for name in names if any(f'{loaded}.'.startswith(f'{name}.') for loaded in new)]\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    loaded: dict[str, list[str]] = json.loads(done.stdout)
    return loaded


_BEAM = ("apache_beam", "google.cloud")
_OF_EXTRAS = ("tensorflow", "seqio", "sacrebleu", "rapidfuzz")


# Packages that each module must not load, by the interpreter that imports it; modules that load more come later.
_ABSENT: dict[str, dict[str, tuple[str, ...]]] = {
    "without numpy": {
        "calm_beam": ("numpy", "jax", *_BEAM),
        "calm_beam.manifest": ("numpy", "scipy", "jax", "flax", *_BEAM),
        "calm_beam.storage": ("numpy", "jax", "requests", "google.auth", "google_crc32c", *_BEAM),
        "calm_beam.launch.cli": ("numpy", "jax", *_BEAM),
        "calm_beam.launch.report": ("numpy", "jax", "flax", "pyarrow", *_BEAM),
    },
    "without arrays": {
        "calm_beam.launch.evaluate": ("jax", "pyarrow", "calm_beam.report", "calm_beam.checkpoints", *_BEAM),
        "calm_beam.calibration.certification": ("jax", "flax", "pyarrow", *_BEAM),
        "calm_beam.inputs.losses.runs": ("jax", "flax", "pyarrow", *_BEAM),
        "calm_beam.launch.calibrate": ("jax", "pyarrow", *_OF_EXTRAS, *_BEAM),
        "calm_beam.launch.certify": ("jax", "pyarrow", *_BEAM),
        "calm_beam.launch.decode": ("jax", "pyarrow", *_BEAM),
        "calm_beam.launch.verify": ("jax", "pyarrow", *_BEAM),
        "calm_beam.launch.generate": ("jax", "flax", "pyarrow", *_BEAM),
        "calm_beam.launch.report.command": ("jax", "flax", "pyarrow", *_BEAM),
    },
    "without JAX": {
        "calm_beam.launch.train": ("jax", "scipy", *_BEAM),
        "calm_beam.decoding.settings": ("jax", "flax", *_BEAM),
        "calm_beam.inputs.prompts": ("jax", "flax", *_BEAM),
        "calm_beam.exits.rule": ("jax", "flax", *_BEAM),
        "calm_beam.calibration.confirmation": ("jax", "flax", *_BEAM),
        "calm_beam.inputs": ("jax", "flax", *_OF_EXTRAS, *_BEAM),
        "calm_beam.metrics.bleurt": ("jax", "flax", *_OF_EXTRAS, *_BEAM),
        "calm_beam.metrics.registry": ("jax", "flax", *_OF_EXTRAS, *_BEAM),
        "calm_beam.serving": ("jax", "flax", *_BEAM),
        "calm_beam.serving.questions": ("jax", "flax", *_BEAM),
        "calm_beam.launch.certify.run": ("jax", "flax", *_BEAM),
        "calm_beam.launch.convert": ("jax", "flax", *_BEAM),
        "calm_beam.launch.inspect": ("jax", "flax", *_BEAM),
        "calm_beam.launch.monitor": ("jax", "flax", *_BEAM),
        "calm_beam.launch.plan": ("jax", "flax", "matplotlib", *_BEAM),
    },
    "without Beam": {
        "calm_beam.checkpoints": ("orbax", "torch", "transformers", *_BEAM),
        "calm_beam.outputs.generate": (*_BEAM, "calm_beam.transforms", "calm_beam.launch"),
        "calm_beam.serving.probe": ("pyarrow", "rouge_score", *_BEAM, "calm_beam.transforms", "calm_beam.launch"),
        "calm_beam.serving.continuous": ("pyarrow", "rouge_score", *_BEAM, "calm_beam.transforms", "calm_beam.launch"),
        "calm_beam.training.train": (*_BEAM, "calm_beam.transforms", "calm_beam.launch"),
        "calm_beam.serving.host": (*_BEAM, "calm_beam.transforms", "calm_beam.launch"),
        "calm_beam.launch.train.run": _BEAM,
    },
    "with Beam": {
        "calm_beam.transforms": ("jax", "flax", "calm_beam.launch", "apache_beam.ml", *_OF_EXTRAS),
        "calm_beam.transforms.early_exit": ("jax", "flax", "calm_beam.launch"),
        "calm_beam.launch.runners": ("jax", "flax"),
        "calm_beam.launch.calibrate.command": _OF_EXTRAS,
    },
}


@pytest.mark.parametrize("interpreter", _ABSENT)
def test_imports_are_light(interpreter: str) -> None:
    """A fresh interpreter that imports these modules has loaded, after each, none of the packages it must not load."""
    absent = _ABSENT[interpreter]
    assert _loaded_by(absent) == {module: [] for module in absent}


_HEAVY = ("apache_beam", "jax", "flax", "optax", "pyarrow", "scipy", "matplotlib", "grpc")


def _loaded_by_commands(*commands: tuple[str, ...], names: tuple[str, ...] = _HEAVY) -> dict[str, list[str]]:
    """Returns which packages a fresh interpreter has loaded when each command has ended, with status 0.

    Packages that one command loads count for those after it too: if none is found at the end, no command loads any.
    """
    code = (
        "import contextlib, io, json, sys; from calm_beam.launch import cli\n"
        "found = {}\n"
        f"for command in {commands}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(cli.HelpShown):\n"
        "        assert cli.main(command) == 0\n"
        f"    found[' '.join(command)] = [name for name in {names} if name in sys.modules]\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    loaded: dict[str, list[str]] = json.loads(done.stdout)
    return loaded


def test_help_is_light() -> None:
    """The help of every command, and of every experiment of `evaluate`, loads no module that is slow to load."""
    experiments = ("propagation", "sensitivity", "splits", "tradeoff")
    commands = [
        *((command, "--help") for command in COMMANDS),
        *(("evaluate", f"--experiment={experiment}", "--help") for experiment in experiments),
    ]
    assert _loaded_by_commands(*commands) == {" ".join(command): [] for command in commands}


def test_plan_is_light() -> None:
    """`plan` on the terminal needs numpy alone."""
    assert list(_loaded_by_commands(("plan", "--delta=0.1", "--risk_guess=0.05")).values()) == [[]]


def test_the_check_of_commands_sees_what_is_loaded() -> None:
    """The check above fails for packages that a command loads."""
    assert _loaded_by_commands(("plan", "--help"), names=("jax", "numpy")) == {"plan --help": ["numpy"]}


def test_the_check_sees_what_is_loaded() -> None:
    """The check above fails for a module that loads them, whatever was imported before it."""
    network, floor = "calm_beam.model.t5.network", "calm_beam.transforms"
    assert _loaded_by({network: ("jax", "flax", "apache_beam"), floor: ("apache_beam",)}) == {
        network: ["jax", "flax"],
        floor: ["apache_beam"],
    }


def test_the_check_sees_extras() -> None:
    """The check sees packages of extras, once they are imported; two that are fast to import."""
    extras = ("rapidfuzz", "sacrebleu")
    assert _loaded_by({"rapidfuzz.distance": extras, "sacrebleu": extras})["sacrebleu"] == ["rapidfuzz", "sacrebleu"]
