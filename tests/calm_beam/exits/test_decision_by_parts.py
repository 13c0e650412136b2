"""Decisions of a head whose vocabulary is divided among devices."""

import os
import subprocess
import sys

import pytest

_PROGRAM = r"""
import dataclasses
import functools
import re

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from calm_beam.precision import FLOAT32
from calm_beam.exits.decision import decide, decide_by_logits
from calm_beam.exits.measures import MEASURES
from calm_beam.model.partitioning import PARTS

generator = np.random.default_rng(0)
for vocab_size, vocab_axis in ((4096, 0), (5000, 1), (4097, 1)):
    states = generator.standard_normal((70, 16)).astype(np.float32)
    weights = generator.standard_normal((16, vocab_size)).astype(np.float32)
    # NaN, an infinite logit, and the largest logit in two parts: the first of them counts.
    states[1, 0], states[2] = np.nan, np.inf
    weights[:, 3] *= 3
    weights[:, vocab_size // 2 + 5] = weights[:, 3]
    states[3] = weights[:, 3]
    weights = weights if vocab_axis else weights.T
    # The last one is about logits, not about a summary of them.
    of_all = dataclasses.replace(MEASURES["softmax"], of_summary=None)
    asked = [(decide, MEASURES[name]) for name in (*BY_LOGITS, "state")]
    asked += [(decide_by_logits, measure) for measure in (MEASURES["softmax"], MEASURES["patience"], of_all)]
    for function, measure in asked:
        given = {"vocab_axis": vocab_axis, "measure": measure, "precision": FLOAT32}
        compute = jax.jit(functools.partial(function, **given))
        expected = jax.device_get(compute(states, weights))
        assert expected[0][3] == 3
        for parts in (2, 8):
            mesh = Mesh(np.array(jax.local_devices()[:parts]), (PARTS,))
            own = PartitionSpec(*(None,) * vocab_axis, PARTS) if vocab_size % parts == 0 else PartitionSpec()
            with jax.set_mesh(mesh):
                shared = jax.device_put(weights, NamedSharding(mesh, own))
                text = compute.lower(states, shared).compile().as_text()
                found = jax.device_get(compute(states, shared))
            exchanges = re.findall(r"= .*?\b(all-reduce|all-gather)(?:-start)?\(", text)
            assert len(exchanges) == (vocab_size % parts == 0), (function, measure.name, parts, exchanges)
            np.testing.assert_array_equal(found[0], expected[0])
            np.testing.assert_allclose(found[1], expected[1], atol=2e-6)
            np.testing.assert_array_equal(found[2], expected[2])
print("same")
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_parts_of_the_vocabulary_decide_as_the_whole() -> None:
    """Two and eight devices with parts of the head give the tokens, confidences and finiteness of one device.

    This holds also if the vocabulary cannot be divided evenly, so that each device has all of it. Devices exchange
    numbers once per decision, and not at all if each has the whole head.
    """
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={**os.environ, "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "same\n", run.stderr
