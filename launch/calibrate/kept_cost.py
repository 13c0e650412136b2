"""What a token costs, kept in an output directory so that a run that goes on chooses by the same; in no digest."""

import json

from calm_beam.errors import UsageError
from calm_beam.manifest import CostRecord
from calm_beam.storage import is_file, joined, open_input, replacing, strict_json

COST_FILE = "token_cost.json"


def write_cost(output: str, cost: CostRecord, *, model: str) -> None:
    """Keeps what a token costs in an output directory; `model` is the fingerprint of the model."""
    with replacing(joined(output, COST_FILE), overwrite=True) as temporary:
        temporary.write_text(json.dumps({"model": model, **cost.to_dict()}, indent=1) + "\n", encoding="utf-8")


def read_cost(output: str, *, model: str) -> CostRecord | None:
    """Returns what a token costs as an earlier run has settled it; None if none has, of this model.

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
        raise UsageError(f"{path}: is not as calm-beam writes it ({error}). Begin anew with --overwrite.") from error
