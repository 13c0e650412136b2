"""What `--accelerator` names: a GPU for the workers that decode, or a TPU for all of them.

Dataflow places GPUs by right fitting: a resource hint on one step, whose workers form a pool of their own, so that
reading and scoring run on plain machines. TPUs it gives to all workers of a job or to none, by a service option.
"""

import dataclasses
from typing import Any, ClassVar

from calm_beam.options import Options, option
from calm_beam.options.kinds import Kind, ValueRefusedError

# The machine that takes one accelerator and is its smallest. L4, H100 and TPU machines come with their accelerators
# built in, so that the machine type decides how many there are.
_MACHINES = {
    "nvidia-l4": "g2-standard-4",
    "nvidia-tesla-t4": "n1-standard-4",
    "nvidia-h100-80gb": "a3-highgpu-1g",
    "tpu-v5-lite-podslice": "ct5lp-hightpu-1t",
    "tpu-v6e-slice": "ct6e-standard-1t",
}
_DRIVER = "install-nvidia-driver"
_KEYS = ("type", "count", "topology", "machine_type", _DRIVER, "use_nvidia_mps")
# Families of machines that are never without an accelerator.
BUILT_IN_FAMILIES = ("a2-", "a3-", "a4-", "g2-", "ct5", "ct6")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
    """An accelerator of Dataflow workers, with the machine that carries it.

    Attributes:
      type: Dataflow's name, such as `nvidia-l4` or `tpu-v6e-slice`.
      amount: Number of GPUs such as `1`, or topology of a TPU such as `1x1`.
      machine_type: Compute Engine's name of the machine; None leaves the choice to Dataflow.
      options: Further parts, such as `install-nvidia-driver`.
    """

    type: str
    amount: str
    machine_type: str | None
    options: tuple[str, ...]

    @property
    def is_tpu(self) -> bool:
        """Whether this is a TPU, which every worker of a job must then have."""
        return self.type.startswith("tpu-")

    def hint(self) -> str | None:
        """Returns the resource hint of the step that decodes; None for TPUs, which are no matter of hints."""
        if self.is_tpu:
            return None
        machine = () if self.machine_type is None else (f"machine_type:{self.machine_type}",)
        return ";".join((f"type:{self.type}", f"count:{self.amount}", *machine, *self.options))

    def service_option(self) -> str | None:
        """Returns the service option that gives all workers a TPU; None for GPUs."""
        return f"worker_accelerator=type:{self.type};topology:{self.amount}" if self.is_tpu else None


def parse_accelerator(text: str) -> Accelerator:
    """Returns the accelerator that a flag names, with what it leaves open filled in.

    Left out, the number is 1, the topology 1x1, the machine the smallest known one, and the driver is installed.

    Args:
      text: A type alone, or Dataflow's notation: `type:nvidia-l4;count:1;install-nvidia-driver`.

    Raises:
      ValueRefusedError: If it is no such notation; whoever knows names the flag.

    Source: Dataflow's documentation of right fitting, of GPUs and of TPUs.

    >>> parse_accelerator("nvidia-l4").hint()
    'type:nvidia-l4;count:1;machine_type:g2-standard-4;install-nvidia-driver'
    >>> parse_accelerator("tpu-v6e-slice").service_option()
    'worker_accelerator=type:tpu-v6e-slice;topology:1x1'
    """
    parts = [part.strip() for part in (text if ":" in text else f"type:{text}").split(";")]
    values = {key: value.strip() for key, _, value in (part.partition(":") for part in parts)}
    unknown = [key for key in values if key not in _KEYS]
    if unknown or len(values) < len(parts) or not values.get("type", "").startswith(("nvidia-", "tpu-")):
        raise ValueRefusedError(
            f"expected a type such as nvidia-l4 or tpu-v6e-slice, or type:nvidia-l4;count:1;install-nvidia-driver, "
            f"got {text!r}"
        )
    kind = values["type"]
    is_tpu = kind.startswith("tpu-")
    amount = _amount(text, values, is_tpu=is_tpu)
    machine = values.get("machine_type")
    if machine is None and amount in ("1", "1x1"):
        machine = _MACHINES.get(kind)
    if machine is None and _MACHINES.get(kind, "").startswith(BUILT_IN_FAMILIES):
        raise ValueRefusedError(
            f"{text!r} needs a machine_type too, since the machine decides how many of {kind} there are"
        )
    options = tuple(part for part in parts if part.partition(":")[0] in (_DRIVER, "use_nvidia_mps"))
    if not is_tpu and _DRIVER not in values:
        options = (*options, _DRIVER)
    return Accelerator(type=kind, amount=amount, machine_type=machine, options=options)


def _amount(text: str, values: dict[str, str], *, is_tpu: bool) -> str:
    """Returns the number of GPUs, or the topology of a TPU."""
    ours, theirs, example = ("topology", "count", "1x1") if is_tpu else ("count", "topology", "1")
    numbers = values.get(ours, example).split("x" if is_tpu else None)
    if theirs in values or (is_tpu and len(numbers) < 2):
        numbers = []
    if not numbers or not all(number.isascii() and number.isdecimal() and int(number) for number in numbers):
        raise ValueRefusedError(f"expected {ours}:{example} for {values['type']}, got {text!r}")
    return values.get(ours, example)


def _take_accelerator(value: Any) -> Accelerator:
    return value if isinstance(value, Accelerator) else parse_accelerator(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(Options):
    """What is ours to say about a job on Dataflow; all else is Beam's."""

    SECTION: ClassVar[str | None] = "Dataflow"

    accelerator: Accelerator | str | None = option(
        None,
        "for the workers that decode: nvidia-l4, nvidia-tesla-t4, nvidia-h100-80gb, tpu-v5-lite-podslice, "
        "tpu-v6e-slice, or Dataflow's notation, such as 'type:nvidia-l4;count:1;install-nvidia-driver'",
        kind=Kind(parse_accelerator, _take_accelerator, name="an accelerator"),
    )

    @property
    def device(self) -> Accelerator | None:
        """The accelerator that was named."""
        return None if self.accelerator is None else _take_accelerator(self.accelerator)
