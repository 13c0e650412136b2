"""Runs `calm-beam doctor`: examines, prints, and sets the exit status.

Packages are examined first: which are installed, and whether calm-beam supports their versions.
"""

import dataclasses
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rich.table import Table

from calm_beam import __version__
from calm_beam.errors import CalmBeamError
from calm_beam.launch.terminal import PlainConsole, give, say, tell
from calm_beam.launch.terminal.lines import PlainTable
from calm_beam.text import counted

if TYPE_CHECKING:
    from .machine import Cache, Device
    from .trial import Trial


# Without `dev` and `docs`, which are for developers of calm-beam.
EXTRAS = {
    "bleurt": "the metric bleurt",
    "dataflow": "--runner=DataflowRunner",
    "gcp": "paths that begin with gs://",
    "gguf": "models in a file of GGUF",
    "mlflow": "--log_to=mlflow",
    "metrics": "the metrics chrf, sentence_bleu and edit_distance; BLEU in evaluate",
    "plots": "figures of plan and evaluate",
    "seqio": "--seqio_task",
    "serve": "calm-beam serve",
    "tensorboard": "--log_to=tensorboard",
    "tensorflow": "data in TFRecord files",
    "tokenizers": "vocabularies in a tokenizer.json, --chat_template",
    "wandb": "--log_to=wandb",
}
# Of extras whose packages serve different purposes.
_OF_PACKAGES = {
    "metrics": {
        "sacrebleu": "the metrics chrf and sentence_bleu, BLEU in evaluate",
        "rapidfuzz": "the metric edit_distance",
        # Of calm-beam-serving, whose core goes without it.
        "rouge-score": "the metrics rouge_l and rouge_l_unicode",
    }
}
_DISTRIBUTIONS = ("calm-beam", "calm-beam-serving")
_IS_OPTIONAL = re.compile(r"extra\s*==")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Package:
    """A required package.

    Attributes:
      name: Name in the package index.
      version: The installed version; None if it is not installed.
      asked: Supported versions, such as `<3,>=2.0`.
      is_good: Whether the installed version is one of them.
    """

    name: str
    version: str | None
    asked: str
    is_good: bool

    def in_words(self) -> str:
        """Returns what is wrong with the package; empty if nothing is."""
        if self.is_good:
            return ""
        found = "it is missing" if self.version is None else "another version is installed"
        return f"{found}: pip install '{self.name}{self.asked}'"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extra:
    """An optional set of packages.

    Attributes:
      name: The name in `pip install 'calm-beam[NAME]'`.
      purpose: What the extra is for.
      missing: Its packages that are not installed, or not in a supported version.
    """

    name: str
    purpose: str
    missing: tuple[str, ...]

    @property
    def impossible(self) -> str:
        """The purposes of the missing packages."""
        known = _OF_PACKAGES.get(self.name, {})
        # Others are needed by the packages of the extra.
        if not known.keys() >= set(self.missing):
            return self.purpose
        return " and ".join(known[name] for name in self.missing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Installed:
    """Installed packages.

    Attributes:
      distribution: `calm-beam` or `calm-beam-serving`; None if the sources are used without being installed.
      packages: Packages that it requires.
      extras: Optional sets of packages.
    """

    distribution: str | None
    packages: tuple[Package, ...]
    extras: tuple[Extra, ...]

    @classmethod
    def here(cls) -> "Installed":
        """Returns what is installed in this environment."""
        name = next((name for name in _DISTRIBUTIONS if _version(name) is not None), None)
        requirements = [] if name is None else [Requirement(text) for text in importlib.metadata.requires(name) or ()]
        required = tuple(_package(each) for each in requirements if _applies(each, extra=""))
        extras = tuple(
            Extra(
                name=extra,
                purpose=purpose,
                missing=tuple(
                    sorted(
                        {
                            package.name
                            for requirement in requirements
                            if _is_of(requirement, extra)
                            for package in _with_its_extras(requirement)
                            if not package.is_good
                        }
                    )
                ),
            )
            for extra, purpose in EXTRAS.items()
            if any(_is_of(requirement, extra) for requirement in requirements)
        )
        return cls(distribution=name, packages=tuple(sorted(required, key=lambda each: each.name)), extras=extras)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(requirement: Requirement) -> Package:
    version = _version(requirement.name)
    return Package(
        name=canonicalize_name(requirement.name),
        version=version,
        asked=str(requirement.specifier),
        is_good=version is not None and requirement.specifier.contains(version, prereleases=True),
    )


def _applies(requirement: Requirement, *, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _is_of(requirement: Requirement, extra: str) -> bool:
    """Returns whether a requirement belongs to an extra, and not to the plain distribution."""
    is_optional = requirement.marker is not None and _IS_OPTIONAL.search(str(requirement.marker)) is not None
    return is_optional and _applies(requirement, extra=extra)


def _with_its_extras(requirement: Requirement) -> Iterator[Package]:
    """Yields a package, and the packages of those of its extras that are required."""
    package = _package(requirement)
    yield package
    if package.version is not None:
        own = [Requirement(text) for text in importlib.metadata.requires(requirement.name) or ()]
        yield from (_package(each) for extra in requirement.extras for each in own if _is_of(each, extra))


# Most missing packages that are named per extra; `pip` knows them all.
_MOST_NAMED = 3
_NVIDIA_DRIVER = "/proc/driver/nvidia/version"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examined:
    """All findings.

    Attributes:
      installed: Packages and extras.
      devices: Devices that JAX sees; empty if JAX cannot be used.
      free_bytes: Memory of the machine that this process may still take.
      native_code: Description of what native code does; None if JAX cannot be used.
      cache: The folder of caches.
      trial: The result of a small run; None if there was none.
      problems: What is not as it should be, a sentence each.
    """

    installed: Installed
    devices: "tuple[Device, ...]"
    free_bytes: int | None
    native_code: str | None
    cache: "Cache | None"
    trial: "Trial | None"
    problems: tuple[str, ...]


def examine() -> int:
    """Examines this installation and machine, prints the findings and returns the exit status of the command."""
    installed = Installed.here()
    _print_installed(installed)
    # The rest takes many seconds: JAX starts, and a model is compiled.
    say("looking at this machine, and running the demo model")
    found = _examined(installed)
    _print(found)
    give(_as_json(found))
    return 1 if found.problems else 0


def _examined(installed: Installed) -> Examined:
    problems = [f"{package.name}: {package.in_words()}." for package in installed.packages if not package.is_good]
    nothing = Examined(
        installed=installed,
        devices=(),
        free_bytes=None,
        native_code=None,
        cache=None,
        trial=None,
        problems=tuple(problems),
    )
    try:
        # Imported here, since JAX itself may not work.
        from .machine import cache, devices, free_memory, native_code

        found = dataclasses.replace(
            nothing, devices=devices(), free_bytes=free_memory(), native_code=native_code(), cache=cache()
        )
    except (ImportError, RuntimeError) as error:
        return dataclasses.replace(nothing, problems=(*problems, f"JAX cannot be used: {error}"))
    if found.cache is not None and not found.cache.is_writable:
        problems.append(f"{found.cache.path}: cannot be written. Set CALM_BEAM_CACHE to a folder that can.")
    only_cpu = all(device.platform == "cpu" for device in found.devices)
    if only_cpu and os.environ.get("JAX_PLATFORMS") != "cpu" and os.path.exists(_NVIDIA_DRIVER):
        problems.append("this machine has an NVIDIA GPU, which JAX does not see: pip install 'jax[cuda12]'.")
    trial, problem = _tried(installed)
    problems.extend([problem] if problem else [])
    return dataclasses.replace(found, trial=trial, problems=tuple(problems))


def _tried(installed: Installed) -> "tuple[Trial | None, str | None]":
    """Returns the result of a small run, and what is wrong with it, if anything is."""
    try:
        from .trial import run_trial

        trial = run_trial()
    except ModuleNotFoundError as error:
        if installed.distribution == "calm-beam-serving" and error.name == "calm_beam.inputs.demo":
            return None, None
        return None, f"the small run failed: {error}."
    # Devices and their libraries raise many kinds of errors, and all of them are findings.
    except (CalmBeamError, ValueError, RuntimeError, OSError, MemoryError, ImportError) as error:
        return None, f"the small run failed: {type(error).__name__}: {error}"
    if trial.difference is not None:
        return trial, f"the small run came out wrong: {trial.difference}."
    return trial, None


def _as_json(found: Examined) -> dict[str, Any]:
    return {
        "calm_beam": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **dataclasses.asdict(found),
    }


def _print_installed(installed: Installed) -> None:
    tell(f"calm-beam {__version__}, Python {platform.python_version()}, {platform.platform()}")
    _print_tables(_packages(installed), _extras(installed))


def _print_tables(*tables: Table) -> None:
    console = PlainConsole()
    for table in tables:
        if table.row_count:
            console.print(table)


def _print(found: Examined) -> None:
    _print_tables(_machine(found))
    for problem in found.problems:
        tell(f"problem: {problem}")
    lacking = [f"{extra.impossible} ({extra.name})" for extra in found.installed.extras if extra.missing]
    if lacking:
        tell(f"Not possible before its extra, in brackets, is installed: {'; '.join(lacking)}.")
    if not found.problems:
        tell("Everything is as it should be.")


def _table(title: str, *columns: str) -> Table:
    table = PlainTable(title)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _packages(installed: Installed) -> Table:
    title = f"Packages of {installed.distribution}" if installed.distribution else "Packages"
    table = _table(title, "package", "version", "asked for", "")
    for package in installed.packages:
        table.add_row(package.name, package.version or "none", package.asked, "" if package.is_good else "problem")
    return table


def _extras(installed: Installed) -> Table:
    table = _table("Extras, each for something that not everybody needs", "extra", "for", "")
    for extra in installed.extras:
        table.add_row(extra.name, extra.purpose, _lacking(extra.missing))
    return table


def _lacking(missing: Sequence[str]) -> str:
    if not missing:
        return "installed"
    named, others = missing[:_MOST_NAMED], len(missing) - _MOST_NAMED
    return f"without {', '.join(named)}" + (f" and {counted(others, 'other')}" if others > 0 else "")


def _machine(found: Examined) -> Table:
    table = _table("Machine", "what", "found")
    table.show_header = False
    for device in found.devices:
        memory = ""
        if device.total_bytes is not None and device.free_bytes is not None:
            memory = f", {_size(device.free_bytes)} of {_size(device.total_bytes)} free"
        # A CPU has no other kind.
        kinds = dict.fromkeys((device.platform, device.kind))
        table.add_row(f"JAX device {device.name}", f"{', '.join(kinds)}{memory}")
    if found.free_bytes is not None:
        table.add_row("free memory", _size(found.free_bytes))
    if found.native_code is not None:
        table.add_row("native code", found.native_code)
    if found.cache is not None:
        files = counted(found.cache.files, "file")
        table.add_row("cache", f"{found.cache.path}: {files}, {_size(found.cache.size_bytes)}")
    if (trial := found.trial) is not None:
        verdict = trial.difference or "served as it was swept"
        table.add_row(
            "small run",
            f"{verdict}, {trial.layers:.1f} of {trial.num_layers} layers a token, {trial.seconds:.0f} s\n"
            f"{trial.prompt}\n{trial.answer}",
        )
    elif found.devices and not found.problems:
        table.add_row("small run", "none: calm-beam-serving has no model of its own")
    return table


def _size(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
