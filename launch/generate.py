"""`calm-beam generate`: answers prompts under a manifest, really skipping layers.

    calm-beam generate --manifest=calibration --checkpoint=model --prompt='A cat sits on the mat.'
    calm-beam generate --manifest=calibration --checkpoint=model --input=prompts.jsonl --output=answers.jsonl

Without `--prompt` and `--input`, prompts are read from standard input, one a line, and answered as they come. Files
are of the formats that `--data` of `calibrate` takes, told by their suffixes. They are read and checked as a whole
before anything is decoded.

Answers go to standard output, one a line; with `--output`, to a JSONL file with tokens, exit layers and confidences.
What must be as it was calibrated (model, vocabulary, precision, lengths) is compared with the manifest first.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track

from calm_beam.examples import bounded_lines
from calm_beam.inputs import Reading, format_of, place_of, read_examples
from calm_beam.manifest import Calibration, Manifest, ManifestError, read_manifest
from calm_beam.printable import printable_line
from calm_beam.storage import replacing

from .flags import FlagParser, UsageError, add_exit_head_flag, as_usage, parse_own_flags, whole_number
from .flags.data import find_files, find_output
from .flags.manifest import add_confidence_flag, add_entry_flags, entry_in_words, find_manifest
from .flags.model import add_model_flags, declared
from .terminal import say
from .terminal.layer_colours import LayerPrinter

if TYPE_CHECKING:
    from calm_beam.serving import Answer, Generator


# Prompts that are answered before any is written.
_AT_A_TIME = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Asked:
    """A prompt.

    Attributes:
      id: What its row of `--output` is called.
      place: What messages call it.
      prompt: The text, or token ids.
      group: The group that its row names; None for what `--group` says.
    """

    id: str
    place: str
    prompt: str | tuple[int, ...]
    group: str | None = None


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    flags = parse_own_flags(_parser(), argv)
    _check_flags(flags)
    manifest = read_manifest(find_manifest(flags.manifest))
    prompts = _given_prompts(flags)
    # Here, since JAX takes seconds.
    from calm_beam.decoding.compilation import use_compilation_cache

    use_compilation_cache()
    try:
        with as_usage():
            generator = _generator(flags, manifest)
            if prompts is not None:
                generator.check([asked.prompt for asked in prompts], names=[asked.place for asked in prompts])
    except ManifestError as error:
        # The manifest is sound; what was asked for is not in it, or it is about another model.
        raise UsageError(str(error)) from error
    for entry in _entries(generator, prompts):
        say(f"{entry_in_words(entry)}, calibrated at {entry.layers:.2f} of {generator.num_layers} layers per token")
    _tell_unknown(generator, prompts)
    tally = _Tally()
    answers = _answers_to_lines(generator) if prompts is None else _answers(generator, prompts, flags=flags)
    if flags.output is not None:
        _write(tally.counting(answers), flags, has_groups=manifest.data.groups is not None)
    else:
        _print(tally.counting(answers), generator, show_layers=flags.show_layers)
    say(tally.in_words())
    return 0


def _parser() -> FlagParser:
    parser = FlagParser(prog="calm-beam generate", description=(__doc__ or "").split(": ", 1)[1].split("\n\n")[0])
    parser.add_argument("--manifest", required=True, help="a manifest, or the calibration directory that holds one")
    parser.add_argument("--checkpoint", help="model folder; default: where the manifest says that it was")
    add_model_flags(parser)
    add_confidence_flag(parser)
    parser.add_argument("--vocabulary", help="SentencePiece model; default: in or beside the checkpoint")
    parser.add_argument("--prompt", help="the prompt; default: --input, or standard input")
    parser.add_argument("--input", help="files of prompts: a path or a glob")
    parser.add_argument(
        "--data_format",
        choices=("jsonl", "text", "parquet", "tfrecord"),
        help="format of --input; default: by suffix (.jsonl, .txt, .tfrecord, each also with .gz; .parquet)",
    )
    parser.add_argument("--inputs_field", help="field of a row with the prompt; default: input, in TFRecord inputs")
    parser.add_argument(
        "--group_key", help="field of a row of --input with the prompt's group, under a manifest with groups"
    )
    parser.add_argument("--output", help="JSONL file to write; default: texts, to standard output")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier --output")
    parser.add_argument("--show_layers", action="store_true", help="colour every token by the layer at which it left")
    parser.add_argument(
        "--batch_size",
        type=whole_number(1),
        help="most prompts of a file decoded together; default: by the memory that is free",
    )
    add_exit_head_flag(parser)
    add_entry_flags(parser)
    return parser


def _check_flags(flags: argparse.Namespace) -> None:
    if flags.prompt is not None and flags.input is not None:
        raise UsageError("--prompt and --input both give prompts: leave one of them out.")
    if flags.group is not None and flags.group_key is not None:
        raise UsageError("--group names the group of all prompts, --group_key that of each: leave one of them out.")
    for name in ("data_format", "inputs_field", "group_key"):
        if flags.input is None and getattr(flags, name) is not None:
            raise UsageError(f"--{name} belongs to --input, which is missing.")
    if flags.output is None:
        return
    if flags.show_layers:
        raise UsageError("--show_layers colours what is printed: rows of --output have exit_layers of themselves.")
    if flags.prompt is None and flags.input is None:
        raise UsageError("--output is written as a whole: pass --prompt or --input with it.")
    find_output(flags.output, overwrite=flags.overwrite)


def _given_prompts(flags: argparse.Namespace) -> list[_Asked] | None:
    """Returns the prompts of `--prompt` or `--input`; None if they come from standard input."""
    if flags.prompt is not None:
        return [_Asked(id="the prompt", place="the prompt", prompt=flags.prompt)]
    if flags.input is None:
        return None
    reading = Reading(data_format=flags.data_format, inputs_field=flags.inputs_field, group_key=flags.group_key)
    try:
        paths = find_files("--input", [flags.input], reading=reading).files
        prompts = [asked for path in paths for asked in _read(path, reading)]
    except UsageError:
        # Which names its flag.
        raise
    except (ValueError, OSError) as error:
        raise UsageError(f"--input {error}") from error
    if not prompts:
        raise UsageError(f"--input {flags.input}: holds no prompts.")
    return prompts


def _read(path: str, reading: Reading) -> Iterator[_Asked]:
    has_ids = format_of(path, reading).has_fields
    for example in read_examples(path, reading):
        place = place_of(path, example.line, reading=reading)
        prompt = example.input if example.input is not None else example.input_ids or ()
        yield _Asked(
            id=example.id if has_ids else place,
            place=f"{place} ({example.id})" if example.has_own_id else place,
            prompt=prompt,
            group=example.group,
        )


def _generator(flags: argparse.Namespace, manifest: Manifest) -> "Generator":
    from calm_beam.serving import Generator

    return Generator.from_manifest(
        manifest,
        flags.checkpoint or manifest.model.uri,
        declared=declared(flags),
        vocabulary=flags.vocabulary,
        consistency=flags.consistency,
        loss=flags.loss,
        metric=flags.metric,
        delta=flags.delta,
        epsilon=flags.epsilon,
        group=flags.group,
        batch_size=flags.batch_size,
        exit_head=flags.exit_head,
        confidence=flags.confidence,
    )


def _entries(generator: "Generator", prompts: Sequence[_Asked] | None) -> list[Calibration]:
    """Returns the entries by which prompts are answered, each once."""
    groups = dict.fromkeys([None] if prompts is None else [asked.group for asked in prompts])
    return list(dict.fromkeys(generator.entry_for(group) for group in groups))


def _tell_unknown(generator: "Generator", prompts: Sequence[_Asked] | None) -> None:
    """Tells which groups of prompts no promise is about."""
    named = {asked.group for asked in prompts or () if asked.group is not None}
    if unknown := sorted(name for name in named if generator.entry_for(name).group != name):
        say(
            f"caution: the manifest knows no group {', '.join(map(printable_line, unknown))}. Their prompts are "
            "answered by its safest entry, which promises nothing about them."
        )


def _answers(
    generator: "Generator", prompts: Sequence[_Asked], *, flags: argparse.Namespace
) -> Iterator[tuple[_Asked, "Answer"]]:
    """Yields prompts that have been checked with their answers, with a progress bar where answers are not seen."""
    starts = range(0, len(prompts), _AT_A_TIME)
    console = Console(stderr=True, highlight=False)
    is_hidden = not console.is_terminal or flags.prompt is not None or (flags.output is None and sys.stdout.isatty())
    for start in track(starts, "answering", console=console, disable=is_hidden):
        batch = prompts[start : start + _AT_A_TIME]
        answers = generator.generate_batch(
            [asked.prompt for asked in batch],
            names=[asked.place for asked in batch],
            groups=[asked.group for asked in batch],
        )
        yield from zip(batch, answers, strict=True)


def _answers_to_lines(generator: "Generator") -> Iterator[tuple[_Asked, "Answer"]]:
    """Yields every line of standard input with its answer as it comes.

    Who types prompts may try again after a bad one; in a stream, every line has its answer, or the command ends.
    """
    from calm_beam.serving import PromptError

    is_typed = sys.stdin.isatty()
    lines = enumerate(_typed_lines(), start=1) if is_typed else bounded_lines(sys.stdin, name="standard input")
    for number, line in lines:
        name = f"standard input, line {number}"
        asked = _Asked(id=name, place=name, prompt=line.removesuffix("\n"))
        try:
            yield asked, generator.generate_batch([asked.prompt], names=[name])[0]
        except PromptError as error:
            if not is_typed:
                raise
            say(error)


def _typed_lines() -> Iterator[str]:
    # Lets lines be edited and called back.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    while True:
        try:
            line = input("> ")
        except EOFError:
            print(file=sys.stderr)
            return
        yield line


@dataclasses.dataclass
class _Tally:
    """What was answered so far."""

    prompts: int = 0
    truncated: int = 0
    _: dataclasses.KW_ONLY
    tokens: int = 0
    used: int = 0
    saved: int = 0

    def counting(self, answers: Iterable[tuple[_Asked, "Answer"]]) -> Iterator[tuple[_Asked, "Answer"]]:
        """Yields answers on, having counted them, and tells which prompts were cut."""
        for asked, answer in answers:
            self.prompts += 1
            self.tokens += len(answer.tokens)
            self.used += answer.layers_used
            self.saved += answer.layers_saved
            if answer.truncated:
                self.truncated += 1
                say(f"{asked.place}: was longer than the manifest allows, and was cut")
            yield asked, answer

    def in_words(self) -> str:
        """Returns the counts."""
        layers = f"{self.used / self.tokens:.2f} layers per token" if self.tokens else "no layers"
        saved = self.saved / max(1, self.used + self.saved)
        return (
            f"prompts: {self.prompts}, of which cut: {self.truncated}; tokens: {self.tokens}, {layers}, {saved:.0%} of "
            "the full model's saved"
        )


def _write(answers: Iterable[tuple[_Asked, "Answer"]], flags: argparse.Namespace, *, has_groups: bool) -> None:
    """Writes a row for every answer, all or none."""
    with (
        replacing(flags.output, overwrite=flags.overwrite) as temporary,
        open(temporary, "w", encoding="utf-8") as file,
    ):
        for asked, answer in answers:
            row = {
                "id": asked.id,
                "text": answer.text,
                "tokens": answer.tokens,
                "exit_layers": answer.exit_layers,
                "confidences": answer.confidences,
                "layers_used": answer.layers_used,
                "layers_saved": answer.layers_saved,
                "truncated": answer.truncated,
            }
            if has_groups and answer.entry is not None:
                row |= {"group": answer.group, "threshold": answer.entry.threshold}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _print(answers: Iterable[tuple[_Asked, "Answer"]], generator: "Generator", *, show_layers: bool) -> None:
    """Prints the text of every answer in a line of its own, as soon as it is there; to a file or a pipe as it is."""
    if not show_layers:
        shown = printable_line if sys.stdout.isatty() else str
        for _, answer in answers:
            print(shown(answer.text), flush=True)
        return
    from calm_beam.serving import token_texts

    printer = LayerPrinter(generator.num_layers)
    printer.print_legend()
    for _, answer in answers:
        printer.print_output(token_texts(answer.tokens, generator.vocabulary), answer.exit_layers)
