"""Options that several commands share: accelerators, metrics, data files, the manifest and its entry, the model.

`--accelerator` names a GPU for the workers that decode, or a TPU for all workers. Dataflow places GPUs by right
fitting: a resource hint on one step, whose workers form a separate pool, so that reading and scoring run on plain
machines. It gives TPUs to all workers of a job or to none, by a service option.

Whether the metrics that flags name can score is checked before work starts. The files that data flags name are
found here, with how they are read; so is the manifest that `--manifest` names, and one of its entries. Options of a
model say what its arrays do not show.
"""

import dataclasses
import os
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from calm_beam.inputs import AS_USUAL, DataFiles, NoFilesError, Reading
from calm_beam.manifest import (
    MANIFEST,
    PROMISE,
    Calibration,
    DecodeRecord,
    EntryChoice,
    EntryChoiceError,
    Manifest,
    ManifestError,
    SettingManifest,
)
from calm_beam.metrics import MetricSettings
from calm_beam.metrics.registry import BLEURT, METRICS, checked_score, full_name, get_metric, take_clipped
from calm_beam.options import Options, option
from calm_beam.options.groups import DataSource, Entry, ModelFacts, RecordedPrecision
from calm_beam.options.kinds import Kind, ValueRefusedError
from calm_beam.risk.monitor import WatchedPromise
from calm_beam.serving.watched import Watched
from calm_beam.storage import (
    absolute,
    check_writable,
    exists,
    is_cloud_path,
    is_file,
    is_folder,
    joined,
    parent,
    why_no_file,
)
from calm_beam.text import printable_line

from . import UsageError, naming

if TYPE_CHECKING:
    from calm_beam.checkpoints import Declared


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
        """Returns the resource hint of the step that decodes; None for TPUs, which are requested per job."""
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
      ValueRefusedError: If the text is not in this notation; the caller adds the flag's name.

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
    """Our option for jobs on Dataflow; all others are Beam's."""

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


METRIC_NAMES = f"{', '.join(METRICS)}, {BLEURT}, or module:function for your own"


GUARANTEE = "guarantee (lists are comma-separated; every combination is one manifest entry)"
"""Heading of what is to be promised."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricFiles(Options):
    """Files and settings of metrics."""

    SECTION: ClassVar[str | None] = GUARANTEE

    bleurt_checkpoint: str | None = option(
        None,
        "folder of a published BLEURT checkpoint, for the metric bleurt; may be gs://",
        belongs_to=("metric=bleurt",),
    )


def metric_settings(request: MetricFiles) -> MetricSettings:
    """Returns what a request says of the files of metrics, as workers have to name it.

    Raises:
      UsageError: If a path is on another object store than Google's.
    """
    checkpoint = request.bleurt_checkpoint
    with naming("--bleurt_checkpoint"):
        return MetricSettings(bleurt_checkpoint=None if checkpoint is None else absolute(checkpoint))


def checked_metrics(names: Sequence[str], settings: MetricSettings) -> tuple[str, ...]:
    """Returns the full names of metrics, each of which was tried on one pair of texts.

    A metric that fails is found before hours of decoding.

    Raises:
      ValueError: If a metric is unknown or unavailable, or gives a score outside [0, 1].
    """
    # Nothing else that a metric needs is a file of the flags.
    with naming("--bleurt_checkpoint"):
        full_names = tuple(full_name(name, settings) for name in names)
    for name in full_names:
        metric = get_metric(name, settings)
        # Different texts: of equal ones some say 1 without any of what they need.
        checked_score(
            metric, name, candidate="a text", references=("another text",), example_id="of the trial before the run"
        )
        # That was no score of the run.
        take_clipped(metric)
    return full_names


def declared(facts: ModelFacts) -> "Declared":
    """Returns what the user says of the model."""
    # Here, since it needs JAX.
    from calm_beam.checkpoints import Declared

    return Declared(activation=facts.activation, relative_max_distance=facts.relative_max_distance)


def find_files(flag: str, patterns: Sequence[str], *, reading: Reading = AS_USUAL) -> DataFiles:
    """Returns the files that a flag names.

    Args:
      flag: The flag, for messages.
      patterns: Paths or globs, local or on Cloud Storage, or names of SeqIO data.
      reading: How they will be read.

    Raises:
      UsageError: If a pattern matches no file, and none is passed over silently; if Cloud Storage cannot be listed,
        a file has no format, or one without the fields that are named.
      ValueError: If packages that they need are missing, or a SeqIO task.
    """
    with naming(flag):
        try:
            return DataFiles.found(patterns, reading=reading)
        except NoFilesError as error:
            raise UsageError(f"{flag} {error}") from error


def find_data(source: DataSource) -> DataFiles:
    """Returns the files that a request names; raises as `find_files`."""
    return find_files("--data", source.patterns or (), reading=source.reading())


def find_folder(path: str | os.PathLike[str]) -> str:
    """Returns the directory of `--output`, absolute, since workers have folders of their own; it need not exist.

    Raises:
      UsageError: If it is a file, or Cloud Storage does not say.
    """
    with naming("--output"):
        output = absolute(os.fspath(path))
        if is_file(output):
            raise UsageError(f"--output {output}: is a file, expected a directory.")
    return output


def check_parent(flag: str, path: str) -> None:
    """Refuses the path of a file whose folder is not there.

    Args:
      flag: What names it, for messages.
      path: Local or on Cloud Storage, where nothing needs a folder.

    Raises:
      UsageError: If it is not.
    """
    if not is_cloud_path(path) and not is_folder(parent(path)):
        raise UsageError(f"{flag} {path}: the folder {parent(path)} does not exist.")


def find_output(path: str | None, *, overwrite: bool) -> str:
    """Returns the path of `--output`, a JSONL file that can be written.

    Raises:
      UsageError: If there is none, it is there already and may not be replaced, or it cannot be written.
    """
    if path is None:
        raise UsageError("--output is missing: the JSONL file to write.")
    with naming("--output"):
        if is_folder(path):
            raise UsageError(f"--output {path}: is a directory, expected a file such as {path}/outputs.jsonl.")
        check_parent("--output", path)
        if exists(path) and not overwrite:
            raise UsageError(f"--output {path}: exists already. Choose another file, or pass --overwrite.")
        check_writable(path)
    return path


def find_manifest(name: str) -> str:
    """Returns the path of a manifest, given it or the calibration directory that holds it.

    Raises:
      UsageError: If there is none, or Cloud Storage does not say.
    """
    with naming("--manifest"):
        path = joined(name, MANIFEST) if is_folder(name) else name
        if not is_file(path):
            raise UsageError(f"--manifest {path}: {why_no_file(path)}")
    return path


def entry_choice(request: Entry, manifest: Manifest | SettingManifest) -> EntryChoice:
    """Returns which entry of a manifest a request names.

    Raises:
      UsageError: If it names what no entry of its kind has.
    """
    choice = EntryChoice.named_by(request)
    try:
        choice.check_for(manifest.KIND, sign="--")
    except ManifestError as error:
        raise UsageError(str(error)) from error
    return choice


def one_entry(request: Entry, manifest: Manifest) -> EntryChoice:
    """Returns which one entry of a manifest a request names.

    Raises:
      UsageError: If it names none, or several: then the message has the flags of each, a line for each.
    """
    choice = entry_choice(request, manifest)
    try:
        manifest.calibration(choice)
    except EntryChoiceError as error:
        # The manifest is sound; what was asked for is not in it.
        flags = [_flags_of(entry, among=error.entries) for entry in error.entries]
        if len(set(flags)) < len(flags):
            raise UsageError(str(error)) from error
        listed = "".join(f"\n  {line}" for line in flags)
        raise UsageError(f"{error.reason}:{listed}") from error
    except ManifestError as error:
        raise UsageError(str(error)) from error
    return choice


def _flags_of(entry: Any, *, among: Sequence[Any]) -> str:
    """Returns the flags that distinguish an entry from others, as few as do; all where there are no others."""
    telling: list[str] = []
    for name in PROMISE:
        kinds, more = (
            {tuple(getattr(each, one) for one in names) for each in among} for names in (telling, [*telling, name])
        )
        if len(more) > len(kinds):
            telling.append(name)
    # Consistencies have losses of their own: then the first of the two is enough.
    return " ".join(
        f"--{name}={shlex.quote(str(getattr(entry, name)))}" for name in telling or PROMISE if getattr(entry, name)
    )


def watched_entry(manifest: Manifest, entry: Calibration) -> Watched:
    """Returns what losses of an entry's answers are held against, with the words for it."""
    return Watched(
        promise=WatchedPromise.of(manifest, entry),
        tail=entry.objective.tail,
        words=entry_in_words(entry),
        remedy="Serve the full model (calm-beam serve --full_model), and calibrate again.",
    )


def check_precision(request: RecordedPrecision, decode: DecodeRecord) -> None:
    """Refuses another precision than the manifest's.

    Raises:
      UsageError: If one is asked for.
    """
    recorded = {"dtype": decode.dtype, "matmul_precision": decode.matmul_precision or "highest"}
    for name, calibrated in recorded.items():
        asked = getattr(request, name)
        if asked not in (None, calibrated):
            raise UsageError(
                f"--{name}={asked}: the manifest was calibrated with {calibrated}, and its thresholds hold for no "
                f"other. Leave --{name} out, or calibrate with {asked}."
            )


def entry_in_words(entry: Calibration) -> str:
    """Returns what an entry is about, and its threshold."""
    threshold = "never exit" if entry.threshold is None else f"threshold {entry.threshold:g}"
    if entry.variant is not None:
        threshold += f", {entry.variant.in_words()}"
    group = "" if entry.group is None else f"group {printable_line(entry.group)}: "
    return f"{group}{entry.promise_in_words()} ({threshold})"
