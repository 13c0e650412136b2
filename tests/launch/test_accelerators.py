"""`--accelerator`: its values become hints and service options."""

import argparse
import re

import pytest

from calm_beam.launch.flags.shared_options import parse_accelerator


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("nvidia-l4", "type:nvidia-l4;count:1;machine_type:g2-standard-4;install-nvidia-driver"),
        ("nvidia-tesla-t4", "type:nvidia-tesla-t4;count:1;machine_type:n1-standard-4;install-nvidia-driver"),
        ("nvidia-h100-80gb", "type:nvidia-h100-80gb;count:1;machine_type:a3-highgpu-1g;install-nvidia-driver"),
        ("nvidia-tesla-v100", "type:nvidia-tesla-v100;count:1;install-nvidia-driver"),
        (
            "type:nvidia-l4;count:1;machine_type:g2-standard-16;install-nvidia-driver:535",
            "type:nvidia-l4;count:1;machine_type:g2-standard-16;install-nvidia-driver:535",
        ),
        (
            "type:nvidia-l4; count: 2; machine_type: g2-standard-24; use_nvidia_mps",
            "type:nvidia-l4;count:2;machine_type:g2-standard-24;use_nvidia_mps;install-nvidia-driver",
        ),
        ("type:nvidia-tesla-t4;count:2", "type:nvidia-tesla-t4;count:2;install-nvidia-driver"),
    ],
)
def test_gpus_are_hints(text: str, hint: str) -> None:
    """A GPU is a resource hint, with its number, machine and driver filled in where they were left out."""
    accelerator = parse_accelerator(text)
    assert accelerator.hint() == hint
    assert accelerator.service_option() is None
    assert not accelerator.is_tpu


@pytest.mark.parametrize(
    ("text", "option", "machine"),
    [
        ("tpu-v5-lite-podslice", "type:tpu-v5-lite-podslice;topology:1x1", "ct5lp-hightpu-1t"),
        ("type:tpu-v6e-slice;topology:1x1", "type:tpu-v6e-slice;topology:1x1", "ct6e-standard-1t"),
        (
            "type:tpu-v6e-slice;topology:2x2;machine_type:ct6e-standard-4t",
            "type:tpu-v6e-slice;topology:2x2",
            "ct6e-standard-4t",
        ),
    ],
)
def test_tpus_are_service_options(text: str, option: str, machine: str) -> None:
    """A TPU belongs to all workers: a service option and a machine type, and no hint of a step."""
    accelerator = parse_accelerator(text)
    assert accelerator.service_option() == f"worker_accelerator={option}"
    assert accelerator.machine_type == machine
    assert accelerator.hint() is None
    assert accelerator.is_tpu


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a type such as nvidia-l4 or tpu-v6e-slice, or type:nvidia-l4;"),
        ("l4", "expected a type such as nvidia-l4"),
        ("count:1", "expected a type such as nvidia-l4"),
        ("type:nvidia-l4;cont:1", "expected a type such as nvidia-l4"),
        ("type:nvidia-l4;type:nvidia-l4", "expected a type such as nvidia-l4"),
        ("type:nvidia-l4;", "expected a type such as nvidia-l4"),
        ("type:nvidia-l4;count:0", "expected count:1 for nvidia-l4"),
        ("type:nvidia-l4;count:one", "expected count:1 for nvidia-l4"),
        ("type:nvidia-l4;topology:1x1", "expected count:1 for nvidia-l4"),
        ("type:tpu-v6e-slice;count:1", "expected topology:1x1 for tpu-v6e-slice"),
        ("type:tpu-v6e-slice;topology:1", "expected topology:1x1 for tpu-v6e-slice"),
        ("type:nvidia-l4;count:2", "needs a machine_type too, since the machine decides how many of nvidia-l4"),
        ("type:tpu-v6e-slice;topology:2x2", "needs a machine_type too, since the machine decides how many of tpu-v6e"),
    ],
)
def test_what_is_no_accelerator(text: str, message: str) -> None:
    """A misspelled or incomplete accelerator is refused with its text, since Dataflow would fail only after minutes."""
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(message)) as caught:
        parse_accelerator(text)
    assert repr(text) in str(caught.value)
