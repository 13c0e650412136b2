"""Specs and objectives: what is asked for, checked."""

import math
from typing import Any

import pytest

from calm_beam.calibration.specs import Objective, Spec


@pytest.mark.parametrize("value", [0, 1, -0.1, 5, math.nan, math.inf])
@pytest.mark.parametrize("name", ["delta", "epsilon"])
def test_tolerances_are_fractions(name: str, value: float) -> None:
    """Delta and epsilon outside (0, 1) are refused with the value and an example."""
    values: dict[str, Any] = {"delta": 0.1, "epsilon": 0.05, name: value}
    with pytest.raises(ValueError, match=rf"{name} must be in \(0, 1\), got {value}\..*pass {name}=0.05"):
        Spec(objective=Objective("textual", "rouge_l", loss="dissimilarity"), p_value="hoeffding", **values)


def test_unknown_consistency() -> None:
    """An unknown kind of consistency is refused, and the known ones are listed."""
    with pytest.raises(ValueError, match="consistency must be one of textual, risk; got 'lexical'"):
        Objective("lexical", "rouge_l", loss="dissimilarity")


def test_losses_belong_to_their_consistency() -> None:
    """Textual consistency has one loss, risk consistency two, and neither has the other's."""
    assert not Objective("risk", "rouge_l", loss="relu").is_signed
    assert Objective("risk", "rouge_l", loss="signed").is_signed
    with pytest.raises(ValueError, match="loss must be one of dissimilarity for textual consistency; got 'relu'"):
        Objective("textual", "rouge_l", loss="relu")
    with pytest.raises(ValueError, match="loss must be one of signed, relu for risk consistency; got 'dissimilarity'"):
        Objective("risk", "rouge_l", loss="dissimilarity")
