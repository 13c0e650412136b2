"""The files of Flink, Spark, Beam's job servers for them, and Prism: fetched once, and verified by checksums.

Flink is the package apache-flink-libraries and Spark the package pyspark, whose archives pip verifies with the hashes
in `requirements-*.txt`. The job servers are what Maven resolves for `pom.xml`, without Flink and Spark, which are there
already, and without a newer logger than Flink's. `make flink` verifies every jar with `sha256.txt` before it starts a
cluster. Prism is built by Go, which verifies its sources with Go's own list of checksums.

The runners are from Beam 2.70, which is older than the Python package that they run; the job service below them is
from 2.65. To use newer ones, name them in `pom.xml` and write `sha256.txt` again:

    python -m tools.flink.files --write
"""

import argparse
import dataclasses
import functools
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence

import apache_beam

ENGINES = ("flink", "spark")
FOLDER_VARIABLE = "CALM_BEAM_ENGINES"
_PARTS = (*ENGINES, "beam")
_HERE = pathlib.Path(__file__).parent
_SUMS = _HERE / "sha256.txt"
_PRISM = "github.com/apache/beam/sdks/v2/go/cmd/prism"
_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
# Folder of jars in the archive, and what the names of those that are used start with: Flink's tables, their formats and
# their planner are not.
_JARS = {"flink": ("lib", ("flink-dist-", "log4j-")), "spark": ("jars", ("",))}


class EngineError(Exception):
    """An engine that is not available, or differs from the known one; the message says what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engines:
    """The locations of the files.

    Attributes:
      folder: Holds `flink/`, `spark/`, `beam/` and `prism`.
    """

    folder: pathlib.Path

    @classmethod
    def here(cls) -> "Engines":
        """Returns the files in the folder that `CALM_BEAM_ENGINES` names, or else in the user's cache."""
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        return cls(folder=pathlib.Path(os.environ.get(FOLDER_VARIABLE) or cache / "calm-beam" / "engines").absolute())

    def jars(self, part: str) -> tuple[pathlib.Path, ...]:
        """Returns the jars of `flink`, of `spark`, or of Beam's job servers for both (`beam`)."""
        return tuple(sorted((self.folder / part).glob("*.jar")))

    @property
    def prism(self) -> pathlib.Path:
        """The Prism program of the installed Beam's version."""
        return self.folder / f"prism-{apache_beam.__version__}" / "prism"

    def missing(self, engine: str) -> str:
        """Returns why no cluster of `flink` or `spark` can be started here; empty if one can. Reads no jar."""
        if shutil.which("java") is None:
            return "no Java on the PATH"
        absent = [name for name in _known(engine, "beam") if not (self.folder / name).is_file()]
        return f"{len(absent)} jars are not in {self.folder}; `make flink` fetches them" if absent else ""

    def require(self, engine: str) -> None:
        """Checks that a cluster of `flink` or `spark` can be started here; reads no jar.

        Raises:
          EngineError: If not; the message says what is missing.
        """
        reason = self.missing(engine)
        if reason:
            raise EngineError(f"no cluster of {engine}: {reason}")

    def fetch(self, engine: str) -> None:
        """Fetches missing jars of `flink` or `spark` and of the job servers, and verifies all of them.

        Raises:
          EngineError: If a file is not available, or differs from the known one.
        """
        for part in (engine, "beam"):
            if any(not (self.folder / name).is_file() for name in _known(part)):
                self.replace(part)
        self.check(engine)

    def replace(self, part: str) -> None:
        """Replaces the jars of `flink`, `spark` or `beam` by newly fetched ones.

        Raises:
          EngineError: If they are not available.
        """
        fetch = _fetch_job_servers if part == "beam" else functools.partial(_fetch_engine, part)
        _replace(self.folder / part, fetch)

    def check(self, engine: str) -> None:
        """Verifies every jar of `flink` or `spark` and of the job servers.

        Raises:
          EngineError: If one differs, is missing, or is unknown.
        """
        known, found = _known(engine, "beam"), self.sums(engine, "beam")
        wrong = sorted(name for name in known.keys() | found.keys() if known.get(name) != found.get(name))
        if wrong:
            raise EngineError(
                f"{self.folder}: {', '.join(wrong[:3])}{' and others' if wrong[3:] else ''} is missing, unknown, or "
                f"not the file of {_SUMS.name}. Remove the folder to fetch it again."
            )

    def sums(self, *parts: str) -> dict[str, str]:
        """Returns the SHA-256 of every jar of some parts, by its path in the folder."""
        return {
            path.relative_to(self.folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for part in parts
            for path in self.jars(part)
        }

    def fetch_prism(self) -> None:
        """Builds Prism for the installed Beam's version, if it is missing.

        Raises:
          EngineError: If it cannot be built.
        """
        if not self.prism.is_file():
            folder = str(self.prism.parent)
            _run(["go", "install", f"{_PRISM}@v{apache_beam.__version__}"], environment={**os.environ, "GOBIN": folder})


def _known(*parts: str) -> dict[str, str]:
    """Returns the known SHA-256 of the jars of some parts, by their path in the folder."""
    lines = map(str.split, _SUMS.read_text(encoding="utf-8").splitlines())
    return {name: digest for digest, name in lines if name.partition("/")[0] in parts}


def _replace(folder: pathlib.Path, fetch: Callable[[pathlib.Path, pathlib.Path], None]) -> None:
    """Replaces a folder atomically by a newly fetched one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        fetched = pathlib.Path(name) / "jars"
        fetched.mkdir()
        fetch(fetched, pathlib.Path(name))
        shutil.rmtree(folder, ignore_errors=True)
        fetched.rename(folder)


def _fetch_engine(engine: str, jars: pathlib.Path, place: pathlib.Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:", "--require-hashes"]
    _run([*pip, f"--requirement={_HERE / f'requirements-{engine}.txt'}", f"--dest={place}"])
    (archive,) = place.glob("*.tar.gz")
    folder, names = _JARS[engine]
    with tarfile.open(archive) as packed:
        for member in packed:
            path = pathlib.PurePosixPath(member.name)
            if path.parent.parts[1:] == ("deps", folder) and path.suffix == ".jar" and path.name.startswith(names):
                # Python 3.11.2 has no filters of members yet; only the content is taken.
                content = packed.extractfile(member)
                assert content is not None, "a jar is a file"
                (jars / path.name).write_bytes(content.read())


def _fetch_job_servers(jars: pathlib.Path, _: pathlib.Path) -> None:
    _run(["mvn", "--batch-mode", "--quiet", f"--file={_HERE / 'pom.xml'}", _COPY, f"-DoutputDirectory={jars}"])


def _run(command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> None:
    if shutil.which(command[0]) is None:
        raise EngineError(f"{command[0]} is not on the PATH, and is needed to fetch what is missing.")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EngineError(f"{' '.join(command[:4])} ended with status {done.returncode}: {done.stderr or done.stdout}")


def main(argv: Sequence[str] | None = None) -> int:
    """Fetches and verifies everything, or writes the checksums of the files that are there."""
    parser = argparse.ArgumentParser(prog="python -m tools.flink.files", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="take the jars that Maven and pip give for the known ones")
    flags = parser.parse_args(argv)
    engines = Engines.here()
    try:
        if flags.write:
            for part in _PARTS:
                engines.replace(part)
            lines = (f"{digest}  {name}\n" for name, digest in sorted(engines.sums(*_PARTS).items()))
            _SUMS.write_text("".join(lines), encoding="utf-8")
        for engine in ENGINES:
            engines.fetch(engine)
        engines.fetch_prism()
    except EngineError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"all in {engines.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
