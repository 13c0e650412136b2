"""What `calm-beam suitability` does once its flags are parsed."""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from calm_beam.decoding.branches import Branch
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.prompts import Prompt
from calm_beam.evaluation.device_forecast import device_forecast
from calm_beam.evaluation.flops import DecoderSizes
from calm_beam.evaluation.layer_predictions import layer_predictions
from calm_beam.evaluation.sample import sampled
from calm_beam.evaluation.suitability import Suitability, suitability
from calm_beam.exits.rule import ExitRule
from calm_beam.launch.flags import as_usage
from calm_beam.launch.flags.data import find_output
from calm_beam.launch.sample import encoded_prompts, read_all_examples, sample_in_words
from calm_beam.launch.setup_run import fill_in_embedded, full_model_settings, prepare_run
from calm_beam.launch.terminal import PlainConsole
from calm_beam.launch.terminal.device_times import (
    device_times_in_words,
    device_times_record,
    device_times_table,
)
from calm_beam.launch.terminal.progress import shown_progress
from calm_beam.launch.terminal.tables import PlainTable
from calm_beam.outputs.prepared import PreparedSweep
from calm_beam.storage import replacing
from calm_beam.transforms.progress import ProgressLog


def tell_suitability(flags: argparse.Namespace) -> int:
    """Measures, tells and writes what was found; returns the exit status of the command."""
    with as_usage((ValueError, OSError)):
        fill_in_embedded(flags)
        output = None if flags.output is None else find_output(flags.output, overwrite=flags.overwrite)
        run = prepare_run(flags, needs_references=False, settings=full_model_settings(flags), compares_texts=False)
        examples = read_all_examples(run.paths, run.reading)
        prompts = encoded_prompts(run, sampled(examples, flags.max_examples))
    with shown_progress(enabled=True) as progress:
        found, pairs = _measured(run, prompts, flags=flags, progress=progress)
    console = PlainConsole()
    console.print(_table(found))
    console.print(
        f"The oracle exits at the first layer that agrees with the last: layer {found.first_agreement:.2f} on average; "
        f"from layer {found.settled:.2f} on, nothing changes any more."
    )
    console.print(_forecasts(found))
    console.print(found.verdict)
    if found.advice:
        console.print(found.advice)
    on_device: dict[str, Any] = {}
    if flags.device is not None:
        on_device = _tell_device_times(run, pairs, found, device=flags.device, console=console)
    sample = sample_in_words(prompts, len(examples))
    console.print(
        f"{sample} One pass over the full model's outputs: a forecast, no promise. Where it decides anything, "
        "calibrate on other prompts."
    )
    if output is not None:
        content = {
            "model": {"uri": run.checkpoint.uri, "fingerprint": run.model_fingerprint},
            "sample": sample,
            **dataclasses.asdict(found),
            "verdict": found.verdict,
            "advice": found.advice,
            **on_device,
        }
        with replacing(output) as temporary:
            temporary.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        console.print(f"File: {output}", soft_wrap=True)
    return 0


_Pairs = list[tuple[Sequence[int], Sequence[int]]]


def _measured(
    run: PreparedSweep, prompts: list[Prompt], *, flags: argparse.Namespace, progress: ProgressLog
) -> tuple[Suitability, _Pairs]:
    """Returns what was found, and the prompts with the full model's outputs, as token ids."""
    progress.report("read", len(prompts))
    progress.report("compiling", 1)
    rule = run.settings.rule
    decoder = Decoder(
        run.checkpoint,
        [Branch.at(rule, None, max_decode_length=flags.max_decode_length)],
        max_input_length=run.settings.max_input_length,
        batch_size=flags.batch_size,
        token_budget=flags.token_budget,
        model_parallelism=flags.model_parallelism,
        exit_head=flags.exit_head,
        engine=flags.engine,
        arithmetic=run.settings.arithmetic,
    )
    pairs: _Pairs = []
    for index, result in decoder.decode([prompt.ids for prompt in prompts]):
        pairs.append((prompts[index].ids, result.tokens[0, : result.lengths[0]].tolist()))
        progress.report("decoded", 1)
    found = suitability(
        layer_predictions(run.checkpoint, pairs, arithmetic=run.settings.arithmetic),
        sizes=DecoderSizes.of(run.checkpoint.config),
        agreeing=flags.agreeing,
    )
    return found, pairs


def _tell_device_times(
    run: PreparedSweep, pairs: _Pairs, found: Suitability, *, device: str, console: PlainConsole
) -> dict[str, Any]:
    """Prints what steps of single prompts like these take on a device at the least; returns that for the file."""
    # On average, half of an output is there already.
    positions = max(1, round(statistics.fmean(len(prompt) + len(output) / 2 for prompt, output in pairs)))
    forecast = device_forecast(run.checkpoint.config, device, run.settings.arithmetic, positions=positions)
    console.print(device_times_table(forecast))
    for sentence in device_times_in_words(forecast, positions=positions, rows=1):
        console.say(sentence)
    gains = [
        forecast.full_seconds()
        / forecast.mean_seconds(
            each.layers, ExitRule(min_exit_layer=each.min_exit_layer, exit_interval=each.exit_interval)
        )
        for each in found.exits
    ]
    best = max(range(len(gains)), key=gains.__getitem__)
    chosen = found.exits[best]
    console.say(
        f"Of the choices above, softmax exits with {chosen.flags} are forecast to be fastest there, at "
        f"{chosen.layers:.2f} layers a token: {gains[best]:.2f} times as fast as the full model, one prompt at a time."
    )
    return {
        "on_device": {**device_times_record(forecast, positions=positions, rows=1), "gain_of_exits": gains},
    }


def _table(found: Suitability) -> Table:
    table = PlainTable("Layers on the full model's outputs")
    table.add_numbers("decoder\nlayer", "agrees with\nthe last layer", "perplexity")
    for layer, (agreement, perplexity) in enumerate(zip(found.agreement, found.perplexity, strict=True), start=1):
        table.add_row(str(layer), f"{agreement:.1%}", f"{perplexity:,.2f}")
    return table


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
