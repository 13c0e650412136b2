"""The accelerators' compilers: the versions that the installed JAX requires, and a separate folder for them.

The folder is next to the project's environment, and comes before it on the path of processes that compile. Nothing in
it is a dependency of calm-beam: libtpu is under Google Cloud Platform's terms, NVIDIA's assembler under NVIDIA's.
"""

import importlib.metadata
import pathlib
import subprocess
import sys
from collections.abc import Iterable, Mapping

from packaging.requirements import Requirement

# Environment of processes that compile: they do not look for a TPU, may run in parallel, and run nothing on devices.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_MIN_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "XLA_FLAGS": "",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}
_PLUGIN = "jax-cuda12-plugin"
# Of the plugin's extra, only the assembler of machine code; no library that only a GPU would run.
_OF_PLUGIN = ("jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")


class MissingPackagesError(Exception):
    """The compilers are not available here."""


def asked_for(requirements: Iterable[str], wanted: Mapping[str, str]) -> list[str]:
    """Returns a package's requirements on some other packages, without extras and markers.

    Args:
      requirements: The requirements in the package's metadata.
      wanted: Names of the others, each with the extra that requires it; empty if it is always required.

    Raises:
      MissingPackagesError: If one of them is not among the requirements.

    >>> asked_for(['libtpu==0.0.42.*; extra == "tpu"', "numpy>=2.0"], {"libtpu": "tpu"})
    ['libtpu==0.0.42.*']
    """
    found = {}
    for each in map(Requirement, requirements):
        extra = wanted.get(each.name)
        if extra is None or (each.marker is not None and not each.marker.evaluate({"extra": extra})):
            continue
        found[each.name] = f"{each.name}{each.specifier}"
    if missing := [name for name in wanted if name not in found]:
        raise MissingPackagesError(f"the installed packages do not say which version of {', '.join(missing)} they need")
    return [found[name] for name in wanted]


def installed(folder: pathlib.Path, *, requirements: Iterable[str] | None = None) -> pathlib.Path:
    """Returns a folder with the compilers that the installed JAX requires; installs them if they are missing.

    Args:
      folder: The folder.
      requirements: JAX's requirements; None for those of its metadata.

    Raises:
      MissingPackagesError: If they are not available; says why.
    """
    from_jax = asked_for(
        importlib.metadata.requires("jax") or [] if requirements is None else requirements,
        {"libtpu": "tpu", _PLUGIN: "cuda12"},
    )
    mark = folder / "installed.txt"
    wanted = "\n".join([sys.version.split()[0], *from_jax]) + "\n"
    if mark.is_file() and mark.read_text(encoding="utf-8") == wanted:
        return folder
    _install(folder, from_jax)
    (plugin,) = importlib.metadata.distributions(name=_PLUGIN, path=[str(folder)])
    _install(folder, asked_for(plugin.requires or [], dict.fromkeys(_OF_PLUGIN, "with-cuda")))
    mark.write_text(wanted, encoding="utf-8")
    return folder


def _install(folder: pathlib.Path, requirements: list[str]) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(folder)]
    done = subprocess.run([*command, *requirements], capture_output=True, text=True, check=False)
    if done.returncode:
        *_, last = done.stderr.strip().splitlines() or ["pip said nothing"]
        raise MissingPackagesError(f"pip could not install {', '.join(requirements)}: {last}")
