"""Drawing the holdout of a calibration set."""

import hashlib
from fractions import Fraction

import pytest

from calm_beam.calibration.pareto import CHOOSING
from calm_beam.calibration.pareto import part_of as choosing_part_of
from calm_beam.inputs.examples import Example
from calm_beam.inputs.set_parts import CALIBRATING, CONFIRMING, Split, part_of

_KEYS = [f"row-{number}" for number in range(2000)]
_PART = Split(name=CONFIRMING, confirm_share=0.3, salt="s")


def _confirms(key: str, salt: str = "s", holdout_share: float = 0.3) -> bool:
    return part_of(key, salt=salt, holdout_share=holdout_share) == CONFIRMING


def test_salt_and_name_alone_decide() -> None:
    """Each unit is drawn by a hash of salt and name, whatever other units there are; another salt changes that."""
    expected = [
        int(hashlib.sha256(f"s/confirm\n{key}".encode()).hexdigest(), 16) < Fraction("0.3") * 2**256 for key in _KEYS
    ]
    assert [_confirms(key) for key in _KEYS] == expected
    assert 540 <= sum(expected) <= 660
    assert [_confirms(key, "t") for key in _KEYS] != expected
    # A larger share keeps the units that were in the holdout already.
    assert all(_confirms(key, holdout_share=0.5) for key, drawn in zip(_KEYS, expected, strict=True) if drawn)


def test_who_confirms_does_not_depend_on_who_chooses_a_path() -> None:
    """The holdout draws equally from units that would select among variants and from those that would test."""
    shares = []
    for chooses in (True, False):
        some = [key for key in _KEYS if (choosing_part_of(key, salt="s", selection_share=0.3) == CHOOSING) == chooses]
        shares.append(sum(map(_confirms, some)) / len(some))
    assert shares == pytest.approx([0.3, 0.3], abs=0.05)


def test_a_unit_is_in_one_part() -> None:
    """The parts have all units, each in exactly one."""
    calibrating = Split(name=CALIBRATING, confirm_share=0.3, salt="s")
    assert calibrating.that_confirms() == _PART
    assert all(calibrating.has(key) != _PART.has(key) for key in _KEYS)


def test_clusters_are_drawn_as_a_whole() -> None:
    """An example is in the part of its cluster, whatever its own id is."""

    def example(name: str, cluster: str | None) -> Example:
        return Example(
            id=name, has_own_id=True, input="a", input_ids=None, references=(), cluster=cluster, file_index=0, line=1
        )

    confirming, calibrating = (next(key for key in _KEYS if _confirms(key) == wanted) for wanted in (True, False))
    assert _PART.takes(example(calibrating, confirming))
    assert not _PART.takes(example(confirming, calibrating))
    assert _PART.takes(example(confirming, None))


@pytest.mark.parametrize("share", [0, 1, 30, -0.1])
def test_a_share_is_a_fraction(share: float) -> None:
    """Shares outside (0, 1) are refused with the value."""
    with pytest.raises(ValueError, match=rf"confirm_share must be in \(0, 1\), got {share}. For 30 % pass 0.3"):
        Split(name=CONFIRMING, confirm_share=share, salt="s")


def test_parts_have_two_names() -> None:
    """A misspelt part, which would be empty, is refused."""
    with pytest.raises(ValueError, match="a part is calibrating or confirming, got 'testing'"):
        Split(name="testing", confirm_share=0.3, salt="s")
