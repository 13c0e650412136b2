"""What is installed, and whether its versions are those that calm-beam asks for."""

import dataclasses
import importlib.metadata
import re
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Besides `dev` and `docs`, which are for those who work on calm-beam.
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
_DISTRIBUTIONS = ("calm-beam", "calm-beam-serving")
_IS_OPTIONAL = re.compile(r"extra\s*==")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Package:
    """A package that is asked for.

    Attributes:
      name: As its index knows it.
      version: The one that is installed; None if there is none.
      asked: Versions that are asked for, such as `<3,>=2.0`.
      is_good: Whether the installed version is one of them.
    """

    name: str
    version: str | None
    asked: str
    is_good: bool

    def in_words(self) -> str:
        """Returns what is wrong with it; nothing if nothing is."""
        if self.is_good:
            return ""
        found = "it is missing" if self.version is None else "another version is installed"
        return f"{found}: pip install '{self.name}{self.asked}'"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extra:
    """A set of packages that only some need.

    Attributes:
      name: As in `pip install 'calm-beam[NAME]'`.
      purpose: What it is for.
      missing: Packages of it that are not there, or not in a version that is asked for.
    """

    name: str
    purpose: str
    missing: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Installed:
    """What is installed.

    Attributes:
      distribution: `calm-beam` or `calm-beam-serving`; None where the sources are used without being installed.
      packages: What it requires.
      extras: What it may use besides.
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
    """Returns whether a requirement is one of an extra, and not of the plain distribution."""
    is_optional = requirement.marker is not None and _IS_OPTIONAL.search(str(requirement.marker)) is not None
    return is_optional and _applies(requirement, extra=extra)


def _with_its_extras(requirement: Requirement) -> Iterator[Package]:
    """Yields a package, and what the extras of its own that are asked for bring along."""
    package = _package(requirement)
    yield package
    if package.version is not None:
        own = [Requirement(text) for text in importlib.metadata.requires(requirement.name) or ()]
        yield from (_package(each) for extra in requirement.extras for each in own if _is_of(each, extra))
