"""Answering prompts in this process: one prompt, a stream of lines, or whole files.

Outputs on the terminal are coloured: every token by the layer at which it exited.
"""

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track
from rich.style import Style
from rich.text import Text

from calm_beam.inputs import Reading, format_of, place_of, read_examples
from calm_beam.inputs.examples import AnyPrompt, bounded_lines
from calm_beam.launch.flags import UsageError, as_usage
from calm_beam.launch.flags.shared_options import (
    check_precision,
    declared,
    find_files,
    find_manifest,
    find_output,
    one_entry,
)
from calm_beam.launch.terminal import PlainConsole, say, say_detail
from calm_beam.manifest import Calibration, Manifest, ManifestError, read_manifest
from calm_beam.serving.answer import Tally, exit_tests
from calm_beam.storage import replacing
from calm_beam.text import printable_line

from .request import SHOWS_WHAT_IS_PRINTED, GenerateRequest, entry_with_layers, unknown_groups

if TYPE_CHECKING:
    from calm_beam.serving import Answer, Generator


# From little work to much: pale yellow, blue-green, dark blue, in red, green and blue.
_ANCHORS = ((255, 255, 204), (65, 182, 196), (12, 44, 132))
# Of a token that is a part of a letter only.
_NO_TEXT = "·"


class LayerPrinter:
    """Prints outputs with their exit layers: as background colours, or as numbers where there are no colours.

    Colours are left out where standard output is no terminal, and where NO_COLOR is set.
    """

    def __init__(self, num_layers: int) -> None:
        """Prepares to print on standard output; `num_layers` is the decoder's depth."""
        self._num_layers = num_layers
        self._console = PlainConsole(soft_wrap=True)
        self._has_colours = self._console.color_system is not None and not self._console.no_color

    def print_legend(self) -> None:
        """Prints what the colours mean."""
        if not self._has_colours:
            self._console.print(f"text[layer at which the token left, of {self._num_layers}]")
            return
        legend = Text("layers: ")
        for layer in range(1, self._num_layers + 1):
            legend.append(f" {layer} ", _style(layer, self._num_layers))
        self._console.print(legend)

    def print_output(self, texts: Sequence[str], exit_layers: Sequence[int]) -> None:
        """Prints one output in a line.

        Args:
          texts: Of each token, from `token_texts`.
          exit_layers: Of each token, from 1.
        """
        line = Text()
        for text, layer in zip(texts, exit_layers, strict=True):
            shown = printable_line(text.replace("\n", "⏎")) or _NO_TEXT
            if self._has_colours:
                line.append(shown, _style(layer, self._num_layers))
            else:
                line.append(f"{shown}[{layer}]")
        self._console.print(line)


def _style(layer: int, num_layers: int) -> Style:
    """Returns the background of a layer, with letters that can be read on it, whatever the terminal's own colours."""
    position = (layer - 1) / max(1, num_layers - 1) * (len(_ANCHORS) - 1)
    lower = min(int(position), len(_ANCHORS) - 2)
    share = position - lower
    red, green, blue = (
        round(low + share * (high - low)) for low, high in zip(_ANCHORS[lower], _ANCHORS[lower + 1], strict=True)
    )
    is_light = 0.299 * red + 0.587 * green + 0.114 * blue > 140
    return Style.parse(f"{'black' if is_light else 'bright_white'} on rgb({red},{green},{blue})")


# Prompts that are answered before any is written.
_AT_A_TIME = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Asked:
    """A prompt.

    Attributes:
      id: What its row of `--output` is called.
      place: What messages call it.
      prompt: The text, token ids, or the messages of a chat.
      group: The group that its row names; None for what `--group` says.
    """

    id: str
    place: str
    prompt: AnyPrompt
    group: str | None = None


def answer_here(request: GenerateRequest) -> int:
    """Answers the requested prompts in this process, and returns the exit status of the command."""
    _check_flags(request)
    manifest = read_manifest(find_manifest(request.manifest))
    check_precision(request, manifest.decode)
    prompts = _given_prompts(request)
    # Here, since JAX takes seconds.
    from calm_beam.decoding.compilation import use_compilation_cache

    use_compilation_cache()
    try:
        with as_usage():
            generator = _generator(request, manifest)
            if prompts is not None:
                generator.check([asked.prompt for asked in prompts], names=[asked.place for asked in prompts])
    except ManifestError as error:
        # The manifest is sound; what was asked for is not in it, or it is about another model.
        raise UsageError(str(error)) from error
    say_detail(generator.memory)
    if caution := generator.other_engine_in_words():
        say(f"caution: {caution}")
    for entry in _entries(generator, prompts):
        say(entry_with_layers(entry, num_layers=generator.num_layers))
    _tell_unknown(generator, prompts)
    counted = _Counted(manifest)
    answers = _answers_to_lines(generator) if prompts is None else _answers(generator, prompts, request=request)
    if request.output is not None:
        _write(counted.counting(answers), request, has_groups=manifest.data.groups is not None)
    else:
        _print(counted.counting(answers), generator, show_layers=request.show_layers)
    say(counted.in_words())
    return 0


def _check_flags(request: GenerateRequest) -> None:
    if request.prompt is not None and request.input is not None:
        raise UsageError("--prompt and --input both give prompts: leave one of them out.")
    if request.output is None:
        return
    if request.show_layers:
        raise UsageError(SHOWS_WHAT_IS_PRINTED)
    if request.prompt is None and request.input is None:
        raise UsageError("--output is written as a whole: pass --prompt or --input with it.")
    find_output(request.output, overwrite=request.overwrite)


def _given_prompts(request: GenerateRequest) -> list[_Asked] | None:
    """Returns the prompts of `--prompt` or `--input`; None if they come from standard input."""
    if request.prompt is not None:
        return [_Asked(id="the prompt", place="the prompt", prompt=request.prompt)]
    if request.input is None:
        return None
    reading = request.prompt_reading
    try:
        paths = find_files("--input", [request.input], reading=reading).files
        prompts = [asked for path in paths for asked in _read(path, reading)]
    except UsageError:
        # Which names its flag.
        raise
    except (ValueError, OSError) as error:
        raise UsageError(f"--input {error}") from error
    if not prompts:
        raise UsageError(f"--input {request.input}: holds no prompts.")
    return prompts


def _read(path: str, reading: Reading) -> Iterator[_Asked]:
    has_ids = format_of(path, reading).has_fields
    for example in read_examples(path, reading):
        place = place_of(path, example.line, reading=reading)
        yield _Asked(
            id=example.id if has_ids else place,
            place=f"{place} ({example.id})" if example.has_own_id else place,
            prompt=example.prompt,
            group=example.group,
        )


def _generator(request: GenerateRequest, manifest: Manifest) -> "Generator":
    from calm_beam.serving import Generator

    return Generator.from_manifest(
        manifest,
        request.model_of(manifest),
        declared=declared(request),
        vocabulary=request.vocabulary,
        choice=one_entry(request, manifest),
        **request.asked_of_decoder(),
        exact_engine=request.exact_engine,
    )


def _entries(generator: "Generator", prompts: Sequence[_Asked] | None) -> list[Calibration]:
    """Returns the entries by which prompts are answered, each once."""
    groups = dict.fromkeys([None] if prompts is None else [asked.group for asked in prompts])
    return list(dict.fromkeys(generator.entry_for(group) for group in groups))


def _tell_unknown(generator: "Generator", prompts: Sequence[_Asked] | None) -> None:
    """Tells which groups of prompts no promise is about."""
    named = {asked.group for asked in prompts or () if asked.group is not None}
    unknown = [name for name in named if generator.entry_for(name).group != name]
    if unknown:
        say(unknown_groups(unknown))


def _answers(
    generator: "Generator", prompts: Sequence[_Asked], *, request: GenerateRequest
) -> Iterator[tuple[_Asked, "Answer"]]:
    """Yields prompts that have been checked with their answers, with a progress bar where answers are not seen."""
    starts = range(0, len(prompts), _AT_A_TIME)
    console = Console(stderr=True, highlight=False)
    is_hidden = (
        not console.is_terminal or request.prompt is not None or (request.output is None and sys.stdout.isatty())
    )
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

    On a terminal, a bad prompt can be typed again; in a stream, the command ends at a line that cannot be answered.
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
class _Counted:
    """Counts of answers so far, and their seconds of decoding."""

    manifest: Manifest
    tally: Tally = dataclasses.field(default_factory=Tally)
    exit_tests: int = 0
    seconds: float = 0.0

    def in_words(self) -> str:
        """Returns what was promised, as it was seen: layers, how often a confidence was asked, and tokens a second."""
        tokens = self.tally.tokens
        if not tokens or not self.seconds:
            return self.tally.in_words()
        return (
            f"{self.tally.in_words()}; {self.exit_tests / tokens:.2f} extra exit tests per token, "
            f"{tokens / self.seconds:,.0f} tokens a second, compiling included"
        )

    def counting(self, answers: Iterable[tuple[_Asked, "Answer"]]) -> Iterator[tuple[_Asked, "Answer"]]:
        """Yields answers on, having counted them, and tells which prompts were cut."""
        began = time.perf_counter()
        for asked, answer in answers:
            self.seconds += time.perf_counter() - began
            self.tally = self.tally.answered(answer)
            self.exit_tests += exit_tests(answer, self.manifest)
            if answer.truncated:
                say(f"{asked.place}: was longer than the manifest allows, and was cut")
            yield asked, answer
            # The consumer prints the answer, or waits for the next line.
            began = time.perf_counter()


def _write(answers: Iterable[tuple[_Asked, "Answer"]], request: GenerateRequest, *, has_groups: bool) -> None:
    """Writes a row for every answer, all or none."""
    # Here, since JAX takes seconds.
    from calm_beam.serving import answer_row

    assert request.output is not None, "it was checked"
    with (
        replacing(request.output, overwrite=request.overwrite) as temporary,
        open(temporary, "w", encoding="utf-8") as file,
    ):
        for asked, answer in answers:
            row = answer_row(asked.id, answer, has_groups=has_groups)
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
