"""Ports of local runners, as the kernel lists them during a run, are open to this machine only."""

import os
import pathlib
import re
import socket
import types
from collections.abc import Iterator

import apache_beam as beam
import grpc
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import worker_handlers
from apache_beam.runners.worker import worker_pool_main

from calm_beam.launch import job_service, worker_pool
from calm_beam.launch.runners import loopback, make_runner, run_pipeline
from calm_beam.launch.runners.loopback import LoopbackServer, OpenPortError, listen_on_loopback, require_loopback
from calm_beam.launch.runners.worker_processes import is_loopback
from tests.sockets import family, listening, open_to_others
from tests.worker_pools import flags_of_two_workers

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not pathlib.Path("/proc/net/tcp").exists(), reason="the kernel shows no table of sockets"),
]

_THREADS = ("--direct_num_workers=2", "--direct_running_mode=multi_threading")


def _addresses_during(flags: tuple[str, ...], folder: pathlib.Path) -> set[str]:
    """Returns the addresses at which launcher and workers listen while the workers work."""
    launcher = os.getpid()

    def look(element: int) -> None:
        found = listening(family(launcher))
        (folder / str(element)).write_text(f"{os.getpid()} {' '.join(found)}")

    options = PipelineOptions(list(flags))
    pipeline = beam.Pipeline(runner=make_runner(options), options=options)
    _ = pipeline | beam.Create([0, 1]) | beam.Reshuffle() | beam.Map(look)
    run_pipeline(pipeline)
    lines = [(folder / str(element)).read_text().split() for element in (0, 1)]
    if "--direct_running_mode=multi_threading" not in flags:
        assert str(launcher) not in {line[0] for line in lines}, "workers are processes of their own"
    return {address for line in lines for address in line[1:]}


@pytest.mark.parametrize(
    "kind",
    ["processes", pytest.param("pool", marks=pytest.mark.slow), pytest.param("job service", marks=pytest.mark.slow)],
)
def test_a_run_of_two_worker_processes_is_open_to_this_machine_alone(kind: str, tmp_path: pathlib.Path) -> None:
    """During a run, launcher, workers, pool and job service listen at loopback addresses only."""
    with flags_of_two_workers(kind) as flags:
        addresses = _addresses_during(flags, tmp_path)
    assert addresses
    assert open_to_others(addresses) == []


def test_workers_that_are_threads_are_open_to_this_machine_alone(tmp_path: pathlib.Path) -> None:
    """Ports that serve worker threads are open to this machine only."""
    addresses = _addresses_during(_THREADS, tmp_path)
    assert addresses
    assert open_to_others(addresses) == []


@pytest.fixture
def _beam_as_it_is() -> Iterator[None]:
    """Undoes our changes of Beam's modules, and makes them again afterwards."""
    for module in loopback.MODULES:
        module.grpc = grpc  # type: ignore[attr-defined]
    yield
    listen_on_loopback()


@pytest.mark.usefixtures("_beam_as_it_is")
def test_beams_own_pool_is_open_to_everybody() -> None:
    """The check finds the public ports that Beam opens without our changes (the twin)."""
    _, server = worker_pool_main.BeamFnExternalWorkerPoolServicer.start()
    try:
        assert open_to_others(listening({os.getpid()})) != []
    finally:
        server.stop(0).wait()


def test_ports_are_found_at_every_address() -> None:
    """The table's reader distinguishes a socket on all interfaces from one on loopback (the twin)."""
    for host, is_open in (("127.0.0.1", False), ("0.0.0.0", True)):
        with socket.create_server((host, 0)):
            assert host in listening({os.getpid()})
        assert bool(open_to_others({host})) is is_open
    assert open_to_others({"::1", "::", "::ffff:127.0.0.1"}) == ["::"]


def test_no_other_module_of_beam_opens_ports() -> None:
    """Every server of Beam's runners and workers is made in a module that we patch; the rest are programs."""
    root = pathlib.Path(beam.__file__).parent
    makers = {
        ".".join(path.relative_to(root.parent).with_suffix("").parts)
        for folder in ("runners", "portability", "transforms", "utils", "io", "ml")
        for path in (root / folder).rglob("*.py")
        if not path.stem.endswith("_test") and re.search(r"add_(in)?secure_port", path.read_text(encoding="utf-8"))
    }
    programs = {"apache_beam.runners.portability.expansion_service_main"}
    assert makers - programs == {module.__name__ for module in loopback.MODULES}


def test_a_beam_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a module of Beam gets its servers elsewhere, the run is refused."""
    changed = types.ModuleType("apache_beam.changed")
    monkeypatch.setattr(loopback, "MODULES", (changed,))
    with pytest.raises(
        OpenPortError, match=r"opens its ports in a way that calm-beam does not know \(apache_beam.chan"
    ):
        listen_on_loopback()


def test_a_server_of_beams_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose server has unpatched parts ends before a worker is started."""
    server = grpc.server(None)
    with pytest.raises(OpenPortError, match="it has made a server of its own"):
        require_loopback([LoopbackServer(server), server])
    with pytest.raises(OpenPortError, match="its servers are not where they were"):
        require_loopback([1])
    listen_on_loopback()
    monkeypatch.setattr(worker_handlers, "grpc", grpc)
    with pytest.raises(OpenPortError):
        worker_handlers.GrpcServer(None, None, None)


@pytest.mark.parametrize("start", [job_service.main, worker_pool.main])
def test_a_port_that_is_taken_or_none(
    start: types.FunctionType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A port that is in use, or is none, ends both services with one line."""
    monkeypatch.setattr("signal.signal", lambda *_: pytest.fail("it serves"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert start([f"--port={port}"]) == 1
    assert f"port {port} of this machine cannot be opened: it is in use" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        start(["--port=70000"])
    assert "expected a whole number from 0 to 65535, got '70000'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "is_here"),
    [
        ("localhost:50000", True),
        ("127.0.0.1:1", True),
        ("[::1]:1", True),
        ("192.0.2.1:50000", False),
        ("[2001:db8::1]:1", False),
        ("0.0.0.0:1", False),
        ("no.such.host.invalid:1", False),
        ("", False),
    ],
)
def test_addresses_of_this_machine(address: str, is_here: bool) -> None:
    """Loopback addresses are distinguished from all others, and from invalid ones."""
    assert is_loopback(address) is is_here
