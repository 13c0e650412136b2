"""What a token costs in seconds on this machine, by the engine that serves: measured in a short run of known exits.

A few prompts are decoded by the full model, and by each measure at a few thresholds, which share what is compiled. How
long each took, how many tokens it gave, how many layers these went through and how often they were tested are known
afterwards; the seconds of each are those that explain all runs best. A layer skipped costs what makes its keys and
values; that is paid for every layer that is not gone through, so that only the difference to a layer gone through can
be told, and it stands in `layer`, with all the rest in `output`.
"""

import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from calm_beam.exits.measures import MEASURES, Need
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.token_cost import TokenCost, tests_at

from .serving_speed import ServedDecoder, Serving

MEASURED = (Need.LOGITS, Need.STATES, Need.CLASSIFIER)
"""What exit tests are made of whose time is measured; static layers test nothing."""
# Nothing leaves at the first, some tokens do at the second, and all leave at the last, at the lowest exit layer.
_THRESHOLDS = {Need.LOGITS: (1.0, 0.9, 0.0), Need.STATES: (1.0, 0.95, 0.0), Need.CLASSIFIER: (1.0, 0.9, 0.0)}
_MOST_ROUNDS, _ENOUGH_SECONDS = 5, 2.0


class _Run(NamedTuple):
    """One way of decoding: what it does, and what all that comes to."""

    rule: ExitRule
    decoder: ServedDecoder
    tokens: int
    layers: int
    tests: int


def measured_cost(
    serving: Serving,
    prompts: Sequence[Sequence[int]],
    *,
    needs: Collection[Need],
    exits: ExitRule,
    clock: Callable[[], float] = time.perf_counter,
) -> TokenCost:
    """Returns what a token costs in seconds, of so many prompts at a time.

    Args:
      serving: How the model serves.
      prompts: Token ids of each, at least one; the more, the less what else the machine does counts.
      needs: Of `MEASURED`, at least one: tests that are measured.
      exits: Where they are made: its lowest layer and its interval.
      clock: Returns seconds.

    Raises:
      ValueError: If there are no prompts, or no tests.

    Source: least squares of relative errors; seconds are not negative.
    """
    if not prompts:
        raise ValueError("measuring needs at least one prompt, got none.")
    if not needs:
        raise ValueError("measuring needs at least one kind of exit test, got none.")
    depth = serving.checkpoint.config.num_decoder_layers
    ways: list[tuple[ExitRule, float | None]] = [(ExitRule(confidence="static"), None)]
    for need in needs:
        measure = next(each.name for each in MEASURES.values() if each.needs is need)
        rule = ExitRule(confidence=measure, min_exit_layer=exits.min_exit_layer, exit_interval=exits.exit_interval)
        ways += [(rule, threshold) for threshold in _THRESHOLDS[need]]
    # Compiles, and counts what each does.
    runs = [_counted(rule, serving.decoder(rule, threshold), prompts, depth=depth) for rule, threshold in ways]
    # Of each part the fastest round counts: what else the machine does only adds to it.
    parts = [prompts[start : start + serving.batch] for start in range(0, len(prompts), serving.batch)]
    seconds = np.full((len(runs), len(parts)), np.inf)
    began = clock()
    for turn in range(_MOST_ROUNDS):
        for at, part in enumerate(parts):
            for index, run in enumerate(runs):
                start = clock()
                for _ in run.decoder.decode(part):
                    pass
                seconds[index, at] = min(seconds[index, at], clock() - start)
        if turn and clock() - began > _ENOUGH_SECONDS:
            break
    rows = [
        [
            len(prompts),
            run.tokens,
            run.layers,
            *(run.tests if run.rule.measure().needs is need else 0 for need in needs),
        ]
        for run in runs
    ]
    known = np.array(rows, float) / seconds.sum(axis=1)[:, None]
    (prompt, token, layer, *tests), _ = nnls(known, np.ones(len(runs)))
    return TokenCost(
        layers=depth,
        layer=float(layer),
        # Of outputs as long as the full model's.
        output=float(token + prompt * len(prompts) / max(1, runs[0].tokens)),
        tests={need: float(test) for need, test in zip(needs, tests, strict=True)},
    )


def _counted(rule: ExitRule, decoder: ServedDecoder, prompts: Sequence[Sequence[int]], *, depth: int) -> _Run:
    tests = [tests_at(layer, rule, layers=depth) for layer in range(1, depth + 1)]
    layers = np.concatenate([result.exit_layers[: result.length] for result in decoder.decode(prompts)]).astype(int)
    return _Run(
        rule=rule,
        decoder=decoder,
        tokens=len(layers),
        layers=int(layers.sum()),
        tests=int(np.array(tests)[layers - 1].sum()),
    )
