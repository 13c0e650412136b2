"""Flags: ours next to Beam's, with every unknown one refused."""

import argparse
import contextlib
import difflib
import importlib
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from calm_beam.arithmetic import DTYPES, MATMUL_PRECISIONS, Arithmetic
from calm_beam.errors import UsageError, os_error_in_words
from calm_beam.evaluation.device_forecast import DEVICES
from calm_beam.exits.head_forms import EXIT_HEADS, GONE
from calm_beam.exits.measures import MEASURES, is_measure_name
from calm_beam.exits.propagations import PROPAGATIONS
from calm_beam.exits.rule import TOKEN_SOURCES
from calm_beam.exits.schedules import SCHEDULES
from calm_beam.inputs.seqio_names import seqio_name
from calm_beam.manifest import ENGINES, ManifestError
from calm_beam.model.input_length import USUAL_INPUT_LENGTH
from calm_beam.text.written_numbers import written_float, written_int

from .help_pages import HelpFormatter, ShowAll, help_page, summary
from .model import add_model_flags
from .partners import Partners

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions


# Shares of letters that two names have in common.
_ALIKE = 0.6
_MUCH_MORE_ALIKE = 0.15
# With its dashes; shorter ones begin too many names.
_LEAST_ABBREVIATION = 5


class HelpShown(SystemExit):
    """`--help` was asked for and shown; nothing else may end the process with success before its work is done."""


@contextlib.contextmanager
def naming(flag: str) -> Iterator[None]:
    """Turns what goes wrong with a file, while the value of a flag is checked, into a `UsageError` that names it."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{flag} {os_error_in_words(error)}") from error


@contextlib.contextmanager
def as_usage(kinds: type[Exception] | tuple[type[Exception], ...] = ValueError) -> Iterator[None]:
    """Turns what goes wrong while flags and what they name are checked into a `UsageError`.

    Args:
      kinds: What is turned. A manifest that cannot be trusted never is: that is a failure.
    """
    try:
        yield
    except (UsageError, ManifestError):
        raise
    except kinds as error:
        raise UsageError(str(error)) from error


class FlagParser(argparse.ArgumentParser):
    """An argument parser that raises `UsageError` instead of ending the process, and takes no abbreviations.

    A flag that is given must have a value, unless no text at all is what it has by default: an empty path would be the
    current folder, and an empty name that of nothing. Scripts whose variables are not set write such flags.
    """

    def __init__(
        self,
        *,
        doc: str | None = None,
        essentials: Collection[str] | None = None,
        heading: str = "flags",
        add_help: bool = True,
        **kwargs: Any,
    ) -> None:
        """Takes what `argparse.ArgumentParser` does, and more.

        Args:
          doc: Docstring of the command: says what it does, and holds examples.
          essentials: Flags that `--help` lists, besides those that must be given; None for all. `--help-all` lists
            every flag.
          heading: Of the flags that are in no group.
          add_help: Whether there are `--help` and `--help-all`.
          kwargs: As there.
        """
        super().__init__(
            allow_abbrev=False, conflict_handler="resolve", formatter_class=HelpFormatter, add_help=False, **kwargs
        )
        # Whatever flag asks for a number: Python's own functions read more than anybody means.
        self.register("type", float, written_float)
        self.register("type", int, written_int)
        self._doc, self._essentials = doc or "", essentials
        self.pairs: list[Partners] = []
        self.description = self.description or summary(self._doc)
        self._optionals.title = heading
        if add_help:
            self.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
            self.add_argument("--help-all", action=ShowAll, help=argparse.SUPPRESS)

    def format_help(self) -> str:
        """Returns what `--help` prints."""
        return help_page(self, doc=self._doc, shown=self._essentials)

    def format_help_all(self) -> str:
        """Returns what `--help-all` prints."""
        return help_page(self, doc=self._doc, shown=None)

    # The base class has overloads for namespaces of one's own, of which there are none here.
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:  # type: ignore[override]
        """Returns flags and unknown arguments; raises `UsageError` for an empty value, or a flag without partner."""
        flags, unknown = super().parse_known_args(args, namespace)
        for action in self._actions:
            value = getattr(flags, action.dest, None)
            if isinstance(value, str) and not value.strip() and action.default != "":
                name = next(iter(action.option_strings), action.metavar or action.dest)
                self.error(f"{name} is empty; leave it out, or give it a value")
        for pair in self.pairs:
            if pair.is_alone(flags, actions=self._option_string_actions):
                self.error(pair.in_words())
        return flags, unknown

    def only_with(self, flag: str, *partners: str) -> None:
        """Refuses a flag that is given without any of these, each `--flag`, or `--flag=value` if only that will do."""
        self.pairs.append(Partners(flag=flag, partners=partners))

    def error(self, message: str) -> NoReturn:
        """Raises `UsageError`."""
        raise UsageError(f"{message}. See {self.prog} --help.")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Raises `HelpShown`: only `--help` ends here, since errors do not."""
        raise HelpShown(status)

    def add_value_provider_argument(self, *args: Any, **kwargs: Any) -> None:
        """Adds a flag; part of the interface by which Beam's option classes declare theirs."""
        self.add_argument(*args, **kwargs)


def parse_own_flags(parser: FlagParser, argv: Sequence[str]) -> argparse.Namespace:
    """Returns the flags of a command that runs without Beam.

    Raises:
      UsageError: If a flag is unknown; names the nearest that is known.
    """
    flags, unknown = parser.parse_known_args(list(argv))
    _refuse_unknown(unknown, parser)
    _take_seqio_task(flags)
    return flags


def parse_flags(parser: FlagParser, argv: Sequence[str]) -> "tuple[argparse.Namespace, PipelineOptions]":
    """Returns our flags and Beam's.

    Args:
      parser: Knows our flags.
      argv: All flags, mixed freely.

    Raises:
      UsageError: If a flag is known to neither; names the nearest that is. Beam alone would log it and go on.
    """
    ours, rest = parser.parse_known_args(list(argv))
    # Here, since importing Beam takes seconds, and help and what is wrong with our own flags need none of it.
    from apache_beam.options.pipeline_options import PipelineOptions

    _declare_dask_flags(rest)
    beam_parser = FlagParser(prog=parser.prog, add_help=False)
    for options_class in _all_subclasses(PipelineOptions):
        if "_add_argparse_args" in vars(options_class):
            vars(options_class)["_add_argparse_args"].__get__(None, options_class)(beam_parser)
    _, unknown = beam_parser.parse_known_args(rest)
    _refuse_unknown(unknown, parser, beams=beam_parser._option_string_actions)
    _take_seqio_task(ours)
    return ours, PipelineOptions(rest)


def _declare_dask_flags(flags: Sequence[str]) -> None:
    """Makes Beam's flags for Dask known if one is used: the module that has them can only be imported with dask."""
    if any(flag.startswith("--dask_") for flag in flags):
        try:
            importlib.import_module("apache_beam.runners.dask.dask_runner")
        except (ImportError, AttributeError) as error:
            # Without dask, an annotation in that module is an AttributeError.
            raise UsageError("flags of Dask need it: pip install 'calm-beam[dask]'.") from error


def _refuse_unknown(unknown: Sequence[str], parser: FlagParser, *, beams: Iterable[str] = ()) -> None:
    if unknown:
        flag = unknown[0].split("=")[0]
        nearest = _nearest(flag, ours=parser._option_string_actions, beams=beams)
        hint = f" Did you mean {nearest}?" if nearest else ""
        kind = "flag" if flag.startswith("-") else "argument"
        raise UsageError(f"unknown {kind} {flag}.{hint} See {parser.prog} --help.")


def _nearest(flag: str, *, ours: Iterable[str], beams: Iterable[str]) -> str | None:
    """Returns the flag that was probably meant: one of ours unless one of Beam's is much more like it, or None.

    Whoever abbreviates one of ours means that one.
    """
    meant = [name for name in ours if name.startswith(flag) and len(flag) >= _LEAST_ABBREVIATION]
    if meant:
        return max(meant, key=lambda name: _likeness(flag, name))
    best_of_ours, best_of_beams = (
        max(((_likeness(flag, name), name) for name in names), default=(0.0, "")) for names in (ours, beams)
    )
    best = best_of_ours if best_of_ours[0] >= _ALIKE else best_of_beams
    if best_of_beams[0] > best[0] + _MUCH_MORE_ALIKE:
        best = best_of_beams
    return best[1] if best[0] >= _ALIKE else None


def _likeness(flag: str, name: str) -> float:
    """Returns how alike two flags are, from 0 to 1, the dashes before them apart."""
    return difflib.SequenceMatcher(None, flag.lstrip("-"), name.lstrip("-")).ratio()


def _all_subclasses(cls: type) -> list[type]:
    direct: list[type] = cls.__subclasses__()
    return [*direct, *(below for subclass in direct for below in _all_subclasses(subclass))]


def texts(value: str) -> tuple[str, ...]:
    """Returns the parts of a comma-separated list; an empty part is refused."""
    parts = tuple(part.strip() for part in value.split(","))
    if not all(parts):
        raise argparse.ArgumentTypeError(f"expected values separated by commas, got {value!r}")
    return parts


def paths(value: str) -> tuple[str, ...]:
    """Returns the parts of a comma-separated list of paths; what is there under a name with commas is one part."""
    return (value,) if os.path.exists(value) else texts(value)


def numbers(value: str) -> tuple[float, ...]:
    """Returns the numbers of a comma-separated list."""
    try:
        return tuple(written_float(part) for part in texts(value))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected numbers separated by commas, got {value!r}") from error


def share(value: str) -> float:
    """Returns a share between 0 and 1, given as such or in per cent."""
    number, percent = value.removesuffix("%"), value.endswith("%")
    try:
        found = written_float(number) / (100 if percent else 1)
    except ValueError:
        found = math.nan
    if not 0 < found < 1:
        raise argparse.ArgumentTypeError(f"expected a share above 0 and below 1, such as 2% or 0.02, got {value!r:.40}")
    return found


def whole_number(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """Returns a parser of integers from `low` to `high`."""

    def parse(value: str) -> int:
        try:
            number = written_int(value)
        except ValueError:
            number = low - 1
        if number < low:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {low}, got {value!r:.40}")
        if number > high:
            raise argparse.ArgumentTypeError(f"expected a whole number of at most {high}, got {value:.40}")
        return number

    return parse


def whole_numbers(low: int) -> Callable[[str], tuple[int, ...]]:
    """Returns a parser of comma-separated integers of at least `low`."""
    parse = whole_number(low)
    return lambda value: tuple(map(parse, texts(value)))


def utf8_text(value: str) -> str:
    """Returns a text that stands in files, which cannot hold what the shell gives of bytes that are not UTF-8."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"expected text that UTF-8 can hold, got {value!a:.80}") from error
    return value


def pattern(value: str) -> re.Pattern[str]:
    """Returns a regular expression."""
    try:
        return re.compile(value)
    except (re.error, OverflowError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression, got {value!r}: {error}") from error


def add_decode_flags(parser: FlagParser, *, default_grid_step: float | None) -> None:
    """Adds the flags that say what to decode, and how, as a pipeline.

    Args:
      parser: Where to.
      default_grid_step: Grid without `--thresholds`; None makes one of the two flags required.
    """
    add_task_flags(parser)
    add_exit_flags(parser, default_grid_step=default_grid_step)
    run = parser.add_argument_group("run (Beam's own flags, such as --runner, may be added)")
    run.add_argument(
        "--on_error",
        choices=("fail", "worst_case"),
        default="fail",
        help="for examples that fail, also when tried again alone: end the run, or count loss 1 at every threshold",
    )
    run.add_argument(
        "--max_failures",
        type=whole_number(0),
        help="with --on_error=worst_case, end the run if more examples fail; default: 1 %% of them, at least 10",
    )
    parser.only_with("--max_failures", "--on_error=worst_case")
    add_worker_flags(run)
    run.add_argument("--overwrite", action="store_true", help="replace an earlier result")


def add_worker_flags(group: argparse._ActionsContainer) -> None:
    """Adds the flags that say how decoding is spread over workers, which moves no output."""
    group.add_argument(
        "--num_shards",
        type=whole_number(1),
        help="parts of the data, decoded independently: several per worker; default: by the size of the data, at least "
        "4, of a thousand examples each; with --resume, as begun",
    )
    group.add_argument(
        "--model_copies",
        type=whole_number(1),
        default=1,
        help="most copies of the model in one worker process; its threads take turns",
    )


def add_chat_flags(group: argparse._ActionsContainer) -> None:
    """Adds the flags that make chats of inputs."""
    group.add_argument(
        "--chat_template",
        metavar="model|none|FILE",
        help="make a chat of every input: model for the template beside its tokenizer.json, or a file with a Jinja "
        "template; none: inputs are prompts as they are. Needed where the model has a template",
    )
    group.add_argument(
        "--system", type=utf8_text, help="what every chat begins with, before the input; needs --chat_template"
    )


def add_task_flags(parser: FlagParser) -> None:
    """Adds the flags that name model and data, and how much of them is decoded at a time."""
    task = parser.add_argument_group("model and data")
    task.add_argument(
        "--checkpoint",
        help="model folder: native, Hugging Face, T5X or Orbax (checkpoint_<step>, or the folder of them); without "
        "model and data, calibrate and evaluate use embedded ones",
    )
    task.add_argument("--vocabulary", help="SentencePiece model or tokenizer.json; default: beside the checkpoint")
    task.add_argument(
        "--extra_ids",
        type=whole_number(0),
        help="sentinels <extra_id_0>... to add; default: as many as tokenizer files beside the vocabulary name, or 0",
    )
    add_chat_flags(task)
    add_model_flags(task)
    # Without a model, that of the demo is taken, or that of generations.
    for flag in ("--vocabulary", "--extra_ids", "--chat_template", "--activation", "--relative_max_distance"):
        parser.only_with(flag, "--checkpoint", "--generations")
    add_data_flags(task)
    task.add_argument("--task_prefix", type=utf8_text, default="", help="put before every input")
    task.add_argument(
        "--max_input_length",
        type=whole_number(1),
        help=f"in tokens, eos included; default: {USUAL_INPUT_LENGTH}, or what the model has room for beside an output",
    )
    task.add_argument("--on_long", choices=("truncate", "error"), default="truncate", help="for longer inputs")
    task.add_argument("--max_decode_length", type=whole_number(1), default=64, help="in tokens, eos included")
    task.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="type of weights, states, keys and values; sums, norms, logits and confidences are float32 in any case",
    )
    task.add_argument(
        "--matmul_precision",
        choices=MATMUL_PRECISIONS,
        default="highest",
        help="of products of float32 numbers, on GPUs and TPUs: highest (float32), high or default (TF32, or passes in "
        "bfloat16)",
    )
    add_memory_flags(task)
    add_exit_head_flag(task)


def add_data_flags(group: argparse._ActionsContainer, *, kind: str = "data", split: str = "validation") -> None:
    """Adds the flags that say which data are read, and how.

    Args:
      group: Where to.
      kind: What the data are, in the help of the flags.
      split: The split of a SeqIO task that is read unless another is named.
    """
    group.add_argument("--data", type=paths, help=f"files with the {kind}: globs, comma-separated")
    group.add_argument(
        "--data_format",
        choices=("jsonl", "text", "parquet", "tfrecord", "seqio"),
        help="format of the data; default: by suffix (.jsonl, .txt, .tfrecord, each also with .gz; .parquet)",
    )
    group.add_argument(
        "--inputs_field", help="field of a row with the prompt; default: input, in TFRecord and SeqIO inputs"
    )
    group.add_argument(
        "--targets_field", help="field of a row with the references; default: references, in TFRecord and SeqIO targets"
    )
    group.add_argument("--seqio_task", help="SeqIO task to read instead of --data")
    group.add_argument("--seqio_split", help=f"its split; default: {split}")
    group.add_argument(
        "--seqio_module", type=texts, help="modules that register the task, comma-separated; importable on workers too"
    )
    group.set_defaults(default_seqio_split=split)


def _take_seqio_task(flags: argparse.Namespace) -> None:
    """Sets `data` to what the flags of SeqIO name; all that follows sees it as a file.

    Raises:
      UsageError: If data are named in two ways, or a flag does not go with the format.
    """
    if not hasattr(flags, "seqio_task"):
        return
    if flags.seqio_task is None:
        for name in ("seqio_split", "seqio_module"):
            if getattr(flags, name) is not None:
                raise UsageError(f"--{name} belongs to --seqio_task, which is missing.")
        if flags.data_format == "seqio":
            raise UsageError("--data_format=seqio needs --seqio_task, the name of the task.")
        _refuse_fields_without_data(flags)
        return
    if flags.data is not None:
        raise UsageError(f"--seqio_task={flags.seqio_task} and --data both name the data: leave one of them out.")
    if flags.data_format not in (None, "seqio"):
        raise UsageError(f"--seqio_task is read as seqio, not --data_format={flags.data_format}: leave that out.")
    flags.data = (seqio_name(flags.seqio_task, flags.seqio_split or flags.default_seqio_split),)


def _refuse_fields_without_data(flags: argparse.Namespace) -> None:
    """Refuses what says how to read data where none are named: those of the demo are read as they are."""
    for name in ("data_format", "inputs_field", "targets_field"):
        if flags.data is None and getattr(flags, name) is not None:
            raise UsageError(f"--{name} belongs to --data, which is missing.")


def refuse_decoding_flags(
    argv: Sequence[str], generations: str, *, allowed: Collection[str], also: Collection[str] = ()
) -> None:
    """Refuses what would decide how to decode, where nothing is decoded.

    Args:
      argv: All flags.
      generations: What `--generations` names.
      allowed: Those of `add_decode_flags` that mean something for stored generations too.
      also: Others that do not.

    Raises:
      UsageError: If one is there; names it.
    """
    decoding = FlagParser(prog="", add_help=False)
    add_decode_flags(decoding, default_grid_step=None)
    refused = {*decoding._option_string_actions, *also} - {*allowed}
    given = next((name for arg in argv if (name := arg.split("=")[0]) in refused), None)
    if given is not None:
        raise UsageError(
            f"{given} decides what is decoded, and --generations={generations} is decoded already: leave one out."
        )


def confidence(text: str) -> str:
    """Returns the name of a confidence measure, which it must be; a type of flags."""
    if not is_measure_name(text):
        raise argparse.ArgumentTypeError(
            f"invalid choice: {text!r} (choose from {', '.join(map(repr, MEASURES))}, or module:function of your own)"
        )
    return text


def confidences(text: str) -> tuple[str, ...]:
    """Returns the names of the confidence measures of a comma-separated list; a type of flags."""
    return tuple(map(confidence, texts(text)))


def measures_in_words() -> str:
    """Returns what the help says of every measure."""
    ours = "; ".join(f"{measure.name} ({measure.meaning})" for measure in MEASURES.values())
    return f"{ours}; or module:function of your own, of (logits) or of (state, below)"


def add_device_flag(group: argparse._ActionsContainer) -> None:
    """Adds the flag that names an accelerator whose times are forecast."""
    group.add_argument(
        "--device",
        choices=tuple(DEVICES),
        help="accelerator for which the least time of a step is forecast from bytes and operations, by exit layer and "
        "measure; nothing is run there",
    )


def arithmetic_of(flags: argparse.Namespace) -> Arithmetic:
    """Returns in which numbers the model is to compute.

    Raises:
      ValueError: If the flags do not go together.
    """
    return Arithmetic(dtype=flags.dtype, matmul_precision=flags.matmul_precision)


def add_exit_head_flag(group: argparse._ActionsContainer) -> None:
    """Adds the flags that say what decodes, and in which form the output head decides."""
    group.add_argument(
        "--engine",
        choices=("auto", *ENGINES),
        default="auto",
        help="what decodes: native (compiled C, for CPUs), xla, or auto: native where this installation has it for the "
        "processor (never on other machines than this), else xla; it is recorded, and two are never mixed (default: "
        "%(default)s)",
    )
    group.add_argument(
        "--exit_head",
        type=_exit_head,
        choices=EXIT_HEADS,
        default="auto",
        help="form of the output head that decides exits: exact; int8, certified by native code, with the exact one "
        "where it leaves something open; auto takes int8 for large heads with native code, else exact (default: "
        "%(default)s)",
    )


def _exit_head(text: str) -> str:
    """Returns what was given; what earlier versions took is refused with a sentence of its own."""
    if text in GONE:
        raise argparse.ArgumentTypeError(GONE[text])
    return text


def add_memory_flags(group: argparse._ActionsContainer) -> None:
    """Adds the flags that say how much is decoded at a time, which moves no output."""
    group.add_argument(
        "--batch_size", type=whole_number(1), help="most prompts decoded together; default: by the memory that is free"
    )
    group.add_argument(
        "--token_budget",
        type=whole_number(1),
        help="most positions held at a time, of prompts and of outputs; default: by the memory that is free",
    )
    add_parallelism_flag(group)


def add_parallelism_flag(group: argparse._ActionsContainer) -> None:
    """Adds the flag that says how many devices share one model."""
    group.add_argument(
        "--model_parallelism",
        type=whole_number(1),
        default=1,
        metavar="N",
        help="devices that share one model, each with a part of it, for models larger than one device; copies are on a "
        "worker's other devices (default: 1)",
    )


def add_exit_flags(parser: FlagParser, *, default_grid_step: float | None) -> None:
    """Adds the flags that say how tokens exit; `default_grid_step` is that of `add_decode_flags`."""
    exits = parser.add_argument_group("exits")
    exits.add_argument(
        "--confidence", type=confidence, default="softmax", help=f"confidence measure: {measures_in_words()}"
    )
    exits.add_argument(
        "--patience",
        type=whole_number(1),
        help="with --confidence=patience: how many layers have to agree at threshold 1",
    )
    exits.add_argument("--thresholds", type=numbers, help="exit thresholds, comma-separated; instead of --grid_step")
    default = "" if default_grid_step is None else f"; {default_grid_step} without --thresholds"
    exits.add_argument("--grid_step", type=float, help=f"grid of its multiples below 1, down to 0{default}")
    parser.set_defaults(default_grid_step=default_grid_step)
    exits.add_argument(
        "--schedule",
        choices=tuple(SCHEDULES),
        default="constant",
        help="threshold over output positions: "
        + "; ".join(f"{schedule.name} ({schedule.meaning})" for schedule in SCHEDULES.values()),
    )
    exits.add_argument("--tau", type=float, help="temperature of a decaying schedule")
    exits.add_argument(
        "--state_propagation", choices=tuple(PROPAGATIONS), default="from_exit", help="what skipped layers attend to"
    )
    exits.add_argument(
        "--token_from",
        choices=TOKEN_SOURCES,
        default="exit_layer",
        help="layer whose prediction is the token; last_layer shows what exits do to the cache alone",
    )
    exits.add_argument("--min_exit_layer", type=whole_number(1), default=1, help="lowest layer that may exit")
    exits.add_argument("--exit_interval", type=whole_number(1), default=1, help="distance of layers that may exit")
