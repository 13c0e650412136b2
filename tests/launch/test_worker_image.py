"""The image of Dataflow's workers, as far as it can be checked without building it."""

import pathlib
import re
import string

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.setup_file import read_setup

_ROOT = pathlib.Path(__file__).parents[2]
_CONSTRAINTS = _ROOT / "launch" / "worker_constraints.txt"


def _instructions() -> list[tuple[str, str]]:
    """Returns the instructions of the Dockerfile with their arguments, each on one line."""
    text = re.sub(r"^#.*\n", "", (_ROOT / "launch" / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines if line.strip())]


def _arguments(name: str) -> list[str]:
    return [rest for instruction, rest in _instructions() if instruction == name]


def _pins() -> dict[str, Version]:
    lines = [line for line in _CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in (line.split("==") for line in lines)}


def test_pins_are_within_the_ranges() -> None:
    """Every requirement of a worker is pinned, to a version that setup.py allows."""
    pins = _pins()
    setup = read_setup()
    requirements = [Requirement(text) for text in [*setup["install_requires"], *setup["extras_require"]["dataflow"]]]
    assert len(requirements) > 10
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{name} is not pinned"
        assert requirement.specifier.contains(pins[name]), f"{name}=={pins[name]} is not in {requirement.specifier}"


def test_beam_is_the_same_everywhere() -> None:
    """The files that start a worker are those of the installed Beam, and of its Python."""
    assert _arguments("ARG")[0] == f"BEAM_VERSION={_pins()['apache-beam']}"
    beam, launcher, builder, base = _arguments("FROM")
    assert beam == "apache/beam_python3.11_sdk:${BEAM_VERSION} AS beam"
    assert "python311" in launcher
    assert base.startswith("python:3.11-")
    # Libraries are loaded from where the C library is for which they were built.
    assert builder == f"{base} AS wheel"


def test_copied_paths_exist() -> None:
    """Every path copied from the sources exists, with all that building the package needs."""
    sources = []
    for argument in _arguments("COPY"):
        if not argument.startswith("--from"):
            *paths, _ = argument.split()
            sources += paths
    assert [path for path in sources if not (_ROOT / path).exists()] == []
    needed = {"setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "calm_beam", "transforms", "launch"}
    assert needed <= {*sources}


def test_native_code_is_built_where_a_compiler_is() -> None:
    """The workers' image takes the wheel from a stage with a compiler; a wheel without native code ends the build."""
    install, build, *_ = [argument for argument in _arguments("RUN") if "DEVICE" not in argument]
    assert "gcc" in install
    assert "libc6-dev" in install
    assert re.search(r"pip wheel .*--wheel-dir=/wheels \. +&& ls /wheels/calm_beam-\*-linux_\*\.whl", build)
    assert "--from=wheel /wheels /wheels" in _arguments("COPY")
    assert [argument for argument in _arguments("RUN") if "/wheels/*.whl)[dataflow]" in argument]


def test_no_image_is_a_moving_target() -> None:
    """Every image that is built from has a tag other than latest."""
    for argument in _arguments("FROM"):
        image = argument.split(" AS ")[0]
        assert ":" in image, image
        assert not image.endswith(":latest"), image


@pytest.mark.parametrize(("device", "requirement"), [("cpu", "jax"), ("cuda", "jax[cuda12]"), ("tpu", "jax[tpu]")])
def test_jax_for_each_device(device: str, requirement: str) -> None:
    """Each device has its extra of JAX, with quotes that keep the shell from taking it for a pattern."""
    (run,) = [argument for argument in _arguments("RUN") if "DEVICE" in argument]
    match = re.search(rf"\b{device}\) extra='(.*?)' ;;", run)
    assert match is not None
    assert f"jax{match[1]}" == requirement
    assert '"jax${extra}"' in run
    assert "exit 1" in run


def test_worker_and_launcher_start() -> None:
    """Beam's boot starts a worker, and the launcher finds its script, in a folder that shadows no module."""
    assert _arguments("ENTRYPOINT") == ['["/opt/apache/beam/boot"]']
    (script,) = [
        part for argument in _arguments("ENV") for part in argument.split() if part.startswith("FLEX_TEMPLATE")
    ]
    path = pathlib.PurePosixPath(script.partition("=")[2])
    assert (_ROOT / path.relative_to(_arguments("WORKDIR")[-1])).is_file()
    assert [file.name for file in (_ROOT / path.relative_to("/template")).parent.glob("*.py")] == ["main.py"]


def test_cloud_build_knows_the_dockerfile() -> None:
    """Cloud Build gets the file and a value for every argument after the first image, and no others."""
    text = (_ROOT / "launch" / "cloudbuild.yaml").read_text()
    assert "--file=launch/Dockerfile" in text
    given = re.findall(r"--build-arg=(\w+)=\$\{_(\w+)\}", text)
    # The first is the version of Beam, which is that of the constraints.
    declared = [argument.partition("=")[0] for argument in _arguments("ARG")][1:]
    assert given == [(name, name) for name in declared]
    used = {name for _, _, name, _ in string.Template.pattern.findall(text) if name}
    assert used == {"_IMAGE", *(f"_{name}" for name in declared)}
