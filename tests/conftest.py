"""For all tests: compiled code shared between processes, bounded memory, a local Google Cloud Storage on request."""

import gc
import itertools
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests.quick_pipelines import build_quickly

if TYPE_CHECKING:
    from tests.cloud.service import CloudService

_bucket_numbers = itertools.count(1)
_MEMORY_BOUND = 1 << 30
# Tracing makes millions of small objects, little of which is garbage: Python looks for it seldom.
_OBJECTS_BETWEEN_COLLECTIONS = 20_000
_memory_bound = [_MEMORY_BOUND]


# Compilation is most of these tests' time; without XLA's optimisation and fusion it takes a quarter of it.
_COMPILE_QUICKLY = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1"
)


def pytest_configure(config: pytest.Config) -> None:
    """Makes all processes compile quickly and share compiled code in the folder that `calm-beam` uses.

    If `XLA_FLAGS` is set, even to an empty text, it is kept: `make test-compiled` compiles as users do. Tests of random
    examples have no deadline, since the machine may be busy.
    """
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, 20, 50)
    os.environ.setdefault("XLA_FLAGS", _COMPILE_QUICKLY)
    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")
    from calm_beam.decoding.compilation import use_compilation_cache

    use_compilation_cache()
    # Imported here, since it starts XLA, which reads its flags only once, to find the instruction set of native code.
    config.pluginmanager.import_plugin("tests.instruction_sets")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Makes pipelines quick to build too, but where all is as users have it."""
    if os.environ["XLA_FLAGS"] == _COMPILE_QUICKLY:
        build_quickly()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Drops JAX's compiled code once a process has grown large, since JAX keeps all of it, gigabytes in a run.

    Code that is needed again comes from the folder.
    """
    if "jax" not in sys.modules or _resident_bytes() < _memory_bound[0]:
        return
    from calm_beam.decoding.memory import return_freed_memory

    sys.modules["jax"].clear_caches()
    gc.collect()
    return_freed_memory()
    # Other libraries may need more than the bound, so memory is not dropped again after every test.
    _memory_bound[0] = max(_MEMORY_BOUND, _resident_bytes() + _MEMORY_BOUND // 2)


def _resident_bytes() -> int:
    """Returns how much memory this process has; 0 if the system does not report it."""
    try:
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@pytest.fixture(scope="session")
def _cloud_service(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[CloudService]":
    # Import here, so that other tests do not load the clients.
    from tests.cloud.service import serving_cloud

    with serving_cloud(tmp_path_factory.mktemp("cloud")) as service:
        yield service


@pytest.fixture
def cloud(_cloud_service: "CloudService", monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> "CloudService":
    """The service; this process and its children talk to it, with a cache of their own."""
    _cloud_service.guard.reset()
    for name, value in _cloud_service.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CALM_BEAM_CACHE", str(tmp_path / "cache"))
    return _cloud_service


@pytest.fixture
def bucket(cloud: "CloudService") -> str:
    """Address of an empty bucket, such as `gs://bucket-1`."""
    from tests.cloud.service import make_bucket

    address = make_bucket(cloud, f"bucket-{next(_bucket_numbers)}")
    cloud.guard.reset()
    return address


@pytest.fixture
def strict_promotion() -> Iterator[None]:
    """Makes implicit dtype and rank promotion by JAX an error."""
    import jax

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
