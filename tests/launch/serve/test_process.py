"""The command opens its port at once, ends on SIGTERM in any phase, and reports errors."""

import dataclasses
import json
import pathlib
import signal
import socket
import time

import httpx
import pytest

from calm_beam.launch.cli import main
from calm_beam.launch.serve.request import Served
from calm_beam.launch.serve.run import served_in_words
from calm_beam.manifest import read_manifest, write_manifest
from calm_beam.serving import Generator
from tests.calm_beam.manifest.builders import SPEED
from tests.calm_beam.serving.builders import build_entry
from tests.launch.serve.processes import started
from tests.launch.serve.served import PROMPTS, answered, asked, assert_same, expected, metric

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("phase", ["loading", "shapes"])
def test_sigterm_is_obeyed_before_it_is_ready(folder: pathlib.Path, tmp_path: pathlib.Path, phase: str) -> None:
    """SIGTERM ends the process with status 0 while the model loads or XLA compiles, which cannot be interrupted."""
    # The compilation cache is empty.
    cold = {"CALM_BEAM_CACHE": str(tmp_path), "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax")}
    with (
        started(folder, "--engine=xla", environment=cold) as service,
        httpx.Client(base_url=service.url, timeout=60) as client,
    ):
        response = service.first_response(client, "/readyz")
        while phase not in response.text:
            assert response.status_code == 503
            response = client.get("/readyz")
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(30) == 0
    assert "Ending after SIGTERM" in service.log
    assert "Traceback" not in service.log


def test_who_is_lazy_is_ready_at_once(folder: pathlib.Path, tmp_path: pathlib.Path, generator: Generator) -> None:
    """With --lazy the service is ready once the model is loaded; the first prompt waits for compilation.

    The file of losses exists from the start, for a monitor that runs next to the service.
    """
    losses = tmp_path / "losses.jsonl"
    with (
        started(folder, "--lazy", f"--losses={losses}") as service,
        httpx.Client(base_url=service.url, timeout=120) as client,
    ):
        service.first_response(client)
        assert losses.read_bytes() == b""
        service.wait_until_ready(client)
        assert "Compiling" not in service.log
        assert_same(answered(asked(client, PROMPTS[0])), expected(generator, PROMPTS[0]))
        assert client.get("/manifest").content == (folder / "manifest.json").read_bytes()
        assert metric(client, "calm_beam_ready") == 1
        service.process.send_signal(signal.SIGINT)
        assert service.process.wait(60) == 0
    assert '"POST /v1/completions HTTP/1.1" 200' in service.log
    # A probe polls all the time.
    assert "GET /readyz" not in service.log


def test_the_full_model_serves_after_an_alarm(folder: pathlib.Path, generator: Generator) -> None:
    """With --full_model every token runs all layers, and log, metrics and models say that there is no threshold."""
    with (
        started(folder, "--lazy", "--full_model") as service,
        httpx.Client(base_url=service.url, timeout=120) as client,
    ):
        service.wait_until_ready(client)
        assert_same(answered(asked(client, PROMPTS[0])), expected(generator.full_model(), PROMPTS[0]))
        assert metric(client, "calm_beam_layers_saved_total") == 0
        assert 'threshold="None"' in client.get("/metrics").text
        assert client.get("/v1/models").json()["data"][0]["calm_beam"]["threshold"] is None
    assert "the full model (--full_model): http://" in service.log


def test_the_first_line_has_the_speed_in_batches(folder: pathlib.Path) -> None:
    """The first line says how fast the threshold was in batches, as this decodes, and not one prompt at a time."""
    together = dataclasses.replace(SPEED, factor=0.93, batch=64)
    bare = dataclasses.replace(read_manifest(folder / "manifest.json"), speeds=(SPEED,))
    served = Served(manifest=bare, entry=bare.calibrations[0], content=b"")
    assert "times as fast" not in served_in_words(served)
    both = dataclasses.replace(bare, speeds=(SPEED, together))
    words = served_in_words(dataclasses.replace(served, manifest=both))
    assert words.endswith(", 0.93 times as fast as the full model in batches of 64, when it was calibrated")


def test_another_model_ends_it(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """An error found after the port is open, such as another model, ends the process with the reason."""
    content = json.loads((folder / "manifest.json").read_text())
    content["model"]["fingerprint"] = "sha256:" + "0" * 64
    (folder / "other.json").write_text(json.dumps(content))
    with started(folder, manifest="other.json") as service:
        status = service.process.wait(120)
    assert status in (1, 2)
    assert "Traceback" not in service.log
    assert "calm-beam serve: " in service.log.splitlines()[-1]


def test_what_needs_no_model_is_refused_before_the_port_opens(
    folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors that need no model are reported before the port opens: entry, precision, address, losses of no use."""
    manifest = f"--manifest={folder / 'manifest.json'}"
    losses = f"--losses={tmp_path / 'losses'}"
    sound = read_manifest(folder / "manifest.json")
    risky = dataclasses.replace(sound, calibrations=(build_entry(0.3, consistency="risk", loss="relu"),))
    never = dataclasses.replace(sound, calibrations=(build_entry(None),))
    for name, content in (("risk", risky), ("never", never)):
        write_manifest(content, tmp_path / name)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for flags, reason in (
            ([manifest, "--delta=0.7"], "delta"),
            ([manifest, "--dtype=bfloat16"], "--dtype=bfloat16: the manifest was calibrated with float32"),
            ([manifest, f"--port={port}"], f"port {port} is in use already. Pass another --port."),
            ([manifest, "--port=70000"], "--port must be at most 65535, got 70000"),
            ([manifest, "--probe_share=0.1"], "--probe_share belongs to --losses"),
            ([manifest, f"--losses={folder}/no/x"], f"--losses {folder}/no/x: the folder {folder}/no does not exist."),
            ([manifest, f"--losses={folder}"], f"--losses {folder}: exists and is not a file"),
            ([manifest, "--losses=gs://b/x"], "--losses gs://b/x: losses are added to a local file"),
            ([f"--manifest={folder / 'nothing'}"], "nothing"),
            ([f"--manifest={tmp_path / 'risk'}", losses], "risk consistency, whose losses need references"),
            ([manifest, losses, "--full_model"], "--losses: with --full_model no answer loses anything"),
            ([f"--manifest={tmp_path / 'never'}", losses], "says never exit: there is no risk to watch"),
        ):
            start = time.monotonic()
            assert main(["serve", *flags]) == 2
            assert reason in capsys.readouterr().err
            assert time.monotonic() - start < 60
    assert not (tmp_path / "losses").exists()
