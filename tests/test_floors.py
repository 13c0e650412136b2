"""Imports point down: core, then transforms, then launch; light modules import nothing heavy."""

import ast
import graphlib
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


def _imported(source: str, package: str) -> Iterator[str]:
    """Yields the absolute names that a module imports, at its top or in functions; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parent, *(node.module.split(".") if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            yield from (str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant))


def _violations(source: str, *, package: str, forbidden: tuple[str, ...]) -> list[str]:
    names = _imported(source, package)
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
        seen = ast.unparse(_WithoutTypes().visit(ast.parse(source)))
        # Of `from a import b`, b is a module, or something in a.
        names = {name if name in sources else name.rpartition(".")[0] for name in _imported(seen, packages[module])}
        graph[module] = (names & sources.keys()) - {module}
    return graph


def _circle(sources: Mapping[str, str], *, packages: Mapping[str, str]) -> list[str]:
    """Returns a circle of modules, each of which imports the one before it; empty if there is none."""
    try:
        graphlib.TopologicalSorter(_imports(sources, packages=packages)).prepare()
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
def all_modules() -> tuple[dict[str, str], dict[str, str]]:
    """The sources of all modules by name, and the package of each."""
    sources, packages = {}, {}
    for floor in _FORBIDDEN:
        for path in _modules(floor):
            parts = path.relative_to(_ROOT).parent.parts
            package = ".".join(parts if floor == "calm_beam" else ("calm_beam", *parts))
            name = package if path.stem == "__init__" else f"{package}.{path.stem}"
            sources[name], packages[name] = path.read_text(encoding="utf-8"), package
    assert len(sources) > 300
    return sources, packages


def test_no_modules_import_each_other_in_a_circle(all_modules: tuple[dict[str, str], dict[str, str]]) -> None:
    """No module of any floor imports, at its top or in functions, a module that imports it directly or indirectly."""
    sources, packages = all_modules
    assert _circle(sources, packages=packages) == []


def test_few_rooms_stand_on_few_floors(all_modules: tuple[dict[str, str], dict[str, str]]) -> None:
    """calm_beam's 16 packages and 4 single modules, transforms and launch are on 10 floors at most."""
    sources, packages = all_modules
    # The package itself loads a public name when it is first used.
    imports = _imports({name: text for name, text in sources.items() if name != "calm_beam"}, packages=packages)
    floors = _floors(imports)
    is_package = {name.split(".")[1] for name in sources if name.count(".") > 1}
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
    assert set(_circle(sources, packages=packages)) >= {"p.a", "p.b"}
    sources["p.b"] = "if TYPE_CHECKING:\n    from . import a\n    import p"
    assert _circle(sources, packages=packages) == []


def _loaded_by(module: str, *names: str) -> list[str]:
    """Returns which of the packages a fresh interpreter loads, in whole or part, when it imports the module.

    Some of Google's packages put their empty parents into every interpreter at its start; those do not count.
    """
    code = (
        f"import sys; before = set(sys.modules); import {module}; new = set(sys.modules) - before; "
        f"print(*[name for name in {names} if any(f'{{loaded}}.'.startswith(f'{{name}}.') for loaded in new)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.split()


_BEAM = ("apache_beam", "google.cloud")
_OF_EXTRAS = ("tensorflow", "seqio", "sacrebleu", "rapidfuzz")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("calm_beam", ("numpy", "jax", *_BEAM)),
        ("calm_beam.manifest", ("numpy", "scipy", "jax", "flax", *_BEAM)),
        ("calm_beam.storage", ("numpy", "jax", "requests", "google.auth", "google_crc32c", *_BEAM)),
        ("calm_beam.decoding.settings", ("jax", "flax", *_BEAM)),
        ("calm_beam.inputs.prompts", ("jax", "flax", *_BEAM)),
        ("calm_beam.exits.rule", ("jax", "flax", *_BEAM)),
        ("calm_beam.calibration.confirmation", ("jax", "flax", *_BEAM)),
        ("calm_beam.checkpoints", ("orbax", "torch", "transformers", *_BEAM)),
        ("calm_beam.calibration.certification", ("jax", "flax", "pyarrow", *_BEAM)),
        ("calm_beam.inputs.losses.runs", ("jax", "flax", "pyarrow", *_BEAM)),
        ("calm_beam.inputs", ("jax", "flax", *_OF_EXTRAS, *_BEAM)),
        ("calm_beam.metrics.bleurt", ("jax", "flax", *_OF_EXTRAS, *_BEAM)),
        ("calm_beam.metrics.registry", ("jax", "flax", *_OF_EXTRAS, *_BEAM)),
        ("calm_beam.outputs.generate", (*_BEAM, "calm_beam.transforms", "calm_beam.launch")),
        ("calm_beam.serving", ("jax", "flax", *_BEAM)),
        ("calm_beam.serving.probe", ("pyarrow", "rouge_score", *_BEAM, "calm_beam.transforms", "calm_beam.launch")),
        (
            "calm_beam.serving.continuous",
            ("pyarrow", "rouge_score", *_BEAM, "calm_beam.transforms", "calm_beam.launch"),
        ),
        ("calm_beam.training.train", (*_BEAM, "calm_beam.transforms", "calm_beam.launch")),
        ("calm_beam.transforms", ("jax", "flax", "calm_beam.launch", "apache_beam.ml", *_OF_EXTRAS)),
        ("calm_beam.transforms.early_exit", ("jax", "flax", "calm_beam.launch")),
        ("calm_beam.serving.questions", ("jax", "flax", *_BEAM)),
        ("calm_beam.serving.host", (*_BEAM, "calm_beam.transforms", "calm_beam.launch")),
        ("calm_beam.launch.cli", ("numpy", "jax", *_BEAM)),
        ("calm_beam.launch.calibrate", ("jax", "pyarrow", *_OF_EXTRAS, *_BEAM)),
        ("calm_beam.launch.calibrate.command", _OF_EXTRAS),
        ("calm_beam.launch.certify", ("jax", "pyarrow", *_BEAM)),
        ("calm_beam.launch.certify.run", ("jax", "flax", *_BEAM)),
        ("calm_beam.launch.decode", ("jax", "pyarrow", *_BEAM)),
        ("calm_beam.launch.evaluate", ("jax", "pyarrow", "calm_beam.report", "calm_beam.checkpoints", *_BEAM)),
        ("calm_beam.launch.verify", ("jax", "pyarrow", *_BEAM)),
        ("calm_beam.launch.runners", ("jax", "flax")),
        ("calm_beam.launch.convert", ("jax", "flax", *_BEAM)),
        ("calm_beam.launch.train", ("jax", "scipy", *_BEAM)),
        ("calm_beam.launch.train.run", _BEAM),
        ("calm_beam.launch.generate", ("jax", "flax", "pyarrow", *_BEAM)),
        ("calm_beam.launch.inspect", ("jax", "flax", *_BEAM)),
        ("calm_beam.launch.monitor", ("jax", "flax", *_BEAM)),
        ("calm_beam.launch.report", ("numpy", "jax", "flax", "pyarrow", *_BEAM)),
        ("calm_beam.launch.report.command", ("jax", "flax", "pyarrow", *_BEAM)),
        ("calm_beam.launch.plan", ("jax", "flax", "matplotlib", *_BEAM)),
    ],
)
def test_imports_are_light(module: str, absent: tuple[str, ...]) -> None:
    """A fresh interpreter that imports the module has not loaded these packages."""
    assert _loaded_by(module, *absent) == []


_HEAVY = ("apache_beam", "jax", "flax", "optax", "pyarrow", "scipy", "matplotlib", "grpc")


def _loaded_by_command(*arguments: str, names: tuple[str, ...] = _HEAVY) -> list[str]:
    """Returns which of the packages the command line has loaded when it ends, with status 0, after these arguments."""
    code = (
        "import contextlib, io, sys; from calm_beam.launch import cli\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(cli.HelpShown):\n"
        f"    assert cli.main({arguments}) == 0\n"
        f"print(*[name for name in {names} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.split()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_light(command: str) -> None:
    """The help of a command loads no module that is slow to load."""
    assert _loaded_by_command(command, "--help") == []


@pytest.mark.parametrize("experiment", ["propagation", "sensitivity", "splits", "tradeoff"])
def test_help_of_experiments_is_light(experiment: str) -> None:
    """The help of every experiment of `evaluate` is as light."""
    assert _loaded_by_command("evaluate", f"--experiment={experiment}", "--help") == []


def test_plan_is_light() -> None:
    """`plan` on the terminal needs numpy alone."""
    assert _loaded_by_command("plan", "--delta=0.1", "--risk_guess=0.05") == []


def test_the_check_of_commands_sees_what_is_loaded() -> None:
    """The check above fails for packages that a command loads."""
    assert _loaded_by_command("plan", "--help", names=("jax", "numpy")) == ["numpy"]


def test_the_check_sees_what_is_loaded() -> None:
    """The check above fails for a module that loads them."""
    assert _loaded_by("calm_beam.model.t5.network", "jax", "flax", "apache_beam") == ["jax", "flax"]
    assert "apache_beam" in _loaded_by("calm_beam.transforms", "apache_beam")


def test_the_check_sees_extras() -> None:
    """The check sees packages of extras, once they are imported; two that are fast to import."""
    assert _loaded_by("rapidfuzz.distance, sacrebleu", "rapidfuzz", "sacrebleu") == ["rapidfuzz", "sacrebleu"]
