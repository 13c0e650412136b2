"""What decoding counts, as Beam metrics whose names carry their units."""

import dataclasses
from collections.abc import Iterable, Sequence

from apache_beam.metrics import Metrics

from calm_beam.generations import Generation

NAMESPACE = "calm_beam"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeCounts:
    """What one call of the decoder did.

    Attributes:
      prompts: Prompts decoded.
      tokens: Tokens generated, over the full model and all thresholds.
      layer_rows: Tokens computed, times decoder layers, over all lanes and with padding.
      padded_rows: Those of `layer_rows` whose result was thrown away: of lanes that wait for others of their prompt.
      seconds: How long it took, compilation included.
    """

    prompts: int
    tokens: int
    layer_rows: int
    padded_rows: int
    seconds: float

    @classmethod
    def of_generations(cls, generations: Iterable[Generation], *, seconds: float) -> "DecodeCounts":
        """Returns the counts of a decoder that runs every layer in every lane until the prompt's last lane ends."""
        prompts = tokens = layer_rows = used_rows = 0
        for generation in generations:
            prompts += 1
            if not generation.outputs:
                continue
            lengths = [len(output.tokens) for output in generation.outputs]
            # The full model never exits, so its exit layer is the last one.
            num_layers = generation.outputs[0].exit_layers[0]
            tokens += sum(lengths)
            used_rows += sum(lengths) * num_layers
            layer_rows += max(lengths) * len(lengths) * num_layers
        return cls(
            prompts=prompts, tokens=tokens, layer_rows=layer_rows, padded_rows=layer_rows - used_rows, seconds=seconds
        )


class DecodeMetrics:
    """Beam's counters of decoding; pickled with the DoFn that counts."""

    def __init__(self) -> None:
        self._prompts = Metrics.counter(NAMESPACE, "decoded-prompts")
        self._tokens = Metrics.counter(NAMESPACE, "generated-tokens")
        self._layer_rows = Metrics.counter(NAMESPACE, "layer-rows")
        self._padded_rows = Metrics.counter(NAMESPACE, "padded-layer-rows")
        self._failures = Metrics.counter(NAMESPACE, "failed-prompts")
        self._call_msec = Metrics.distribution(NAMESPACE, "decode-call-msec")
        self._load_msec = Metrics.distribution(NAMESPACE, "model-load-msec")

    def count_call(self, counts: DecodeCounts) -> None:
        """Adds one call of the decoder."""
        self._prompts.inc(counts.prompts)
        self._tokens.inc(counts.tokens)
        self._layer_rows.inc(counts.layer_rows)
        self._padded_rows.inc(counts.padded_rows)
        self._call_msec.update(round(1000 * counts.seconds))

    def count_failures(self, generations: Iterable[Generation]) -> None:
        """Adds the examples that could not be decoded, before the decoder or by it."""
        self._failures.inc(sum(generation.failure is not None for generation in generations))

    def count_loads(self, msecs: Sequence[int]) -> None:
        """Adds models that were loaded, each with the time it took."""
        for msec in msecs:
            self._load_msec.update(msec)
