"""`calm-beam generate`: answers prompts under a manifest, really skipping layers.

    calm-beam generate --manifest=calibration --checkpoint=model --prompt='A cat sits on the mat.'
    calm-beam generate --manifest=calibration --checkpoint=model --input=prompts.jsonl --output=answers.jsonl

Without `--prompt` and `--input`, prompts are read from standard input, one a line, and answered as they come. A file
holds JSONL rows as `--data` of `calibrate` does if it is called `.jsonl` or `.jsonl.gz`, and else one prompt a line. It
is read and checked as a whole before anything is decoded.

Answers go to standard output, one a line; with `--output`, to a JSONL file with tokens, exit layers and confidences.
What must be as it was calibrated (model, vocabulary, precision, lengths) is compared with the manifest first.
"""

import argparse
import contextlib
import dataclasses
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from rich.console import Console
from rich.progress import track

from calm_beam.examples import DataError, bounded_lines, parse_examples
from calm_beam.manifest import Manifest, ManifestError, read_manifest
from calm_beam.printable import printable_line
from calm_beam.storage import is_file, open_input, replacing

from .data_files import find_output
from .flags import FlagParser, UsageError, as_usage, naming, parse_own_flags, whole_number
from .layer_colours import LayerPrinter
from .manifest_file import add_confidence_flag, add_entry_flags, entry_in_words, find_manifest
from .model_flags import add_model_flags, declared
from .terminal import say

if TYPE_CHECKING:
    from calm_beam.serving import Answer, Generator

_Named: TypeAlias = tuple[str, str | tuple[int, ...]]
"""What a prompt is called, and the prompt."""


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
                generator.check([prompt for _, prompt in prompts], names=[name for name, _ in prompts])
    except ManifestError as error:
        # The manifest is sound; what was asked for is not in it, or it is about another model.
        raise UsageError(str(error)) from error
    says = entry_in_words(generator.entry)
    layers = f"{generator.entry.layers:.2f} of {generator.num_layers} layers per token"
    say(f"{says}, calibrated at {layers}")
    tally = _Tally()
    answers = _answers_to_lines(generator) if prompts is None else _answers(generator, prompts, flags)
    if flags.output is not None:
        _write(tally.of(answers), flags)
    else:
        _print(tally.of(answers), generator, show_layers=flags.show_layers)
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
    parser.add_argument("--input", help="file of prompts: JSONL (.jsonl, .jsonl.gz), else one a line (also .gz)")
    parser.add_argument("--output", help="JSONL file to write; default: texts, to standard output")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier --output")
    parser.add_argument("--show_layers", action="store_true", help="colour every token by the layer at which it left")
    parser.add_argument(
        "--batch_size", type=whole_number(1), default=1, help="prompts of a file decoded together; meant for 1 to 8"
    )
    add_entry_flags(parser)
    return parser


def _check_flags(flags: argparse.Namespace) -> None:
    if flags.prompt is not None and flags.input is not None:
        raise UsageError("--prompt and --input both give prompts: leave one of them out.")
    if flags.output is None:
        return
    if flags.show_layers:
        raise UsageError("--show_layers is for the terminal: rows of --output have exit_layers of themselves.")
    if flags.prompt is None and flags.input is None:
        raise UsageError("--output is written as a whole: pass --prompt or --input with it.")
    find_output(flags.output, overwrite=flags.overwrite)


def _given_prompts(flags: argparse.Namespace) -> list[_Named] | None:
    """Returns the prompts of `--prompt` or `--input`; None if they come from standard input."""
    if flags.prompt is not None:
        return [("the prompt", flags.prompt)]
    if flags.input is None:
        return None
    with naming("--input"):
        if not is_file(flags.input):
            raise UsageError(f"--input {flags.input}: no such file.")
        try:
            prompts = list(_read(flags.input))
        except (DataError, UnicodeDecodeError) as error:
            raise UsageError(f"--input {error}") from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UsageError(f"--input {flags.input}: damaged gzip data ({error}).") from error
    if not prompts:
        raise UsageError(f"--input {flags.input}: holds no prompts.")
    return prompts


def _read(path: str) -> Iterator[_Named]:
    with open_input(path) as raw:
        if path.removesuffix(".gz").endswith(".jsonl"):
            for example in parse_examples(raw, path=path):
                yield example.id, example.input if example.input is not None else example.input_ids or ()
            return
        with gzip.open(raw) if path.endswith(".gz") else raw as content, io.TextIOWrapper(content, "utf-8") as lines:
            for number, line in bounded_lines(lines, name=path):
                yield f"{path}, line {number}", line.removesuffix("\n")


def _generator(flags: argparse.Namespace, manifest: Manifest) -> "Generator":
    from calm_beam.serving import Generator

    return Generator.from_manifest(
        manifest,
        flags.checkpoint or manifest.model.uri,
        declared=declared(flags),
        vocabulary=flags.vocabulary,
        consistency=flags.consistency,
        metric=flags.metric,
        delta=flags.delta,
        epsilon=flags.epsilon,
        batch_size=flags.batch_size,
        confidence=flags.confidence,
    )


def _answers(
    generator: "Generator", prompts: Sequence[_Named], flags: argparse.Namespace
) -> Iterator[tuple[str, "Answer"]]:
    """Yields name and answer of prompts that have been checked, with a progress bar where answers are not seen."""
    starts = range(0, len(prompts), flags.batch_size)
    console = Console(stderr=True, highlight=False)
    is_hidden = not console.is_terminal or flags.prompt is not None or (flags.output is None and sys.stdout.isatty())
    for start in track(starts, "answering", console=console, disable=is_hidden):
        names, batch = zip(*prompts[start : start + flags.batch_size], strict=True)
        yield from zip(names, generator.generate_batch(batch, names=names), strict=True)


def _answers_to_lines(generator: "Generator") -> Iterator[tuple[str, "Answer"]]:
    """Yields name and answer of every line of standard input as it comes.

    Who types prompts may try again after a bad one; in a stream, every line has its answer, or the command ends.
    """
    from calm_beam.serving import PromptError

    is_typed = sys.stdin.isatty()
    lines = enumerate(_typed_lines(), start=1) if is_typed else bounded_lines(sys.stdin, name="standard input")
    for number, line in lines:
        name = f"standard input, line {number}"
        try:
            yield name, generator.generate_batch([line.removesuffix("\n")], names=[name])[0]
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
    tokens: int = 0
    used: int = 0
    saved: int = 0

    def of(self, answers: Iterable[tuple[str, "Answer"]]) -> Iterator[tuple[str, "Answer"]]:
        """Yields answers on, having counted them, and tells which prompts were cut."""
        for name, answer in answers:
            self.prompts += 1
            self.tokens += len(answer.tokens)
            self.used += answer.layers_used
            self.saved += answer.layers_saved
            if answer.truncated:
                self.truncated += 1
                say(f"{name}: was longer than the manifest allows, and was cut")
            yield name, answer

    def in_words(self) -> str:
        """Returns the counts."""
        layers = f"{self.used / self.tokens:.2f} layers per token" if self.tokens else "no layers"
        saved = self.saved / max(1, self.used + self.saved)
        return (
            f"prompts: {self.prompts}, of which cut: {self.truncated}; tokens: {self.tokens}, {layers}, {saved:.0%} of "
            "the full model's saved"
        )


def _write(answers: Iterable[tuple[str, "Answer"]], flags: argparse.Namespace) -> None:
    """Writes a row for every answer, all or none."""
    with (
        replacing(flags.output, overwrite=flags.overwrite) as temporary,
        open(temporary, "w", encoding="utf-8") as file,
    ):
        for name, answer in answers:
            row = {
                "id": name,
                "text": answer.text,
                "tokens": answer.tokens,
                "exit_layers": answer.exit_layers,
                "confidences": answer.confidences,
                "layers_used": answer.layers_used,
                "layers_saved": answer.layers_saved,
                "truncated": answer.truncated,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _print(answers: Iterable[tuple[str, "Answer"]], generator: "Generator", *, show_layers: bool) -> None:
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
