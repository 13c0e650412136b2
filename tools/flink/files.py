"""The files of Flink, of Beam's job server for it, and of Prism: fetched once, and verified by checksums.

Flink is the package apache-flink-libraries, whose archive pip verifies with `requirements.txt`. The job server is what
Maven resolves for `pom.xml`, without Flink, which is there already, and without a newer logger than Flink's. Every jar
is verified with `sha256.txt` whenever a cluster starts. Prism is built by Go, which verifies its sources with Go's own
list of checksums.

The runner is from Beam 2.70, which is older than the Python package that it runs; the job service below it is from
2.65. To use newer ones, name them in `pom.xml` and write `sha256.txt` again:

    python -m tools.flink.files --write
"""

import argparse
import dataclasses
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

FOLDER_VARIABLE = "CALM_BEAM_ENGINES"
_HERE = pathlib.Path(__file__).parent
_SUMS = _HERE / "sha256.txt"
_PRISM = "github.com/apache/beam/sdks/v2/go/cmd/prism"
_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
# The jars of Flink that are used: tables, their formats and their planner are not.
_FLINK_PARTS = ("flink-dist-", "log4j-")


class EngineError(Exception):
    """An engine that is not available, or differs from the known one; the message says what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engines:
    """The locations of the files.

    Attributes:
      folder: Holds `flink/`, `beam/` and `prism`.
    """

    folder: pathlib.Path

    @classmethod
    def here(cls) -> "Engines":
        """Returns the files in the folder that `CALM_BEAM_ENGINES` names, or else in the user's cache."""
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        return cls(folder=pathlib.Path(os.environ.get(FOLDER_VARIABLE) or cache / "calm-beam" / "engines").absolute())

    @property
    def flink(self) -> tuple[pathlib.Path, ...]:
        """Flink's jars."""
        return tuple(sorted((self.folder / "flink").glob("*.jar")))

    @property
    def job_server(self) -> tuple[pathlib.Path, ...]:
        """Jars of Beam's job server, without Flink's."""
        return tuple(sorted((self.folder / "beam").glob("*.jar")))

    @property
    def prism(self) -> pathlib.Path:
        """The Prism program of the installed Beam's version."""
        return self.folder / f"prism-{apache_beam.__version__}" / "prism"

    def missing(self) -> str:
        """Returns why no cluster can be started here, as text; empty if one can. Reads no jar."""
        if shutil.which("java") is None:
            return "no Java on the PATH"
        absent = [name for name in _known() if not (self.folder / name).is_file()]
        return f"{len(absent)} jars are not in {self.folder}; `make flink` fetches them" if absent else ""

    def fetch_flink(self) -> None:
        """Fetches missing files of Flink and of the job server, and verifies all of them.

        Raises:
          EngineError: If a file is not available, or differs from the known one.
        """
        known = _known()
        for part, fetch in (("flink", _fetch_flink), ("beam", _fetch_job_server)):
            if any(not (self.folder / name).is_file() for name in known if name.startswith(f"{part}/")):
                _replace(self.folder / part, fetch)
        self.check()

    def check(self) -> None:
        """Verifies every jar.

        Raises:
          EngineError: If one differs, is missing, or is unknown.
        """
        known, found = _known(), self.sums()
        wrong = sorted(name for name in known.keys() | found.keys() if known.get(name) != found.get(name))
        if wrong:
            raise EngineError(
                f"{self.folder}: {', '.join(wrong[:3])}{' and others' if wrong[3:] else ''} is missing, unknown, or "
                f"not the file of {_SUMS.name}. Remove the folder to fetch it again."
            )

    def sums(self) -> dict[str, str]:
        """Returns the SHA-256 of every jar, by its path in the folder."""
        return {
            path.relative_to(self.folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in (*self.flink, *self.job_server)
        }

    def fetch_prism(self) -> None:
        """Builds Prism for the installed Beam's version, if it is missing.

        Raises:
          EngineError: If it cannot be built.
        """
        if not self.prism.is_file():
            folder = str(self.prism.parent)
            _run(["go", "install", f"{_PRISM}@v{apache_beam.__version__}"], environment={**os.environ, "GOBIN": folder})


def _known() -> dict[str, str]:
    """Returns the known SHA-256 of jars, by their path in the folder."""
    return {name: digest for digest, name in map(str.split, _SUMS.read_text(encoding="utf-8").splitlines())}


def _replace(folder: pathlib.Path, fetch: Callable[[pathlib.Path, pathlib.Path], None]) -> None:
    """Replaces a folder atomically by a newly fetched one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        fetched = pathlib.Path(name) / "jars"
        fetched.mkdir()
        fetch(fetched, pathlib.Path(name))
        shutil.rmtree(folder, ignore_errors=True)
        fetched.rename(folder)


def _fetch_flink(jars: pathlib.Path, place: pathlib.Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:", "--require-hashes"]
    _run([*pip, f"--requirement={_HERE / 'requirements.txt'}", f"--dest={place}"])
    (archive,) = place.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        for member in packed:
            path = pathlib.PurePosixPath(member.name)
            if path.parent.parts[1:] == ("deps", "lib") and path.name.startswith(_FLINK_PARTS):
                member.name = path.name
                packed.extract(member, jars, filter="data")


def _fetch_job_server(jars: pathlib.Path, _: pathlib.Path) -> None:
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
            _replace(engines.folder / "flink", _fetch_flink)
            _replace(engines.folder / "beam", _fetch_job_server)
            lines = (f"{digest}  {name}\n" for name, digest in sorted(engines.sums().items()))
            _SUMS.write_text("".join(lines), encoding="utf-8")
        engines.fetch_flink()
        engines.fetch_prism()
    except EngineError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"all in {engines.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
