"""The state of a run on disk, so that a killed run can resume as if it had not been interrupted.

Each state is one safetensors file: arrays of weights and optimiser, and everything else as JSON in the file's metadata.
A run is identified by the settings and data that must not change when it resumes.
"""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import safetensors
import safetensors.numpy

from calm_beam.checkpoints import Arrays, fingerprint
from calm_beam.errors import UsageError
from calm_beam.inputs.vocabularies.vocabulary import EOS_ID
from calm_beam.model import ModelConfig
from calm_beam.storage import replacing, strict_json

from .batches import Pair
from .config import TrainingConfig
from .validation import GenerationScore, Validation

_FORMAT = "calm-beam/training-state/v1"
_FILE = re.compile(r"state_(\d+)\.safetensors")
# The second newest state is a spare in case the disk damages the newest.
_KEPT_STATES = 2

SavedArrays = Mapping[str, np.ndarray]


# Settings that earlier versions' states lack, with the values that applied then.
_ADDED_LATER = {"dtype": "float32"}


class ResumeError(UsageError):
    """A run that cannot resume: its state cannot be read, or belongs to a run with other settings or data."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """Weights and their validation.

    Attributes:
      step: Step after which these are the weights.
      arrays: float32 arrays by name, names and shapes as in `parameter_shapes`.
      validation: Their validation; None without validation data.
    """

    step: int
    arrays: SavedArrays
    validation: Validation | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedState:
    """Everything that the remaining steps depend on.

    Attributes:
      run: The identity of the run: settings and digests of its data, by name.
      step: Number of finished steps.
      target_tokens: Target tokens seen so far.
      unreported_losses: Training losses of the steps since the last report.
      parameters: Weights by name.
      optimizer: The optimiser's arrays, named by their place in its tree.
      best: The best model so far; None before the first validation.
    """

    run: Mapping[str, str]
    step: int
    target_tokens: int
    unreported_losses: Sequence[float]
    parameters: SavedArrays
    optimizer: SavedArrays
    best: TrainedModel | None


def check_same_run(saved: SavedState, run: Mapping[str, str]) -> None:
    """Raises `ResumeError` if a state belongs to another run; names every setting that differs.

    Args:
      saved: The state.
      run: The identity of the run that is to resume.
    """
    before = {**_ADDED_LATER, **saved.run}
    names = sorted(name for name in before.keys() | run.keys() if before.get(name) != run.get(name))
    if names:
        differences = "; ".join(f"{name}: {before.get(name)}, now {run.get(name)}" for name in names)
        raise ResumeError(
            f"the interrupted run was another one ({differences}). Give it the settings and data it was started with, "
            "or start a new run."
        )


class StateFolder:
    """A folder with the last two states of a run."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def steps(self) -> list[int]:
        """Returns the steps after which there are states, ascending."""
        names = [child.name for child in self.path.iterdir()] if self.path.is_dir() else []
        return sorted(int(match.group(1)) for name in names if (match := _FILE.fullmatch(name)))

    def save(self, state: SavedState) -> None:
        """Writes a state, and then deletes all except the newest two.

        A state is written under another name and renamed, so readers never find a partial one.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with replacing(self._file(state.step)) as temporary:
            temporary.write_bytes(_serialize(state))
        for step in self.steps()[:-_KEPT_STATES]:
            self._file(step).unlink()

    def load(self) -> SavedState:
        """Returns the newest readable state.

        Raises:
          ResumeError: If there is none, or none is readable.
        """
        problems = []
        for step in reversed(self.steps()):
            try:
                return _read(self._file(step))
            except ResumeError as error:
                problems.append(str(error))
        raise ResumeError(" ".join(problems) or f"{self.path}: holds no state of an interrupted run.")

    def delete(self) -> None:
        """Deletes all states and unfinished files of a killed process; then the folder, if it is empty."""
        for pattern in ("state_*.safetensors", ".state_*.tmp"):
            for file in self.path.glob(pattern):
                file.unlink()
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def _file(self, step: int) -> pathlib.Path:
        return self.path / f"state_{step:08d}.safetensors"


def _serialize(state: SavedState) -> bytes:
    groups: dict[str, SavedArrays] = {"parameters": state.parameters, "optimizer": state.optimizer}
    best = None
    if state.best is not None:
        groups["best"] = state.best.arrays
        validation = state.best.validation
        best = {"step": state.best.step, "validation": None if validation is None else dataclasses.asdict(validation)}
    text = {
        "format": _FORMAT,
        "run": dict(state.run),
        "step": state.step,
        "target_tokens": state.target_tokens,
        "unreported_losses": list(state.unreported_losses),
        "best": best,
    }
    arrays = {f"{group}:{name}": array for group, members in groups.items() for name, array in members.items()}
    saved: bytes = safetensors.numpy.save(arrays, metadata={"state": json.dumps(text)})
    return saved


def _read(path: pathlib.Path) -> SavedState:
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            # Losses of a run that diverges may be NaN or infinite.
            text = strict_json.loads((file.metadata() or {})["state"], constants_allowed=True)
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, KeyError, ValueError, safetensors.SafetensorError) as error:
        raise ResumeError(f"{path}: cannot be read as the state of a run ({type(error).__name__}: {error}).") from error
    if text["format"] != _FORMAT:
        raise ResumeError(f"{path}: has format {text['format']!r}, this version of calm-beam knows {_FORMAT!r}.")

    def group(prefix: str) -> dict[str, np.ndarray]:
        return {name.partition(":")[2]: array for name, array in arrays.items() if name.startswith(f"{prefix}:")}

    best = None
    if text["best"] is not None:
        fields = text["best"]["validation"]
        validation = None if fields is None else Validation(losses=tuple(fields["losses"]), score=fields["score"])
        best = TrainedModel(step=text["best"]["step"], arrays=group("best"), validation=validation)
    return SavedState(
        run=text["run"],
        step=text["step"],
        target_tokens=text["target_tokens"],
        unreported_losses=text["unreported_losses"],
        parameters=group("parameters"),
        optimizer=group("optimizer"),
        best=best,
    )


# These change reports and stored states, but no weight.
_WATCHING = ("progress_every", "save_every")


def identify_run(
    config: TrainingConfig,
    model_config: ModelConfig,
    *,
    pairs: Sequence[Pair],
    validation_pairs: Sequence[Pair],
    end_id: int,
    initial: Arrays | None,
    score: GenerationScore | None,
) -> dict[str, str]:
    """Returns everything that decides a run's final weights, by name; the arguments are those of `train`."""
    settings = dataclasses.asdict(config)
    for name in _WATCHING:
        del settings[name]
    # Defaults are omitted, as in older states. More devices change the order of rounding in sums.
    for name, off in (("model_parallelism", 1), ("layer_dropout", 0.0), ("rotating_layers", 0)):
        if settings[name] == off:
            del settings[name]
    settings |= {"optimizer": type(config.optimizer).__name__, **settings["optimizer"]}
    settings |= {f"model {name}": value for name, value in dataclasses.asdict(cast(Any, model_config)).items()}
    for name in ("model exit_norms", "model exit_heads"):
        if not settings[name]:
            del settings[name]
    settings["training data"] = _digest(pairs)
    settings["validation data"] = _digest(validation_pairs)
    if end_id != EOS_ID:
        # Omitted for T5's end token, as in older states.
        settings["end of targets"] = end_id
    settings["initial weights"] = "new" if initial is None else fingerprint(initial)
    settings["best by"] = "loss" if score is None else score.name
    return {name: str(value) for name, value in settings.items()}


def _digest(pairs: Sequence[Pair]) -> str:
    """Returns the number of pairs, and a digest of them in their order."""
    digest = hashlib.sha256()
    for pair in pairs:
        for side in pair:
            digest.update(len(side).to_bytes(8, "little") + np.asarray(side, "<i4").tobytes())
    return f"{len(pairs)} pairs, {digest.hexdigest()[:16]}"
