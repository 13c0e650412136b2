"""Risk control of your own losses: which of several settings is proved to cost at most delta?

Any setting that trades quality for cost can be used: bits of a quantised model, an exit threshold of another stack, a
token budget. Losses are in [0, 1], one for each example and setting, however they were computed.

    python examples/certify_losses.py
"""

import random

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

import calm_beam as calm
from calm_beam import transforms
from calm_beam.risk.testing import SettingResult

# Fixed before any loss is seen: the safest setting first. Tests go down the list and stop at the first failure.
ORDER = ("8 bits", "6 bits", "4 bits", "3 bits")
TESTS = (calm.RiskTest(delta=0.05, epsilon=0.05), calm.RiskTest(delta=0.1, epsilon=0.05))


def losses() -> list[tuple[str, str, float]]:
    """Returns (id, setting, loss) of 2,000 simulated examples: the fewer bits, the more often one is wrong."""
    draw = random.Random(0)
    wrong = dict(zip(ORDER, (0.01, 0.03, 0.07, 0.2), strict=True))
    return [
        (f"example-{index}", setting, float(draw.random() < share))
        for index in range(2000)
        for setting, share in wrong.items()
    ]


def tell(result: SettingResult) -> None:
    """Prints what is proved about a setting."""
    verdict = "proved safe" if result.accepted else "not proved"
    delta, risk, p_value = result.test.delta, result.risk, result.p_value
    print(f"delta {delta:<5g} {result.setting:<7} risk {risk:.4f}  p {p_value:.2g}  {verdict}")


def main() -> None:
    """Tests every setting."""
    with beam.Pipeline(options=PipelineOptions([])) as pipeline:
        _ = (
            pipeline
            | beam.Create(losses())
            # Exact sums, whatever the order, the sharding or the number of workers. An id with two losses under a
            # setting ends the run: if a source repeats whole rows, remove duplicates with beam.Distinct() first.
            | beam.CombineGlobally(transforms.SumLosses(TESTS))
            | transforms.ControlRisk(TESTS, order=ORDER)
            | beam.Map(tell)
        )


if __name__ == "__main__":
    main()
