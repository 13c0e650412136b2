"""What the exit tests at chosen thresholds cost."""

from collections.abc import Iterator

from calm_beam.evaluation.flops import DecoderSizes, share_at_mean
from calm_beam.exits.measures import Need, measure_named
from calm_beam.exits.rule import ExitRule
from calm_beam.manifest import Manifest
from calm_beam.text import printable_line


def price_of_tests(manifest: Manifest, sizes: DecoderSizes | None) -> Iterator[str]:
    """Yields that exit tests cost more than exits save, where a threshold is promised for which they do.

    Args:
      manifest: The result.
      sizes: Of the model; None if it was not loaded, and nothing can be counted.
    """
    decode = manifest.decode
    # With variants there are several rules; with distances between exits, mean layers do not tell the tests.
    is_counted = decode.exit_interval == 1 and all(entry.variant is None for entry in manifest.calibrations)
    if sizes is None or not is_counted or measure_named(decode.confidence).needs is not Need.LOGITS:
        return
    rule = ExitRule(confidence=decode.confidence, min_exit_layer=decode.min_exit_layer)
    chosen = [entry.layers for entry in manifest.calibrations if entry.threshold is not None]
    shares = sorted(share_at_mean(layers, sizes, rule=rule) for layers in chosen)
    if shares and shares[-1] > 1:
        ends = dict.fromkeys(f"{share:.0%}" for share in (shares[0], shares[-1]))
        yield (
            f"Layers are not all that counts: with its tests, {printable_line(decode.confidence)} takes "
            f"{' to '.join(ends)} of the full model's operations at these thresholds. calm-beam suitability forecasts "
            "which layers had better exit; calibrate those on other examples, since these have been looked at."
        )
