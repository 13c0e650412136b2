"""Many clients at once, against a service in a process of its own."""

import concurrent.futures
import json
import pathlib
import re
import signal
import sys
from typing import Any

import httpx
import pytest

from calm_beam.serving import Generator
from tests.launch.serve.processes import started
from tests.launch.serve.served import PROMPTS, answered, asked, assert_same, expected


def _threads_and_megabytes(process: int) -> tuple[int, float]:
    status = pathlib.Path(f"/proc/{process}/status").read_text()
    threads, kilobytes = (re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE) for name in ("Threads", "VmRSS"))
    assert threads is not None
    assert kilobytes is not None
    return int(threads[1]), int(kilobytes[1]) / 1024


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads and memory are read from /proc")
def test_under_load_every_answer_is_right_and_nothing_grows(folder: pathlib.Path, generator: Generator) -> None:
    """Eight concurrent clients get the generator's answers, a sample is measured, and SIGTERM ends the service."""
    losses = folder / "losses.jsonl"
    with started(folder, f"--losses={losses}", "--probe_share=0.2") as service:
        process = service.process
        with httpx.Client(base_url=service.url, timeout=60) as client:
            service.wait_until_ready(client)
            answers = {prompt: expected(generator, prompt) for prompt in PROMPTS}
            count = _asked(client, answers, rounds=5)
            before = _threads_and_megabytes(process.pid)
            count += _asked(client, answers, rounds=20)
            after = _threads_and_megabytes(process.pid)
        assert count == 25 * len(PROMPTS)
        assert after[0] <= before[0] + 2
        assert after[1] <= before[1] + 32
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert "Finished server process" in service.log
    # The promise is made up, and losses of a random model exceed it: the monitor says so, and nothing else fails.
    errors = [line for line in service.log.splitlines() if line.startswith("ERROR")]
    assert [line for line in errors if "ALARM" not in line] == []
    rows = [json.loads(line) for line in losses.read_text().splitlines()]
    # Six standard deviations of a binomial.
    assert abs(len(rows) - 0.2 * 2 * count) < 6 * (0.16 * 2 * count) ** 0.5
    assert {row["failure"] for row in rows} == {None}


def _asked(client: httpx.Client, answers: dict[str, dict[str, Any]], *, rounds: int) -> int:
    """Sends every prompt so often from eight threads, checks every answer, and returns the number of answers."""

    def ask(prompt: str) -> bool:
        for stream in (False, True):
            response = asked(client, prompt, stream=stream)
            assert response.status_code == 200
            assert_same(answered(response), answers[prompt])
        return True

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return sum(pool.map(ask, list(answers) * rounds))
