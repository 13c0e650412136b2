"""Several devices in one process."""

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import time

import jax, numpy as np
from calm_beam.decoding.xla import steps as device_steps
from calm_beam.decoding.branches import sweep_branches
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.decoder import decode_on_devices
from calm_beam.decoding.branches import Request
from calm_beam.exits.rule import ExitRule
from tests.builders import build_checkpoint

devices = jax.local_devices()
assert len(devices) == 2
generator = np.random.default_rng(0)
prompts = [tuple(generator.integers(2, 64, generator.integers(2, 12)).tolist()) for _ in range(13)]
branches = sweep_branches(ExitRule(), (0.6, 0.2), max_decode_length=8)
one = Decoder(build_checkpoint(), branches, devices=devices[:1])
two = Decoder(build_checkpoint(), branches)
expected, found = dict(one.decode(prompts)), dict(two.decode(prompts))
assert sorted(found) == list(range(13))
for index in expected:
    np.testing.assert_array_equal(found[index].tokens, expected[index].tokens)
assert (two.work.tokens, two.work.layer_rows) == (one.work.tokens, one.work.layer_rows)

second = Decoder(build_checkpoint(), branches, devices=devices[1:], engine="xla")
used = set()

def watched(prefill):
    def run(config, parameters, **prompts):
        keys_values, mask = prefill(config, parameters, **prompts)
        used.update(mask.devices())
        return keys_values, mask

    return run

device_steps.admit = watched(device_steps.admit)
found = dict(second.decode(prompts))
assert used == {devices[1]}, used
for index in expected:
    np.testing.assert_array_equal(found[index].tokens, expected[index].tokens)

requests = [Request(prompt) for prompt in prompts]

class Broken:
    def decode(self, requests):
        raise ValueError("no use")

try:
    list(decode_on_devices([Broken(), Broken()], requests))
except ValueError as error:
    assert str(error) == "no use"
else:
    raise AssertionError("the error of a device was lost")

class Slow:
    is_running = False

    def decode(self, requests):
        self.is_running = True
        try:
            for request in requests:
                time.sleep(0.2)
                yield request, None
        finally:
            self.is_running = False

slow = Slow()
try:
    list(decode_on_devices([slow, Broken()], requests))
except ValueError:
    assert not slow.is_running, "a device is still busy when the next call could come"
print("same")
"""


@pytest.mark.timeout(180)
def test_two_devices_give_the_outputs_of_one() -> None:
    """Prompts spread over two devices all come back once with the outputs of one, also from the second device alone.

    A device's error is raised after the others have stopped.
    """
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={**os.environ, "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "same\n", run.stderr
