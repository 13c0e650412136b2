"""How workers on other machines get calm_beam."""

import pathlib
import re
import tarfile
import zipfile

from apache_beam.options.pipeline_options import PipelineOptions, SetupOptions, WorkerOptions

import calm_beam
from calm_beam.launch.flags import UsageError
from calm_beam.launch.terminal import say

_FLOORS = ("calm_beam", "transforms", "launch")


def choose_package(options: PipelineOptions, *, needs_image: bool) -> None:
    """Makes sure that workers will have calm_beam, and fills in `options` where it is not said how.

    They find it in their image, or install a package at their start: a wheel or sdist that is staged as it is, or an
    sdist that Beam builds. If nothing is said and calm_beam runs from its sources, it is those that Beam builds.

    Args:
      options: Beam's flags.
      needs_image: Whether only an image will do, since JAX for an accelerator cannot be had by installing calm_beam.

    Raises:
      UsageError: If workers would not have calm_beam, or a file that is named is none or another's.
    """
    setup = options.view_as(SetupOptions)
    worker = options.view_as(WorkerOptions)
    has_image = bool(worker.sdk_container_image or worker.worker_harness_container_image)
    if needs_image and not has_image:
        raise UsageError(
            "--sdk_container_image is missing: Beam's own image has no JAX for accelerators, and the job would decode "
            "on the CPU of machines whose accelerators idle. Build launch/Dockerfile."
        )
    for package in setup.extra_packages or ():
        _check_readable(package)
    if setup.setup_file:
        folder = pathlib.Path(setup.setup_file).resolve().parent
        if not pathlib.Path(setup.setup_file).is_file():
            raise UsageError(f"--setup_file {setup.setup_file}: no such file. That of calm-beam is setup.py.")
        if not has_image and not all((folder / floor / "__init__.py").is_file() for floor in _FLOORS):
            raise UsageError(f"--setup_file {setup.setup_file}: is not that of calm-beam, which workers need.")
    elif not has_image and not any(_holds_calm_beam(package) for package in setup.extra_packages or ()):
        setup_file = pathlib.Path(calm_beam.__file__).resolve().parents[1] / "setup.py"
        if not setup_file.is_file():
            raise UsageError(
                "workers have no calm-beam: pass --sdk_container_image with an image of launch/Dockerfile, "
                "--extra_package with its wheel or sdist, or --setup_file with the setup.py of its sources."
            )
        say(
            f"no --sdk_container_image: every worker will install calm-beam from the sources beside {setup_file}, "
            "which takes minutes; an image of launch/Dockerfile starts faster"
        )
        setup.setup_file = str(setup_file)
    if setup.setup_file:
        # Beam changes to the folder of the file, and then looks for the file by the path it was given.
        setup.setup_file = str(pathlib.Path(setup.setup_file).resolve())


def _check_readable(package: str) -> None:
    if not package.startswith("gs://") and not pathlib.Path(package).is_file():
        raise UsageError(f"--extra_package {package}: no such file.")


def _holds_calm_beam(package: str) -> bool:
    """Returns whether a wheel or an sdist holds all three floors; whoever names one on Cloud Storage is believed."""
    if package.startswith("gs://"):
        return re.match(r"calm[-_]beam-", pathlib.PurePosixPath(package).name) is not None
    if zipfile.is_zipfile(package):
        with zipfile.ZipFile(package) as archive:
            names = archive.namelist()
    elif tarfile.is_tarfile(package):
        with tarfile.open(package) as archive:
            names = archive.getnames()
    else:
        return False
    return all(any(f"/{name}".endswith(f"/{floor}/__init__.py") for name in names) for floor in _FLOORS)
