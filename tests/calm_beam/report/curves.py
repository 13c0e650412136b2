"""Results of every shape, as the data of a page."""

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

_DELTA = 0.05
_NOT_TESTED, _ACCEPTED, _NOT_ACCEPTED = 0, 1, 2

# Risks over the grid, by the share of it that is above.
_SHAPES = {
    "steep": lambda share: 3 * share**2,
    "flat": lambda share: 0.0,
    "at delta": lambda share: _DELTA,
    "near delta": lambda share: _DELTA * (0.8 + 0.4 * share),
    "better": lambda share: -0.2 * share,
    "jump": lambda share: 0.6 if share else 0.0,
}


def result_of_every_shape(content: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the data of a page with other results, and the speciality of each.

    Args:
      content: Data of a page; its outputs are removed.
    """
    for (shape, risk_at), size in itertools.product(_SHAPES.items(), (1, 20, 100)):
        for chosen in sorted({0, 1, size - 1, size}):
            risks = [risk_at(place / size) for place in range(size + 1)]
            yield f"{shape}, {chosen} of {size}", _with_result(content, risks, chosen=chosen)


def _with_result(content: dict[str, Any], risks: Sequence[float], *, chosen: int) -> dict[str, Any]:
    """Returns data with one promise with these risks, and tests that stopped right below the choice."""
    size = len(risks) - 1
    changed = copy.deepcopy(content)
    thresholds = [round(1 - place / size, 6) for place in range(size)]
    tests = [_NOT_TESTED] + [_ACCEPTED] * chosen + [_NOT_TESTED] * (size - chosen)
    if chosen < size:
        tests[chosen + 1] = _NOT_ACCEPTED
    entry = {
        **changed["entries"][0],
        "objective": 0,
        "delta": _DELTA,
        "chosen": chosen,
        "threshold": thresholds[chosen - 1] if chosen else None,
        "risk": risks[chosen],
        "layers": 4.0 - 2 * chosen / size,
        "tests": tests,
        "pValues": [None, *(0.01 if test == _ACCEPTED else 0.5 for test in tests[1:])],
    }
    # Tolerances that are close together, with values that are too.
    others = [
        {**entry, "delta": round(_DELTA + 0.001 * step, 6), "layers": 2 + step % 3 / 100} for step in range(1, size)
    ]
    return {
        **changed,
        "thresholds": thresholds,
        "gridSize": size,
        "planned": size,
        "layers": [4.0 - 2 * place / size for place in range(size + 1)],
        "objectives": [{**changed["objectives"][0], "risks": list(risks)}],
        "entries": [entry, *others[:12]],
        **{"exits": None, "savings": None, "sample": None, "speedups": None, "pieces": [], "examples": []},
    }
