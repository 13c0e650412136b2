"""The choice of the engine that decodes, and near ties: outputs that another engine might have decided differently.

The choice depends only on the request, the model and the processor, never on a clock or free memory. Engines compute
the same function and round differently, which changes an output now and then. So the engine is recorded, outputs of two
engines are never mixed, and serving reports an engine that differs from that of calibration. An output is a near tie
if some decision was within rounding: another engine, or another batch, might have decided differently.
"""

import dataclasses
import functools
import os
import pathlib
import platform as platforms
import subprocess
import sys
from typing import Any

import numpy as np

from calm_beam.errors import UsageError
from calm_beam.exits.head_forms import head_form
from calm_beam.exits.propagations import PassedOn
from calm_beam.exits.rule import ExitRule
from calm_beam.manifest import ENGINES, LOOP, EngineRecord
from calm_beam.model import ModelConfig, architecture_of, native_decoder, parameter_shapes
from calm_beam.model.native import library
from calm_beam.model.native.build import TUNED
from calm_beam.precision import Precision
from calm_beam.storage.free_memory import has_accelerators

from .branches import Branches, NearTies, PromptResult

ENGINE_CHOICES = ("auto", *ENGINES)
"""Values of `--engine`: an engine, or `auto` for native code where the machine has it."""

_CPU_INFO = pathlib.Path("/proc/cpuinfo")
_ASKS_JAX = "import jax; device = jax.local_devices()[0]; print('device', device.platform, device.device_kind)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """The engines that a machine has.

    Attributes:
      platform: JAX's platform: `cpu`, `gpu` or `tpu`.
      kind: JAX's name for the kind of GPU or TPU; empty on a CPU.
      native: Instruction set of its native code; None if it has none.
      lacks: The reason why it has no native code; None if it has.
    """

    platform: str
    kind: str = ""
    native: str | None
    lacks: str | None = None

    @classmethod
    def here(cls) -> "Machine":
        """Returns this machine without initialising JAX, for processes that start workers."""
        return cls._on(*_device_here())

    @classmethod
    def of(cls, device: Any) -> "Machine":
        """Returns the machine of a JAX device."""
        return cls._on(device.platform, device.device_kind)

    @classmethod
    def _on(cls, platform: str, kind: str) -> "Machine":
        lacks = library.why_not_loaded() if platform == "cpu" else f"it is for CPUs, and JAX computes on {platform}"
        return cls(
            platform=platform,
            kind="" if platform == "cpu" else kind,
            native=None if lacks else library.instruction_set(),
            lacks=lacks,
        )

    def xla_instructions(self, devices: int = 1) -> str:
        """Returns the hardware that XLA compiles for, as far as results depend on it.

        For a CPU, that is the platform and the widest vector instructions, since a wider vector adds in another order,
        and matrix units of bfloat16 round differently. Otherwise it is the kind of device, and how many share a model.

        Args:
          devices: Devices that share a model.
        """
        made_for = f"cpu {_vectors()}" if self.platform == "cpu" else f"{self.platform} {self.kind}".rstrip()
        return f"{made_for} x {devices}" if devices > 1 else made_for


def chosen_engine(
    engine: str,
    exit_head: str,
    *,
    config: ModelConfig,
    rule: ExitRule,
    precision: Precision,
    machine: Machine | None,
    model_parallelism: int = 1,
    in_loop: bool = False,
) -> EngineRecord:
    """Returns the engine that decodes.

    Args:
      engine: One of `ENGINE_CHOICES`. `native` and `auto` let native code run the head even where XLA runs the layers;
        `xla` uses no native code at all.
      exit_head: One of `EXIT_HEADS`.
      config: The model's config.
      rule: How exits are decided.
      precision: Precision in which the model computes.
      machine: The machine that decodes. None for machines other than this one, which may have no native code: `auto`
        is then `xla`, and the instructions are unknown.
      model_parallelism: Devices that share one model.
      in_loop: Whether XLA decodes single prompts in a loop on the device. The loop adds up in another order than a
        batch, so it counts as an engine of its own.

    Raises:
      UsageError: If `engine` is `native`, or `exit_head` is `int8`, and native code cannot do it.
      ValueError: If a name is none of these, or as `head_form` raises.
    """
    if engine not in ENGINE_CHOICES:
        raise ValueError(f"engine must be one of {', '.join(ENGINE_CHOICES)}; got {engine!r}.")
    is_unknown = machine is None and engine == "auto"
    if is_unknown:
        engine = "xla"
    lacks = None if machine is None else machine.lacks
    why_not = lacks or architecture_of(config).why_not_native(config)
    why_not = why_not or native_decoder.why_not_for(config, precision, devices=model_parallelism)
    if engine == "native" and why_not:
        raise UsageError(f"engine is native, but native code cannot decode: {why_not}. Take --engine=xla, or auto.")
    form = "exact"
    if not rule.needs_full_model():
        form = head_form(
            exit_head,
            measure=rule.measure(),
            precision=precision,
            size=config.vocab_size * config.emb_dim,
            why_not=_why_no_head(
                engine, machine, config=config, is_unknown=is_unknown, model_parallelism=model_parallelism
            ),
        )
    if engine != "xla" and not why_not and not in_loop:
        native = None if machine is None else machine.native
        return EngineRecord(name="native", instructions=native, head=form, prefill="native")
    instructions = None if machine is None else machine.xla_instructions(model_parallelism)
    if machine is not None and form == "uint8":
        instructions = f"{instructions}, head {machine.native}"
    return EngineRecord(name=LOOP if in_loop else "xla", instructions=instructions, head=form)


def single_prompt_engine(engine: str, exit_head: str, **given: Any) -> EngineRecord:
    """Returns the engine that decodes single prompts: native code if it decodes batches, with the same bits.

    XLA decodes them in its loop.

    Args:
      engine: As in `chosen_engine`.
      exit_head: As in `chosen_engine`.
      **given: The other arguments of `chosen_engine`, which raises the same errors.
    """
    of_batches = chosen_engine(engine, exit_head, **given)
    return of_batches if of_batches.name == "native" else chosen_engine(engine, exit_head, **given, in_loop=True)


def takes_one_call(engine: EngineRecord, rule: ExitRule, config: ModelConfig) -> bool:
    """Returns whether native code takes all steps of a prompt's output in one call.

    It does where it takes whole steps of a batch in one, and the rule is one that it decides by itself.

    Args:
      engine: The engine; XLA never does.
      rule: How exits are decided.
      config: The model's config.
    """
    return (
        engine.name == "native"
        and engine.head == "exact"
        and rule.confidence in library.MEASURES
        and rule.propagation().passed_on in (PassedOn.EXIT_STATE, PassedOn.FIRST_STATE)
        and native_decoder.runs_steps(parameter_shapes(config))
    )


def _why_no_head(
    engine: str, machine: Machine | None, *, config: ModelConfig, is_unknown: bool, model_parallelism: int
) -> str | None:
    """Returns the reason why native code certifies no heads; None if it does."""
    if architecture_of(config).logits_cap(config) is not None:
        return "the model caps its logits, and bounds are of logits as the head makes them"
    if model_parallelism > 1:
        return f"model_parallelism is {model_parallelism}, and it is for a head that one device has whole"
    if is_unknown:
        return "other machines decode, and --engine=native does not say that they have native code"
    if engine == "xla":
        return "engine is xla"
    if machine is None:
        return None
    if machine.native is not None and machine.native not in TUNED:
        return f"native code for {machine.native} has none"
    return machine.lacks


def asked_like(recorded: EngineRecord | None, *, engine: str, exit_head: str, **given: Any) -> dict[str, Any]:
    """Returns `engine` and `exit_head` for `chosen_engine`, to decode by the recorded engine where possible.

    For an engine that only earlier versions had, that is the nearest of this one.

    Args:
      recorded: The engine that a manifest records; None if it records none.
      engine: One of `ENGINE_CHOICES`. Any but `auto` is returned unchanged.
      exit_head: One of `EXIT_HEADS`. Any but `auto` is returned unchanged.
      **given: The other arguments of `chosen_engine`.
    """
    asked = {"engine": engine, "exit_head": exit_head}
    if engine != "auto" or recorded is None:
        return asked
    is_native = recorded.name == "native" or recorded.head == "uint8"
    nearest = recorded.nearest()
    form = {"uint8": "int8"}.get(nearest.head, nearest.head) if exit_head == "auto" else exit_head
    # Other machines decode by native code only if that is requested.
    native = "native" if given["machine"] is None and recorded.name == "native" else "auto"
    alike: dict[str, Any] = {"engine": native if is_native else "xla", "exit_head": form}
    try:
        return asked if chosen_engine(**alike, **given).is_unlike(nearest) else alike
    except ValueError:
        return asked


def check_assigned(found: EngineRecord, assigned: EngineRecord | None) -> None:
    """Checks that a worker decodes by the engine that its run was started for.

    Args:
      found: The engine of this worker.
      assigned: The engine that the run records; None if it records none.

    Raises:
      UsageError: If they differ.
    """
    if assigned is not None and found.is_unlike(assigned):
        raise UsageError(
            f"this worker decodes by {found.in_words()}, but the run was started for {assigned.in_words()}: outputs of "
            "two engines are never mixed. Take workers with the processor of the others, on which calm-beam was "
            "installed with a C compiler (`calm-beam doctor` says whether), or --engine=xla, which needs none."
        )


def slow_precision(precision: Precision, machine: Machine) -> str | None:
    """Returns a warning if a processor has no instructions for the precision's type; else None."""
    if precision.dtype != "bfloat16" or machine.platform != "cpu":
        return None
    if _features() & {"avx512_bf16", "amx_bf16", "bf16"}:
        return None
    return (
        "caution: this processor has no bfloat16 instructions, so --dtype=bfloat16 takes about ten times as long here "
        "as float32."
    )


def _device_here() -> tuple[str, str]:
    """Returns JAX's platform on this machine, and the kind of device.

    If there may be accelerators, another process asks JAX.
    """
    return _asked_device() if has_accelerators() else ("cpu", "")


@functools.cache
def _asked_device() -> tuple[str, str]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASKS_JAX], capture_output=True, text=True, check=True, timeout=300
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(f"JAX cannot say on which devices it computes here ({error}). Set JAX_PLATFORMS.") from error
    # A plugin may print other lines.
    (said,) = (line for line in done.stdout.splitlines() if line.startswith("device "))
    _, platform, kind = said.split(maxsplit=2)
    return platform, kind


def _vectors() -> str:
    """Returns this processor's widest vector instructions that change how XLA adds, by XLA's names."""
    limit = os.environ.get("XLA_FLAGS", "").partition("--xla_cpu_max_isa=")[2].split()
    if limit:
        return limit[0].lower()
    features = _features()
    widest = next((name for name in ("avx512f", "avx2", "avx") if name in features), platforms.machine())
    return f"{widest} amx_bf16" if "amx_bf16" in features else widest


@functools.cache
def _features() -> frozenset[str]:
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split()) for line in lines if line.startswith(("flags", "Features"))), frozenset())


NEARNESS = 1e-5
"""In a near tie, a confidence is this near to a threshold, or to 0 where it is the gap of two probabilities.

Engines and batches move confidences by about 1e-6 (docs/measurements.md).
"""


def near_ties_of(result: PromptResult, branch_rules: Branches, *, thresholds: np.ndarray) -> NearTies | None:
    """Returns for each branch whether its output depended on a near tie, or None where that is not detected.

    A decision is a near tie if a confidence that was compared with its threshold, at the exit layer or below, is within
    `NEARNESS` of it. If the measure is the gap of the two largest probabilities, a token is one if the gap is within
    `NEARNESS` of 0; with other measures, ties of logits are not detected. Returns None alone if no branch detects any.

    Args:
      result: The outputs of a prompt.
      branch_rules: How exits were decided.
      thresholds: float32, shape (steps, branches); +inf in a branch of the full model.
    """
    is_seen = branch_rules.sees_near_ties
    if result.max_rejected_confidence is None or not is_seen.any():
        return None
    at, is_token = thresholds.T, result.exit_layers > 0
    # The last layer compares nothing, no confidence is below a threshold of 0, and none is near +inf.
    near = (np.abs(result.confidences - at) <= NEARNESS) & (result.exit_layers < branch_rules.layers)
    near |= np.abs(result.max_rejected_confidence - at) <= NEARNESS
    near &= is_token & (at > 0)
    near |= branch_rules.is_gap[:, None] & is_token & (result.confidences <= NEARNESS)
    return tuple(told if seen else None for told, seen in zip(near.any(axis=1).tolist(), is_seen.tolist(), strict=True))
