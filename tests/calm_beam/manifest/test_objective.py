"""Objectives: the known losses, checked."""

import pytest

from calm_beam.manifest import Objective


def test_unknown_consistency() -> None:
    """An unknown kind of consistency is refused with the known ones."""
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
