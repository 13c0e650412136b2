"""Many clients at once, of a service that runs as a process of its own."""

import concurrent.futures
import json
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import Any

import httpx
import pytest

from calm_beam.serving import Generator
from tests.examples.web_service.served import EXAMPLES, PROMPTS, assert_same, expected, free_port, read_events


def _threads_and_megabytes(process: subprocess.Popen[str]) -> tuple[int, float]:
    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    threads, kilobytes = (re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE) for name in ("Threads", "VmRSS"))
    assert threads is not None
    assert kilobytes is not None
    return int(threads[1]), int(kilobytes[1]) / 1024


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads and memory are read from /proc")
def test_under_load_every_answer_is_right_and_nothing_grows(folder: pathlib.Path, generator: Generator) -> None:
    """Eight clients at once get the generator's answers, a sample is measured; then the service ends as it is told."""
    port = free_port()
    command = [sys.executable, "-m", "web_service", f"--manifest={folder / 'manifest.json'}", f"--port={port}"]
    command += [f"--checkpoint={folder / 'model'}", f"--losses={folder / 'losses.jsonl'}", "--share=0.2"]
    process = subprocess.Popen(command, cwd=EXAMPLES, stderr=subprocess.PIPE, text=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            _wait_until_served(client, process)
            answers = {prompt: expected(generator, prompt) for prompt in PROMPTS}
            answered = _asked(client, answers, rounds=5)
            before = _threads_and_megabytes(process)
            answered += _asked(client, answers, rounds=20)
            after = _threads_and_megabytes(process)
        assert answered == 25 * len(PROMPTS)
        assert after[0] <= before[0] + 2
        assert after[1] <= before[1] + 32
    finally:
        process.send_signal(signal.SIGTERM)
        log = process.communicate(timeout=60)[1]
    assert "Finished server process" in log
    assert "ERROR" not in log
    losses = [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]
    # Six standard deviations of a binomial.
    assert abs(len(losses) - 0.2 * 2 * answered) < 6 * (0.16 * 2 * answered) ** 0.5
    assert {row["failure"] for row in losses} == {None}


def _wait_until_served(client: httpx.Client, process: subprocess.Popen[str]) -> None:
    while process.poll() is None:
        try:
            client.get("/health")
        except httpx.TransportError:
            time.sleep(0.2)
        else:
            return
    raise AssertionError(f"the service ended with status {process.returncode}")


def _asked(client: httpx.Client, answers: dict[str, dict[str, Any]], *, rounds: int) -> int:
    """Asks every prompt so often, by eight threads, checks every answer, and returns how many there were."""

    def ask(prompt: str) -> bool:
        response = client.post("/generate", json={"prompt": prompt})
        assert response.status_code == 200
        assert_same(response.json(), answers[prompt])
        stream = client.post("/generate", json={"prompt": prompt, "stream": True})
        assert_same(read_events(stream.text)[-1][1], answers[prompt])
        return True

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return sum(pool.map(ask, list(answers) * rounds))
