"""The power of each method on the same outputs: layers of the threshold that it proves safe.

Reads the output directory of `calm-beam calibrate`, so that nothing is decoded again:

    python -m benchmarks.power --calibration=calibration --metric=rouge_l_unicode

Comparing methods on one calibration set and then taking the best voids the guarantee: settle the method on another set.
"""

import argparse
import csv
import pathlib
from collections.abc import Iterable

import numpy as np

from calm_beam.metrics.registry import Metric, checked_score, get_metric
from calm_beam.outputs import Generation, read_generations
from calm_beam.risk.evidence import BettingTable, EvidenceError
from calm_beam.risk.fwer import PROCEDURES
from calm_beam.risk.losses import LOSS_SCALE, signed_risk_loss, textual_loss, to_signed_fixed_point
from calm_beam.risk.pvalues import P_VALUES, p_values_of


def main() -> None:
    """Prints the layers by consistency, loss, p-value, procedure and tolerance."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--calibration", type=pathlib.Path, required=True, help="output directory of calibrate")
    parser.add_argument("--metric", default="rouge_l_unicode")
    parser.add_argument("--delta", default=".02,.05,.1,.25", help="tolerances, comma-separated")
    parser.add_argument("--epsilon", type=float, default=0.05)
    parser.add_argument("--procedure", default="fixed_sequence", help=f"of {', '.join(PROCEDURES)}; comma-separated")
    flags = parser.parse_args()
    deltas = [float(delta) for delta in flags.delta.split(",")]
    thresholds = _thresholds(flags.calibration / "risk_table.csv")
    generations = _generations(flags.calibration)
    layers = _mean_layers(generations)
    losses = _losses(generations, get_metric(flags.metric), name=flags.metric)
    print(f"{len(generations)} examples, {len(thresholds)} thresholds, {flags.metric}, epsilon {flags.epsilon:g}")
    print("mean layers (threshold) of the lowest threshold proved safe\n")
    print(f"| loss | p-value | procedure | {' | '.join(f'delta {delta:g}' for delta in deltas)} |")
    print(f"|---|---|---|{'---:|' * len(deltas)}")
    for loss, table in losses.items():
        for p_value in P_VALUES:
            if (table < 0).any() and not P_VALUES[p_value].takes_signed:
                continue
            for procedure in flags.procedure.split(","):
                try:
                    cells = [
                        _cell(
                            table,
                            p_value,
                            procedure=procedure,
                            delta=delta,
                            epsilon=flags.epsilon,
                            thresholds=thresholds,
                            layers=layers,
                        )
                        for delta in deltas
                    ]
                except EvidenceError:
                    break
                print(f"| {loss} | {p_value} | {procedure} | {' | '.join(cells)} |")


def losses_of_calibration(calibration: pathlib.Path, *, metric: str) -> dict[str, np.ndarray]:
    """Returns the losses by name, shape (examples, thresholds), of what `calm-beam calibrate` left in a directory."""
    return _losses(_generations(calibration), get_metric(metric), name=metric)


def _generations(calibration: pathlib.Path) -> list[Generation]:
    return [item for path in sorted(calibration.glob("generations/*/*.parquet")) for item in read_generations(path)]


def _cell(
    losses: np.ndarray,
    p_value: str,
    *,
    procedure: str,
    delta: float,
    epsilon: float,
    thresholds: list[float],
    layers: np.ndarray,
) -> str:
    chosen = int(
        PROCEDURES[procedure](p_values_of(losses, p_value=p_value, delta=delta), epsilon=epsilon).last_rejected()
    )
    return f"{layers[0]:.2f} (never)" if chosen < 0 else f"{layers[1 + chosen]:.2f} ({thresholds[chosen]:g})"


def _thresholds(path: pathlib.Path) -> list[float]:
    """Returns the grid, descending."""
    with open(path, encoding="utf-8", newline="") as file:
        return sorted({float(row["threshold"]) for row in csv.DictReader(file)}, reverse=True)


def _mean_layers(generations: Iterable[Generation]) -> np.ndarray:
    """Returns layers per token, of the full model and then at every threshold."""
    decoded = [item.outputs for item in generations if item.failure is None]
    layers = np.array([[sum(output.exit_layers) for output in outputs] for outputs in decoded])
    tokens = np.array([[len(output.tokens) for output in outputs] for outputs in decoded])
    return layers.sum(axis=0) / tokens.sum(axis=0)


def _losses(generations: list[Generation], metric: Metric, *, name: str) -> dict[str, np.ndarray]:
    """Returns the losses by name, shape (examples, thresholds), in a random but fixed order."""
    rows = []
    for item in generations:
        if item.failure is not None:
            raise SystemExit(f"example {item.example.id} failed: calibrate without failures first.")
        texts = [output.text for output in item.outputs]
        textual, risk = (
            {
                text: checked_score(metric, name, candidate=text, references=references, example_id=item.example.id)
                for text in set(texts)
            }
            for references in ((texts[0],), item.example.references)
        )
        signed = signed_risk_loss(early_score=[risk[text] for text in texts[1:]], full_score=risk[texts[0]])
        rows.append([textual_loss([textual[text] for text in texts[1:]]), np.maximum(0, signed), signed])
    keys = [item.example.id for item in generations]
    table = BettingTable.of(keys, to_signed_fixed_point(np.array(rows)), salt="power").in_order() / LOSS_SCALE
    return {"textual": table[:, 0], "risk, ReLU": table[:, 1], "risk, signed": table[:, 2]}


if __name__ == "__main__":
    main()
