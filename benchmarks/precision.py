"""The effect of bfloat16 on a calibration and on served outputs, compared with float32.

    python -m benchmarks.precision --checkpoint=model/ --data=validation.jsonl.gz --prompts=5000

For each type: the thresholds that Hoeffding-Bentkus and fixed sequence testing choose (textual consistency, ROUGE-L on
letters of all scripts), with their layers. Then the full model and every threshold chosen are decoded twice more, in
batches and one prompt at a time, as they are served: how many outputs are not the sweep's, in a token or an exit layer,
and the mean loss of each way, against the full model decoded in that way.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from calm_beam.checkpoints import Checkpoint, load_checkpoint
from calm_beam.decoding.branches import Branch, BranchResult, PromptResult, Request, sweep_branches
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.memory import keep_freed_memory
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.decoding.single_prompts import single_prompt_decoder
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.thresholds import descending_grid
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary
from calm_beam.metrics.rouge_l import rouge_l_unicode
from calm_beam.precision import DTYPES, Precision
from calm_beam.risk.fwer import fixed_sequence_test
from calm_beam.risk.pvalues import p_values_of

from .machine import describe_machine
from .prompts import read_prompts

_EPSILON = 0.05
_Result = TypeVar("_Result")
# What a way of decoding gave a prompt at a threshold: tokens and exit layers.
Output = tuple[tuple[int, ...], tuple[int, ...]]


def main() -> None:
    """Prints, for each type, what is chosen, which outputs differ, and the losses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--data", required=True, help="JSONL")
    parser.add_argument("--prompts", type=int, default=5000)
    parser.add_argument("--alone", type=int, help="decode only so many of them one at a time; default: all")
    parser.add_argument("--confidence", default="softmax")
    parser.add_argument("--thresholds", default="0.99,0.97,0.95,0.9,0.85,0.8,0.75,0.7,0.65,0.6,0.55,0.5,0.45,0.4")
    parser.add_argument("--deltas", default="0.05,0.1,0.25")
    parser.add_argument("--max_input_length", type=int, default=512)
    parser.add_argument("--max_decode_length", type=int, default=64)
    flags = parser.parse_args()
    keep_freed_memory()
    checkpoint = load_checkpoint(flags.checkpoint)
    assert checkpoint.vocabulary_path is not None, "losses are of texts"
    vocabulary = Vocabulary(checkpoint.vocabulary_path)
    settings = DecodeSettings(
        rule=ExitRule(confidence=flags.confidence),
        thresholds=descending_grid(map(float, flags.thresholds.split(","))),
        max_input_length=flags.max_input_length,
        max_decode_length=flags.max_decode_length,
    )
    prompts = read_prompts(flags.data, checkpoint, settings=settings, count=flags.prompts)
    print(f"{describe_machine()}\n{len(prompts)} prompts, confidence {flags.confidence}", flush=True)
    full: dict[str, list[Output]] = {}
    for dtype in DTYPES:
        measured = _Measured(checkpoint, settings, prompts, vocabulary=vocabulary, dtype=dtype)
        chosen = measured.choose([float(delta) for delta in flags.deltas.split(",")])
        measured.compare(chosen, alone=flags.alone or len(prompts))
        full[dtype] = [_output_of(result, 0) for result in measured.sweep]
    changed = sum(one != other for one, other in zip(*full.values(), strict=True))
    losses = [measured.loss(one, other) for one, other in zip(*full.values(), strict=True)]
    print(
        f"the full model's outputs in {' and '.join(full)}: {changed} of {len(losses)} differ, mean distance "
        f"{np.mean(losses):.4f}"
    )


class _Measured:
    """The results in one dtype."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: DecodeSettings,
        prompts: Sequence[Sequence[int]],
        *,
        vocabulary: Vocabulary,
        dtype: str,
    ) -> None:
        self._checkpoint, self._settings, self._prompts = checkpoint, settings, prompts
        self._vocabulary, self._dtype, self._precision = vocabulary, dtype, Precision(dtype=dtype)
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}
        start = time.perf_counter()
        decoder = Decoder(
            checkpoint,
            sweep_branches(settings.rule, settings.thresholds, max_decode_length=settings.max_decode_length),
            max_input_length=settings.max_input_length,
            precision=self._precision,
        )
        self.sweep = _in_order(dict(decoder.decode(prompts)))
        seconds = time.perf_counter() - start
        print(f"\n{dtype}: sweep of {len(settings.thresholds)} thresholds {seconds:.0f} s", flush=True)

    def choose(self, deltas: Sequence[float]) -> list[float]:
        """Returns the thresholds that are chosen, having printed them."""
        places = range(1, len(self._settings.thresholds) + 1)
        losses = np.array(
            [[self.loss(_output_of(result, 0), _output_of(result, place)) for place in places] for result in self.sweep]
        )
        layers = [
            float(np.concatenate([_output_of(result, place)[1] for result in self.sweep]).mean())
            for place in (0, *places)
        ]
        chosen = []
        for delta in deltas:
            p_values = p_values_of(losses, p_value="hoeffding_bentkus", delta=delta)
            count = int(fixed_sequence_test(p_values, epsilon=_EPSILON).rejected.sum())
            threshold = self._settings.thresholds[count - 1] if count else None
            if threshold is None:
                print(f"  delta {delta:g}: never exit")
                continue
            loss = losses[:, count - 1].mean()
            print(
                f"  delta {delta:g}: threshold {threshold:g}, loss {loss:.4f}, {layers[count]:.2f} layers", flush=True
            )
            if threshold not in chosen:
                chosen.append(threshold)
        return chosen

    def compare(self, chosen: Sequence[float], *, alone: int) -> None:
        """Prints which outputs of a batch, and of single prompts, are not the sweep's, and the losses of all ways."""
        thresholds = [None, *chosen]
        places = [0, *(1 + self._settings.thresholds.index(threshold) for threshold in chosen)]
        rule, steps = self._settings.rule, self._settings.max_decode_length
        branches = [Branch.at(rule, threshold, max_decode_length=steps) for threshold in thresholds]
        ways = {
            "sweep": {place: [_output_of(result, place) for result in self.sweep] for place in places},
            "batch": dict(zip(places, self._in_batches(branches), strict=True)),
            "alone": dict(zip(places, self._alone(branches, alone), strict=True)),
        }
        for way, outputs in ways.items():
            for place, threshold in zip(places, thresholds, strict=True):
                found, count = outputs[place], len(outputs[place])
                differ = sum(one != other for one, other in zip(found, ways["sweep"][place], strict=False))
                loss, of_sweep = (
                    np.mean([self.loss(*pair) for pair in zip(some[0][:count], some[place][:count], strict=True)])
                    for some in (outputs, ways["sweep"])
                )
                where = "full model" if threshold is None else f"threshold {threshold:g}"
                print(f"  {way}, {where}: {differ} of {count} outputs are not the sweep's; ", end="")
                print(f"loss {loss:.5f}, the sweep's of these prompts {of_sweep:.5f}", flush=True)

    def _in_batches(self, branches: Sequence[Branch]) -> list[list[Output]]:
        decoder = Decoder(
            self._checkpoint,
            branches[:1],
            max_input_length=self._settings.max_input_length,
            precision=self._precision,
        )
        return [
            [
                _output(result.branch(0))
                for result in _in_order(
                    dict(decoder.decode([Request(prompt, branches=[branch]) for prompt in self._prompts]))
                )
            ]
            for branch in branches
        ]

    def _alone(self, branches: Sequence[Branch], count: int) -> list[list[Output]]:
        first = single_prompt_decoder(
            self._checkpoint,
            branches[0],
            max_input_length=self._settings.max_input_length,
            precision=self._precision,
        )
        return [
            [_output(result) for result in _in_order(dict(first.at(branch).decode(self._prompts[:count])))]
            for branch in branches
        ]

    def loss(self, one: Output, other: Output) -> float:
        """Returns how far two outputs are apart as texts."""
        pair = one[0], other[0]
        if pair not in self._known:
            reference, candidate = (self._vocabulary.decode(tokens) for tokens in pair)
            self._known[pair] = 1 - rouge_l_unicode(candidate, [reference])
        return self._known[pair]


def _in_order(results: Mapping[int, _Result]) -> list[_Result]:
    return [results[index] for index in range(len(results))]


def _output_of(result: PromptResult, place: int) -> Output:
    length = int(result.lengths[place])
    return tuple(result.tokens[place, :length].tolist()), tuple(result.exit_layers[place, :length].tolist())


def _output(result: BranchResult) -> Output:
    return tuple(result.tokens[: result.length].tolist()), tuple(result.exit_layers[: result.length].tolist())


if __name__ == "__main__":
    main()
