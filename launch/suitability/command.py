"""The forecast of `calm-beam suitability` and `calm_beam.suitability`: measured, then printed by the command."""

import dataclasses
import itertools
import json
import os
import shlex
import statistics
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from rich.table import Table

from calm_beam.calibration.variants import tests_by_name
from calm_beam.decoding.branches import Branch
from calm_beam.decoding.decoder import Decoder
from calm_beam.evaluation.device_forecast import DeviceForecast, device_forecast
from calm_beam.evaluation.flops import DecoderSizes
from calm_beam.evaluation.performance import encoded_prompts, sample_in_words, sampled
from calm_beam.evaluation.serving_speed import OnDecoded, Serving, measured_cost
from calm_beam.evaluation.suitability import ExitForecast, Suitability, layer_predictions, suitability_of
from calm_beam.exits.measures import Need
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.token_cost import TokenCost
from calm_beam.inputs.preview import read_all_examples
from calm_beam.inputs.prompts import Prompt
from calm_beam.inputs.vocabularies.vocabulary import ends_output
from calm_beam.launch.calibrate.options import Guarantees
from calm_beam.launch.device_times import device_times_in_words, device_times_record, device_times_table
from calm_beam.launch.flags import as_usage
from calm_beam.launch.flags.requests import calling
from calm_beam.launch.flags.shared_options import find_output
from calm_beam.launch.flags.task import TaskRequest
from calm_beam.launch.run_sweep import prepare_task
from calm_beam.launch.terminal import PlainConsole, give, say, tell
from calm_beam.launch.terminal.lines import PlainTable
from calm_beam.launch.terminal.progress import shown_progress, timing_in
from calm_beam.launch.train.request import TrainRequest
from calm_beam.options import default_of, options_of
from calm_beam.outputs.prepared import PreparedSweep
from calm_beam.storage import exists, replacing
from calm_beam.text import counted
from calm_beam.transforms.metrics import ProgressLog

from .request import SuitabilityRequest

# Prompts that are timed.
_TIMED = 16
_Pairs = Sequence[tuple[Sequence[int], Sequence[int]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnDevice:
    """Least times of steps of single prompts on a device.

    Attributes:
      forecast: Of the model's steps.
      positions: Tokens that a step attends to, on average.
      gains: How many times as fast as the full model each choice of exits is.
    """

    forecast: DeviceForecast
    positions: int
    gains: Sequence[float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Here:
    """Times of tokens of single prompts on this machine, with the serving decoder.

    Attributes:
      cost: In seconds.
      gains: How many times as fast as the full model each choice of exits is.
    """

    cost: TokenCost
    gains: Sequence[float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Findings from the full model's outputs on a sample.

    Attributes:
      run: How they were decoded.
      found: What was found.
      here: What was measured on this machine; None where another device was named, or nothing exits.
      on_device: What is forecast of a device; None where none was named.
      sample: Description of the prompts.
      output: The file that holds it; None where none was named.
      next: The command that proves what may be promised, or that trains the model where exits save little.
    """

    run: PreparedSweep
    found: Suitability
    here: Here | None
    on_device: OnDevice | None
    sample: str
    output: str | None
    next: str

    def record(self) -> dict[str, Any]:
        """Returns what was found as figures for JSON."""
        run, found, on_device = self.run, self.found, self.on_device
        content = {
            "model": {"uri": run.checkpoint.uri, "fingerprint": run.model_fingerprint},
            "sample": self.sample,
            **dataclasses.asdict(found),
            "verdict": found.verdict,
            "advice": found.advice,
            "next": self.next,
        }
        if self.here is not None:
            cost = self.here.cost
            seconds = {"layer": cost.layer, "output": cost.output, **tests_by_name(cost)}
            content["here"] = {"seconds": seconds, "gain_of_exits": self.here.gains}
        if on_device is not None:
            times = device_times_record(on_device.forecast, positions=on_device.positions, rows=1)
            content["on_device"] = {**times, "gain_of_exits": on_device.gains}
        return content


def measure(request: SuitabilityRequest) -> Measured:
    """Decodes a sample by the full model, writes what was found if a file is named, and returns it.

    Raises:
      UsageError: If anything that was asked for is wrong.
    """
    with as_usage((ValueError, OSError)):
        asked = None if request.output is None else os.fspath(request.output)
        output = None if asked is None else find_output(asked, overwrite=request.overwrite)
        if request.is_demo:
            say("no --checkpoint and no --data: the demo model on the demo data")
        run = prepare_task(request, request.settings, compares_texts=False)
        examples = read_all_examples(run.paths, run.reading)
        prompts = encoded_prompts(run, sampled(examples, request.max_examples))
    with shown_progress(enabled=True) as progress:
        found, pairs = _measured(run, prompts, request=request, progress=progress)
        here = None
        # Where little is to gain, its time changes nothing about what to do next.
        if request.device is None and found.is_suitable:
            here = _here(run, pairs, found=found, on_decoded=timing_in(progress))
    measured = Measured(
        run=run,
        found=found,
        here=here,
        on_device=None if request.device is None else _on_device(run, pairs, found=found, device=request.device),
        sample=sample_in_words(prompts, len(examples)),
        output=output,
        next=_calibration(request) if found.is_suitable else _training(request),
    )
    if output is not None:
        with replacing(output) as temporary:
            text = json.dumps(measured.record(), ensure_ascii=False, indent=1)
            temporary.write_text(text + "\n", encoding="utf-8")
    return measured


def _measured(
    run: PreparedSweep, prompts: list[Prompt], *, request: SuitabilityRequest, progress: ProgressLog
) -> tuple[Suitability, _Pairs]:
    """Returns what was found, and the prompts with the full model's outputs, as token ids."""
    progress.report("read", len(prompts))
    progress.report("compiling", 1)
    rule = run.settings.rule
    decoder = Decoder(
        run.checkpoint,
        [Branch.at(rule, None, max_decode_length=request.max_decode_length)],
        max_input_length=run.settings.max_input_length,
        precision=run.settings.precision,
        ends_output=ends_output(run.vocabulary),
        **request.asked_of_decoder(),
    )
    pairs: list[tuple[Sequence[int], Sequence[int]]] = []
    for index, result in decoder.decode([prompt.ids for prompt in prompts]):
        pairs.append((prompts[index].ids, result.tokens[0, : result.lengths[0]].tolist()))
        progress.report("decoded", 1)
    progress.report("predicting", 1)
    found = suitability_of(
        layer_predictions(run.checkpoint, pairs, precision=run.settings.precision),
        sizes=DecoderSizes.of(run.checkpoint.config),
        agreeing=request.agreeing,
    )
    return found, pairs


def _here(run: PreparedSweep, pairs: _Pairs, *, found: Suitability, on_decoded: OnDecoded) -> Here | None:
    """Returns what tokens of single prompts like these take here; None where nothing exits, or devices share it."""
    if run.request.model_parallelism > 1 or all(each.threshold is None for each in found.exits):
        return None
    serving, cheapest = Serving.of(run, batch=1), found.cheapest
    cost = measured_cost(
        serving,
        [prompt for prompt, _ in pairs[:_TIMED]],
        needs=(Need.LOGITS,),
        exits=_rule(cheapest),
        on_decoded=on_decoded,
    )
    gains = [
        1.0 if each.threshold is None else cost.full() / cost.at_mean(each.layers, _rule(each)) for each in found.exits
    ]
    return Here(cost=cost, gains=gains)


def _rule(forecast: ExitForecast) -> ExitRule:
    return ExitRule(min_exit_layer=forecast.min_exit_layer, exit_interval=forecast.exit_interval)


def _calibration(request: SuitabilityRequest) -> str:
    """Returns the calibration of the same model and data, by ways of exiting that no figure of this sample decides."""
    usual: str = default_of(Guarantees, "output")
    names = itertools.chain([usual], (f"{usual}_{number}" for number in itertools.count(2)))
    free = next(name for name in names if not exists(name))
    return shlex.join(["calm-beam", "calibrate", *_given(request), *([] if free == usual else [f"--output={free}"])])


# Files that stand for the user's.
_TRAIN, _VALIDATION, _TRAINED = "train.jsonl", "validation.jsonl", "trained_model"


def _training(request: SuitabilityRequest) -> str:
    """Returns the fine-tuning of the same model with the same prompts, on other rows."""
    rows: tuple[str, ...] = (f"--data={_TRAIN}", f"--validation_data={_VALIDATION}")
    if request.seqio_task is not None:
        rows = ("--seqio_validation_split=validation",)
    # The data are for calibration, which excludes training on them.
    others = {"checkpoint", "data", "seqio_split"}
    same = _given(request, names={name for name, _ in options_of(TrainRequest)} - others)
    checkpoint = f"--checkpoint={request.model_path}"
    return shlex.join(["calm-beam", "train", checkpoint, *same, *rows, f"--output={_TRAINED}"])


def _given(request: SuitabilityRequest, *, names: Collection[str] | None = None) -> Iterator[str]:
    """Yields the flags of the task that were given, in the order of help; those of some names if there are any."""
    for name, declared in (each for group in TaskRequest.__bases__ for each in options_of(group)):
        if request.is_given(name) and (names is None or name in names):
            value = getattr(request, name)
            text = declared.kind.written(value) if isinstance(value, tuple) else str(value)
            yield f"--{name}" if value is True else f"--{name}={text}"


def _on_device(run: PreparedSweep, pairs: _Pairs, *, found: Suitability, device: str) -> OnDevice:
    """Returns what steps of single prompts like these take on a device at the least."""
    # On average, half of an output is there already.
    positions = max(1, round(statistics.fmean(len(prompt) + len(output) / 2 for prompt, output in pairs)))
    forecast = device_forecast(run.checkpoint.config, device, run.settings.precision, positions=positions)
    gains = [forecast.full_seconds() / forecast.mean_seconds(each.layers, _rule(each)) for each in found.exits]
    return OnDevice(forecast=forecast, positions=positions, gains=gains)


_LARGEST_PERPLEXITY_IN_FULL = 1e6


def tell_suitability(request: SuitabilityRequest) -> int:
    """Measures, and tells what was found; returns the exit status of the command."""
    measured = measure(request)
    found, console = measured.found, PlainConsole()
    console.print(_table(found))
    depth = counted(len(found.agreement), "layer")
    console.print(
        "An oracle that exits at the first layer whose prediction is the last layer's uses "
        f"{found.first_agreement:.2f} of {depth} a token; one that waits until no higher layer predicts anything else, "
        f"{found.settled:.2f}."
    )
    console.print(_forecasts(found))
    console.print(found.verdict)
    if found.advice:
        console.print(found.advice)
    if measured.on_device is not None:
        _tell_device_times(measured.on_device, found, console=console)
    if measured.here is not None:
        console.print(_fastest_here(measured.here, found))
    console.print(f"{measured.sample} One pass over the full model's outputs: a forecast, no promise.")
    tell(f"Next:\n  {measured.next}")
    if found.is_suitable:
        console.print("It may use these prompts, since no figure above decides anything in it.")
    elif request.seqio_task is None:
        console.print(
            f"{_TRAIN} and {_VALIDATION} stand for rows of yours with answers, other than those that will calibrate."
        )
    console.print(
        "Where a figure above decides something, such as delta or how tokens exit, calibrate on other prompts."
    )
    if measured.output is not None:
        console.print(f"File: {measured.output}", soft_wrap=True)
    give(measured.record())
    return 0


def _fastest_here(here: Here, found: Suitability) -> str:
    """Returns which choice of exits is fastest on this machine by what was measured, in a sentence."""
    best = max(range(len(here.gains)), key=here.gains.__getitem__)
    if here.gains[best] <= 1:
        return (
            "Measured here, one prompt at a time, none of these choices is forecast to be faster than the full model: "
            "tests take longer than the layers that they save. A calibration also tries measures with cheaper tests."
        )
    chosen, cheapest = found.exits[best], found.cheapest
    sentence = (
        f"Measured here, one prompt at a time, softmax exits with {chosen.flags} are forecast to be fastest, at "
        f"{chosen.layers:.2f} layers a token: {here.gains[best]:.2f} times as fast as the full model."
    )
    if chosen is cheapest:
        return sentence
    return (
        f"{sentence} Time is not operations: those with the fewest operations, {cheapest.flags}, are forecast to be "
        f"{here.gains[found.exits.index(cheapest)]:.2f} times as fast."
    )


def _tell_device_times(on_device: OnDevice, found: Suitability, *, console: PlainConsole) -> None:
    """Prints what steps take on a device at the least, and which exits are fastest there."""
    console.print(device_times_table(on_device.forecast))
    for sentence in device_times_in_words(on_device.forecast, positions=on_device.positions, rows=1):
        console.say(sentence)
    best = max(range(len(on_device.gains)), key=on_device.gains.__getitem__)
    chosen = found.exits[best]
    console.say(
        f"Of the choices above, softmax exits with {chosen.flags} are forecast to be fastest there, at "
        f"{chosen.layers:.2f} layers a token: {on_device.gains[best]:.2f} times as fast as the full model, one prompt "
        "at a time."
    )


def _table(found: Suitability) -> Table:
    table = PlainTable("Layers on the full model's outputs")
    table.add_numbers("decoder\nlayer", "agrees with\nthe last layer", "perplexity")
    for layer, (agreement, perplexity) in enumerate(zip(found.agreement, found.perplexity, strict=True), start=1):
        table.add_row(str(layer), f"{agreement:.1%}", _in_few_digits(perplexity))
    return table


def _in_few_digits(perplexity: float) -> str:
    """Returns a perplexity; one of untrained layers, which may have dozens of digits, by its power of ten.

    >>> _in_few_digits(1234.567), _in_few_digits(2.5e17)
    ('1,234.57', '2.5e+17')
    """
    return f"{perplexity:,.2f}" if perplexity <= _LARGEST_PERPLEXITY_IN_FULL else f"{perplexity:.1e}"


def _forecasts(found: Suitability) -> Table:
    table = PlainTable(f"Softmax exits that keep {found.agreeing:.0%} of the tokens")
    table.add_numbers(
        "lowest layer\nthat may exit", "distance\nto the next", "threshold", "layers\na token", "operations"
    )
    for each in found.exits:
        threshold = "never exit" if each.threshold is None else f"{each.threshold:.2f}"
        table.add_row(
            str(each.min_exit_layer), str(each.exit_interval), threshold, f"{each.layers:.2f}", f"{each.work:.0%}"
        )
    return table


@calling(SuitabilityRequest)
def suitability(request: SuitabilityRequest) -> Suitability:
    """Says whether a model can exit early at all, from one pass over a sample of prompts: a forecast, no promise.

        found = calm.suitability(checkpoint="checkpoints/my_t5", data="prompts/*.jsonl.gz")
        print(found.verdict, found.advice)

    It is what `calm-beam suitability` runs, and takes all of its options, by the same names. With neither model nor
    data, the demo model is looked at on the demo data.

    Raises:
      UsageError: If anything that was asked for is wrong.
    """
    return measure(request).found
