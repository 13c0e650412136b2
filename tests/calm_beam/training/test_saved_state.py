"""States on disk are complete, written atomically, and the last two are kept."""

import pathlib

import numpy as np
import pytest

from calm_beam.training.saved_state import ResumeError, SavedState, StateFolder, TrainedModel, check_same_run
from calm_beam.training.validation import Validation


def _state(step: int = 3, *, best: bool = True) -> SavedState:
    generator = np.random.default_rng(step)
    model = TrainedModel(
        step=2,
        arrays={"a/kernel": generator.standard_normal((2, 3)).astype(np.float32)},
        validation=Validation(losses=(0.1 + 0.2, 1e-17), score=None if step % 2 else 0.3),
    )
    return SavedState(
        run={"steps": "9", "training data": "4 pairs"},
        step=step,
        target_tokens=10**12,
        unreported_losses=(float(np.float32(0.1)), 2.5),
        parameters={"a/kernel": generator.standard_normal((2, 3)).astype(np.float32), "b": np.ones(1, np.float32)},
        optimizer={"[0].count": np.array(7, np.int32), "[1]['a/kernel']": np.full((2, 3), np.nan, np.float32)},
        best=model if best else None,
    )


def _assert_equal(one: SavedState, two: SavedState) -> None:
    for name in ("run", "step", "target_tokens"):
        assert getattr(one, name) == getattr(two, name)
    assert list(one.unreported_losses) == list(two.unreported_losses)
    pairs = [(one.parameters, two.parameters), (one.optimizer, two.optimizer)]
    assert (one.best is None) == (two.best is None)
    if one.best is not None and two.best is not None:
        assert (one.best.step, one.best.validation) == (two.best.step, two.best.validation)
        pairs.append((one.best.arrays, two.best.arrays))
    for left, right in pairs:
        assert left.keys() == right.keys()
        for name, array in left.items():
            assert (array.dtype, array.shape) == (right[name].dtype, right[name].shape)
            np.testing.assert_array_equal(array, right[name])


@pytest.mark.parametrize("state", [_state(3), _state(4), _state(5, best=False)])
def test_a_state_comes_back_as_it_was(state: SavedState, tmp_path: pathlib.Path) -> None:
    """Numbers, texts and arrays of every type and shape read back unchanged."""
    folder = StateFolder(tmp_path / "model.training")
    folder.save(state)
    _assert_equal(folder.load(), state)


def test_the_last_two_are_kept(tmp_path: pathlib.Path) -> None:
    """Of four states, the two of the highest steps are left, and the newest is read."""
    folder = StateFolder(tmp_path)
    for step in (5, 50, 500, 1_000_000_000):
        folder.save(_state(step))
    assert folder.steps() == [500, 1_000_000_000]
    assert folder.load().step == 1_000_000_000


def test_a_damaged_state_is_passed_over(tmp_path: pathlib.Path) -> None:
    """If the newest file is cut short, the one before it is read; if both are, both are named."""
    folder = StateFolder(tmp_path)
    folder.save(_state(1))
    folder.save(_state(2))
    for step in (2, 1):
        path = tmp_path / f"state_{step:08d}.safetensors"
        path.write_bytes(path.read_bytes()[:-10])
        if step == 2:
            assert folder.load().step == 1
    with pytest.raises(ResumeError, match=r"state_00000002\S* cannot be read as the state of a run .*state_00000001"):
        folder.load()


def test_what_is_being_written_is_not_seen(tmp_path: pathlib.Path) -> None:
    """A partial file of a killed process is not a state, and is removed with the others; foreign files stay."""
    folder = StateFolder(tmp_path / "model.training")
    folder.save(_state(1))
    (folder.path / ".state_00000002.safetensors.0123.tmp").write_bytes(b"half")
    assert folder.steps() == [1]
    (folder.path / "notes.txt").write_text("mine")
    folder.delete()
    assert [child.name for child in folder.path.iterdir()] == ["notes.txt"]
    (folder.path / "notes.txt").unlink()
    folder.delete()
    assert not folder.path.exists()


def test_no_state_is_an_error(tmp_path: pathlib.Path) -> None:
    """A missing folder, or one with other files, has no states, and says so when one is requested."""
    folder = StateFolder(tmp_path / "nothing")
    assert folder.steps() == []
    with pytest.raises(ResumeError, match="nothing: holds no state of an interrupted run"):
        folder.load()
    folder.delete()


def test_another_format_is_refused(tmp_path: pathlib.Path) -> None:
    """A state in another version of the format is refused with its format."""
    folder = StateFolder(tmp_path)
    folder.save(_state(1))
    path = tmp_path / "state_00000001.safetensors"
    path.write_bytes(path.read_bytes().replace(b"training-state/v1", b"training-state/v9"))
    with pytest.raises(ResumeError, match="has format 'calm-beam/training-state/v9'"):
        folder.load()


def test_runs_are_compared_setting_by_setting() -> None:
    """Equal settings pass; other, missing and additional ones are all named with their values."""
    state = _state()
    check_same_run(state, {"steps": "9", "training data": "4 pairs", "dtype": "float32"})
    with pytest.raises(ResumeError, match=r"\(seed: None, now 1; steps: 9, now 8; training data: 4 pairs, now None\)"):
        check_same_run(state, {"steps": "8", "seed": "1", "dtype": "float32"})
