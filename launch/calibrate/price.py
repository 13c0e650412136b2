"""What the exit tests at chosen thresholds cost."""

from collections.abc import Iterator, Sequence

from calm_beam.decoding.recorded import recorded_settings
from calm_beam.evaluation.flops import DecoderSizes, share_at_mean
from calm_beam.manifest import Manifest
from calm_beam.text import printable_line


def shares_of_operations(manifest: Manifest, sizes: DecoderSizes | None) -> tuple[float | None, ...]:
    """Returns for each entry what decoding takes of the full model's operations, exit tests included.

    Args:
      manifest: The result.
      sizes: Of the model; None if it was not loaded, and nothing can be counted.

    Returns:
      Shares, above 1 where tests cost more than exits save; None for an entry that never exits, and for all where the
      mean of the layers does not tell how many tests there were.
    """
    decode = manifest.decode
    # With variants there are several rules; with distances between exits, mean layers do not tell the tests.
    is_counted = decode.exit_interval == 1 and all(entry.variant is None for entry in manifest.calibrations)
    if sizes is None or not is_counted:
        return (None,) * len(manifest.calibrations)
    rule = recorded_settings(decode, (0.0,)).rule
    return tuple(
        None if entry.threshold is None else share_at_mean(entry.layers, sizes, rule=rule)
        for entry in manifest.calibrations
    )


def price_of_tests(manifest: Manifest, shares: Sequence[float | None]) -> Iterator[str]:
    """Yields that exit tests cost more than exits save, where a threshold is promised for which they do."""
    dearest = max((share for share in shares if share is not None), default=0)
    if dearest > 1:
        yield (
            f"At some thresholds, the tests of {printable_line(manifest.decode.confidence)} cost more operations than "
            "exits save. calm-beam suitability forecasts which layers had better exit; calibrate those on other "
            "examples, since these have been looked at."
        )
