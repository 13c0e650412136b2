"""`--exits=auto`: chooses the exit rules to try, and the cost of a token with each, before any loss is seen.

Candidates depend on the model, the number of examples and the cost of a token, never on losses. Layers may exit at
quarters of the depth, since a test at every layer often costs more than it saves.

Times are measured on a few prompts of the calibration set, before and after the calibration. The cost of a token is
stored in the output directory, so that a resumed run chooses by the same cost; no digest includes it.
"""

import dataclasses
import itertools
import json
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from calm_beam.calibration.pareto import CHOOSING, MOST_BY_THEMSELVES, SELECTION_SHARE, part_of
from calm_beam.calibration.variants import VariantCosts, tests_by_name
from calm_beam.errors import CalmBeamError, UsageError
from calm_beam.evaluation.flops import DecoderSizes, operations_cost
from calm_beam.exits.measures import MEASURES, measure_named
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.schedules import SCHEDULES
from calm_beam.exits.token_cost import TokenCost
from calm_beam.inputs import read_examples
from calm_beam.inputs.preview import count_examples
from calm_beam.inputs.set_parts import salt_of
from calm_beam.launch.terminal import say
from calm_beam.launch.terminal.progress import shown_progress, timing_in
from calm_beam.manifest import FLOPS, LATENCY, LAYERS, UNITS, CostRecord, Variant
from calm_beam.options import listed
from calm_beam.risk.pvalues import P_VALUES
from calm_beam.storage import is_file, joined, open_input, replacing, strict_json
from calm_beam.text import counted

from .request import CalibrateRequest

if TYPE_CHECKING:
    from calm_beam.outputs.prepared import PreparedSweep

COST_FILE = "token_cost.json"


def write_cost(output: str, cost: CostRecord, *, model: str) -> None:
    """Writes the cost of a token into an output directory; `model` is the fingerprint of the model."""
    with replacing(joined(output, COST_FILE), overwrite=True) as temporary:
        temporary.write_text(json.dumps({"model": model, **cost.to_dict()}, indent=1) + "\n", encoding="utf-8")


def read_cost(output: str, *, model: str) -> CostRecord | None:
    """Returns the cost of a token that an earlier run stored; None if there is none for this model.

    Raises:
      UsageError: If the file is not as it was written.
    """
    path = joined(output, COST_FILE)
    if not is_file(path):
        return None
    try:
        with open_input(path) as file:
            content = strict_json.loads(file.read())
        return CostRecord.from_dict(content) if content.pop("model") == model else None
    except (AttributeError, KeyError, ValueError) as error:
        raise UsageError(f"{path}: is not as calm-beam writes it ({error}). Begin again with --overwrite.") from error


# Prompts to time are drawn from this many first rows, by a hash of their ids.
_DRAWN_FROM = 2000
# Length of a short prompt in tokens; ids below the first one are T5's padding, end and unknown tokens.
_MADE_TOKENS, _FIRST_ID = 24, 3


def first_prompts(
    request: CalibrateRequest,
    sweep: "PreparedSweep",
    *,
    count: int,
    parts: Collection[str],
    selection_share: float | None,
) -> list[Sequence[int]]:
    """Returns the encoded prompts of some of the first rows.

    Args:
      request: Says which examples are the holdout; none of them is taken.
      sweep: Says which data are read, and how prompts are encoded.
      count: Number of prompts, at most.
      parts: Parts of the examples, choosing or testing, that prompts are taken from.
      selection_share: The share of examples that chooses; None where none does.

    Raises:
      UsageError: If there is no example.
    """
    salt = salt_of(request.seed)
    examples = itertools.chain.from_iterable(
        read_examples(path, sweep.reading, file_index=index) for index, path in enumerate(sweep.paths)
    )
    found = [
        example
        for example in itertools.islice(examples, _DRAWN_FROM)
        if (request.part is None or request.part.takes(example))
        and (
            selection_share is None
            or part_of(example.cluster or example.id, salt=salt, selection_share=selection_share) in parts
        )
    ]
    if not found:
        raise UsageError("--exits=auto: no example chooses. Take more examples.")
    # Here, since it loads JAX, and stored generations are calibrated without it.
    from calm_beam.evaluation.performance import encoded_prompts, sampled

    return [prompt.ids for prompt in encoded_prompts(sweep, sampled(found, count))]


def made_prompts(sweep: "PreparedSweep", *, count: int) -> list[Sequence[int]]:
    """Returns `count` prompts of random token ids, always the same ones, to time if every example tests."""
    width = min(_MADE_TOKENS, sweep.settings.max_input_length)
    ids = np.random.default_rng(0).integers(_FIRST_ID, sweep.checkpoint.config.vocab_size, size=(count, width))
    return [tuple(map(int, row)) for row in ids]


# Pairs: minimum number of examples, number of candidates. Up to six candidates are tested separately, each at an equal
# share of epsilon; with more, some examples choose among them.
_CANDIDATES = ((0, 2), (500, 3), (1500, MOST_BY_THEMSELVES), (5000, 12))
# Prompts that are decoded to measure the cost of a token, or this many batches if they are more.
_PROMPTS, _BATCHES = 16, 2
# Half a microsecond.
_LEAST_SECONDS = 5e-7


class CannotChooseError(CalmBeamError):
    """The tool cannot choose how tokens exit; the reason is a clause."""


def with_candidates(
    request: CalibrateRequest, sweep: "PreparedSweep", *, output: str, runs_here: bool
) -> tuple[CalibrateRequest, CostRecord]:
    """Returns a request with the candidates to sweep, and the cost of a token.

    Args:
      request: A request with `--exits=auto`.
      sweep: A sweep by any rule, with the weights of the model.
      output: Directory of the result; a resumed run finds its earlier cost there.
      runs_here: Whether this machine decodes.

    Raises:
      CannotChooseError: If the model has no layer to exit from, or the given memory is too small.
    """
    config = sweep.checkpoint.config
    tried = list(
        _candidates(
            config.num_decoder_layers,
            has_classifier=bool(config.exit_classifier),
            decays=SCHEDULES[request.schedule].decays,
            tau=next(iter(listed(request.tau)), None),
        )
    )
    if len(tried) < 2:
        raise CannotChooseError(
            f"the decoder has {counted(config.num_decoder_layers, 'layer')}, of which nothing can exit early"
        )
    most, why = _most(request, sweep, runs_here=runs_here)
    if most < len(tried):
        say(_left_out_in_words(tried, most, why=why))
    tried = tried[:most]
    share = request.selection_share or (SELECTION_SHARE if len(tried) > MOST_BY_THEMSELVES else None)
    cost = _kept_or_found(request, sweep, tried, output=output, runs_here=runs_here, selection_share=share)
    costs = VariantCosts.of_record(cost, rule=sweep.settings.rule, layers=config.num_decoder_layers)
    chosen = tuple(each for each in tried if costs.at_mean(_lowest(each, sweep), each) < costs.full())
    if len(chosen) < 2:
        say("caution: by what was measured, no way of exiting can pay on this machine")
        chosen = tuple(tried)
    say(_in_words(cost))
    say(f"exits=auto: {'; '.join(variant.in_words() for variant in chosen)}")
    return dataclasses.replace(request, exits=request.AUTO, candidates=chosen), cost


def _most(request: CalibrateRequest, sweep: "PreparedSweep", *, runs_here: bool) -> tuple[int, str]:
    """Returns the largest number of candidates that examples, test and memory allow, and which of these allows no more.

    The latter is a clause.
    """
    examples = count_examples(sweep.data, at_most=_CANDIDATES[-1][0])
    count = max(most for least, most in _CANDIDATES if examples is None or examples >= least)
    enough = next((least for least, most in _CANDIDATES if most > count), None)
    why = "no more are tried" if enough is None else f"there are fewer than {enough:,} examples"
    whole = next((name for name in request.p_values if P_VALUES[name].needs_table), None)
    if whole is not None and count >= MOST_BY_THEMSELVES:
        # If some examples choose, their losses are only summed.
        count, why = MOST_BY_THEMSELVES, f"{whole} needs every single loss"
    for most in range(count, 1, -1):
        try:
            # One sweep decodes all of them.
            sweep.check_branches(most * (1 + len(sweep.settings.thresholds)), runs_here=runs_here)
        except ValueError:
            why = "there is memory for no more"
            continue
        return most, why
    raise CannotChooseError("there is memory for one way of exiting at a time, and not for two")


def _left_out_in_words(possible: Sequence[Variant], most: int, *, why: str) -> str:
    """Returns how many candidates are taken, why, and the first one of each measure that is left out altogether."""
    named = {variant.confidence for variant in possible[:most]}
    others = []
    for variant in possible[most:]:
        if variant.confidence not in named:
            named.add(variant.confidence)
            others.append(variant.in_words())
    also = f"; also possible: {'; '.join(others)}" if others else ""
    return (
        f"exits=auto: {most} of {counted(len(possible), 'candidate')}, since {why}{also} (docs/guarantee.md, "
        '"Exits that the tool chooses")'
    )


def _candidates(depth: int, *, has_classifier: bool, decays: bool, tau: float | None) -> Iterator[Variant]:
    """Yields candidates, the most promising first: each differs in the choice of layers, or in the measure."""
    quarter = max(1, round(depth / 4))
    learned = ["classifier"] if has_classifier else []
    tried: list[tuple[str, int, int]] = [
        ("softmax", quarter, quarter),
        ("static", 1, 1),
        ("softmax", 2 * quarter, 2 * quarter),
        *((name, quarter, quarter) for name in learned),
        ("softmax", 3 * quarter, quarter),
        ("state", 2, 1),
        ("softmax", 2 * quarter, quarter),
        ("state", quarter, quarter),
        ("softmax", 1, 1),
        *((name, 2 * quarter, quarter) for name in [*learned, "state"]),
        ("softmax", quarter, 2 * quarter),
        ("softmax", 2 * quarter, 1),
        *((name, 2, 1) for name in learned),
    ]
    seen = set()
    for measure, lowest, interval in tried:
        if lowest >= depth or (decays and not MEASURES[measure].takes_schedule):
            continue
        rule = ExitRule(confidence=measure, min_exit_layer=lowest, exit_interval=interval)
        # The state below the first layer is uninformative.
        layers = tuple(layer for layer in rule.exit_layers(depth) if measure != "state" or layer > 1)
        if len(layers) > 1 and (measure, layers) not in seen:
            seen.add((measure, layers))
            yield Variant(tau=tau, confidence=measure, min_exit_layer=lowest, exit_interval=interval)


def _lowest(variant: Variant, sweep: "PreparedSweep") -> int:
    """Returns the lowest layer that a variant lets exit."""
    rule = dataclasses.replace(sweep.settings.rule, **variant.fields_of_rule())
    return rule.exit_layers(sweep.checkpoint.config.num_decoder_layers)[0]


def _kept_or_found(
    request: CalibrateRequest,
    sweep: "PreparedSweep",
    tried: Sequence[Variant],
    *,
    output: str,
    runs_here: bool,
    selection_share: float | None,
) -> CostRecord:
    """Returns the cost of a token: as stored, or measured if seconds are asked for.

    If some examples choose, the first measurement for an output directory is kept. Another measurement could choose
    another path, which would be another hypothesis for the examples that test, and no list of plans would show it.
    """
    depth = sweep.checkpoint.config.num_decoder_layers
    if request.objective_name == LAYERS:
        return _record(TokenCost.of_layers(depth), unit=UNITS[LAYERS])
    why_not = None if runs_here else "other machines decode, whose time is not measured"
    if sweep.request.model_parallelism > 1:
        why_not = "several devices share the model, and no time is measured of these"
    if request.objective_name == FLOPS or why_not:
        if request.objective_name != FLOPS:
            say(f"exits=auto: {why_not}: operations are counted instead")
        return _record(operations_cost(DecoderSizes.of(sweep.checkpoint.config)), unit=UNITS[FLOPS])
    if request.resume or selection_share is not None:
        kept = read_cost(output, model=sweep.model_fingerprint)
        if kept is not None and (kept.unit, kept.batch) == (UNITS[LATENCY], request.objective_batch):
            say(f"exits=auto: the cost of a token was measured before, and is in {joined(output, COST_FILE)}")
            return kept
    return _measured(request, sweep, tried, selection_share=selection_share)


def _measured(
    request: CalibrateRequest, sweep: "PreparedSweep", tried: Sequence[Variant], *, selection_share: float | None
) -> CostRecord:
    """Returns the cost of a token in seconds on this machine."""
    # Imported here, since they load JAX.
    from calm_beam.decoding.compilation import use_compilation_cache
    from calm_beam.evaluation.serving_speed import MEASURED, Serving, measured_cost

    use_compilation_cache()
    serving = Serving.of(sweep, batch=request.objective_batch)
    if serving.load > serving.cores:
        say(
            f"caution: this machine is busy (load {serving.load:.1f} on {serving.cores} cores), so that what is "
            "measured is uncertain: calibrate when it is idle, or pass --objective=layers"
        )
    needs = {measure_named(variant.confidence).needs for variant in tried if variant.confidence is not None}
    # Examples that test must not influence the choice of candidates, not even through the time they take.
    count = max(_PROMPTS, _BATCHES * serving.batch)
    if selection_share is None:
        prompts = made_prompts(sweep, count=count)
    else:
        prompts = first_prompts(request, sweep, count=count, parts=(CHOOSING,), selection_share=selection_share)
    first = tried[0]
    say("exits=auto: measuring what a token costs here")
    with shown_progress(enabled=True) as progress:
        cost = measured_cost(
            serving,
            prompts,
            needs=[need for need in MEASURED if need in needs],
            exits=ExitRule(min_exit_layer=first.min_exit_layer, exit_interval=first.exit_interval or 1),
            on_decoded=timing_in(progress),
        )
    return dataclasses.replace(
        _record(cost, unit="seconds"),
        batch=serving.batch,
        device=serving.device,
        cores=serving.cores,
        engine=serving.engine(),
    )


def _record(cost: TokenCost, *, unit: str) -> CostRecord:
    record = CostRecord(unit=unit, layer=float(cost.layer), skipped=float(cost.skipped), output=float(cost.output))
    tests: dict[str, Any] = tests_by_name(cost)
    return dataclasses.replace(record, **tests)


def _in_words(cost: CostRecord) -> str:
    """Returns a sentence about the cost of a token."""
    if not cost.was_measured:
        return f"exits=auto: by {cost.unit}"
    tests = [
        f"a test of {name} {_microseconds(value)}"
        for name, value in (
            ("logits", cost.logits_test),
            ("states", cost.states_test),
            ("the classifier", cost.classifier_test),
        )
        if value is not None
    ]
    together = "one prompt at a time" if cost.batch == 1 else f"{cost.batch} prompts at a time"
    return (
        f"exits=auto: {together}, a token takes {_microseconds(cost.output)} microseconds here without its "
        f"layers, each layer {_microseconds(cost.layer)}, {', '.join(tests)}"
    )


def _microseconds(seconds: float) -> str:
    """Returns a time in microseconds; one that vanished among others was too short to measure, and is not 0."""
    return f"{1e6 * seconds:.0f}" if seconds >= _LEAST_SECONDS else "less than 1"
