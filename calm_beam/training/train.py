"""The training loop, and its log, with one row per report."""

import contextlib
import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.checkpoints import Arrays, FloatArrays, StoredArray
from calm_beam.decoding.device_groups import DeviceGroup, device_groups
from calm_beam.model import ModelConfig, architecture_of, network_of, parameter_shapes
from calm_beam.precision import Precision
from calm_beam.storage import replacing, writing

from .batches import Pair, choose_shapes, end_pairs, numbered_batches
from .config import TrainingConfig
from .new_model import initialize_parameters
from .saved_state import ResumeError, SavedState, TrainedModel, check_same_run, identify_run
from .step import (
    Parameters,
    initial_optimizer_state,
    loss_and_gradients,
    rotating_layers,
    sample_layers,
    spread_state,
    update,
)
from .validation import GenerationScore, Validation, validation_losses

# Each kind of draw has its own random stream: another number of sampled layers must not change the batches.
_WEIGHTS_STREAM, _LAYERS_STREAM = 0, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a run.

    Attributes:
      step: Number of finished steps.
      loss: Mean training loss over the steps since the last report, dropout on; an estimate if layers are sampled.
      target_tokens: Target tokens seen so far, eos included, padding not.
      validation: The validation, or None if this report comes without one.
    """

    step: int
    loss: float
    target_tokens: int
    validation: Validation | None = None


def train(
    config: TrainingConfig,
    model_config: ModelConfig,
    *,
    pairs: Sequence[Pair],
    validation_pairs: Sequence[Pair],
    initial: Arrays | None = None,
    end_id: int | None = None,
    score: GenerationScore | None = None,
    on_start: Callable[[], None] | None = None,
    on_first_steps: Callable[[int], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_save: Callable[[SavedState], None] | None = None,
    resume_from: SavedState | None = None,
) -> TrainedModel:
    """Returns a model trained with the layer-weighted loss: the best validated one, or else the last.

    A resumed run ends with the same bits as an uninterrupted one on the same machine: whatever a step draws is a
    function of the seed and the step.

    Args:
      config: Settings of the run.
      model_config: Sizes of the model.
      pairs: Training prompts and targets, as ids. Prompts are encoded as in decoding, with eos, by
        `Vocabulary.encode_prompt`. Targets have no end token, and are cut.
      validation_pairs: Pairs on which the loss of every layer is measured; may be empty, then nothing is measured.
      initial: Initial weights, names and shapes as in `parameter_shapes`; None for new weights. An exit classifier
        among them is returned unchanged.
      end_id: End token of every target; None for the first of the model's end-of-sequence ids.
      score: The score for comparing models; None compares the loss of the last layer.
      on_start: Called after all checks and loading `resume_from`, before the first step.
      on_first_steps: Called with 0 once the first step of this process is compiled, and with 1 and 2 when so many steps
        of it are done: forecasts need no more, and waiting for every step would slow a run down.
      on_progress: Called every `config.progress_every` steps, at every validation, and after the last step.
      on_save: Called with the state every `config.save_every` steps, except after the last.
      resume_from: A state of this same run to resume from.

    Raises:
      ValueError: If there are no pairs, an id is outside the model's vocabulary, `initial` does not fit the model, or
        `end_pairs` refuses a pair.
      UsageError: If dropout is requested and the model has none.
      ResumeError: If `resume_from` is of a run with other settings, data or initial weights.
      FloatingPointError: If the loss is no longer finite; detected when progress is reported.

    Source: CALM, section "Training early exit classifiers for local consistency"; appendix "Implementation Details"
      (the best checkpoint by performance on the validation set).
    """
    _check_inputs(model_config, pairs, validation_pairs=validation_pairs, initial=initial)
    end_id = model_config.end_ids[0] if end_id is None else end_id
    lengths = {"max_input_length": config.max_input_length, "max_target_length": config.max_target_length}
    ended = end_pairs(pairs, model_config, end_id=end_id, **lengths)
    ended_validation = end_pairs(validation_pairs, model_config, end_id=end_id, **lengths)
    shapes = choose_shapes([*ended, *ended_validation], batch_tokens=config.batch_tokens, num_shapes=config.num_shapes)
    run = identify_run(
        config,
        model_config,
        pairs=pairs,
        validation_pairs=validation_pairs,
        end_id=end_id,
        initial=initial,
        score=score,
    )
    group, *_ = device_groups(model_config, model_parallelism=config.model_parallelism)
    parameters, optimizer_state = _start(config, model_config, group=group, initial=initial)
    done, target_tokens, best = 0, 0, None
    losses: list[Any] = []
    if resume_from is not None:
        check_same_run(resume_from, run)
        parameters = _placed(group, resume_from.parameters)
        with group.running():
            optimizer_state = spread_state(_restored(optimizer_state, resume_from.optimizer))
        done, target_tokens, best = resume_from.step, resume_from.target_tokens, resume_from.best
        losses = [np.float32(loss) for loss in resume_from.unreported_losses]
    precision = Precision(dtype=config.dtype)
    model = network_of(
        model_config, precision=precision, dropout_rate=config.dropout_rate, layer_dropout=config.layer_dropout
    )
    key = jax.random.key(config.seed)
    if on_start is not None:
        on_start()

    for step, batch in numbered_batches(ended, shapes, seed=config.seed, after=done):
        layers, weights = _layers_of_loss(config, model_config.num_decoder_layers, step=step)
        with group.running():
            loss, gradients = loss_and_gradients(
                model,
                parameters,
                batch=batch,
                layers=layers,
                weights=weights.astype(np.float32),
                key=jax.random.fold_in(key, step),
                label_smoothing=config.label_smoothing,
                z_loss=config.z_loss,
            )
            parameters, optimizer_state = update(
                config.optimizer,
                config.steps,
                division=group.division,
                parameters=parameters,
                state=optimizer_state,
                gradients=gradients,
            )
        losses.append(loss)
        _tell_first(step - done, on_first_steps, awaited=(loss, parameters))
        target_tokens += batch.num_target_tokens
        is_last = step == config.steps
        validates = is_last or _is_due(step, config.validate_every)
        if validates or step % config.progress_every == 0:
            mean_loss = _finite_mean(losses, step)
            losses.clear()
            validation = None
            if validates and validation_pairs:
                arrays = _fetch(parameters)
                with group.running():
                    by_layer = validation_losses(model, parameters, pairs=ended_validation, shapes=shapes)
                validation = Validation(losses=by_layer, score=None if score is None else score(arrays))
                if best is None or best.validation is None or validation.is_better_than(best.validation):
                    best = TrainedModel(step=step, arrays=arrays, validation=validation)
            if on_progress is not None:
                on_progress(Progress(step=step, loss=mean_loss, target_tokens=target_tokens, validation=validation))
        if is_last:
            break
        if on_save is not None and _is_due(step, config.save_every):
            on_save(
                SavedState(
                    run=run,
                    step=step,
                    target_tokens=target_tokens,
                    unreported_losses=[float(value) for value in jax.device_get(losses)],
                    parameters=_fetch(parameters),
                    optimizer=_fetch(_leaves_by_place(optimizer_state)),
                    best=best,
                )
            )
    return best or TrainedModel(step=config.steps, arrays=_fetch(parameters), validation=None)


def _tell_first(step: int, on_first_steps: Callable[[int], None] | None, *, awaited: Any) -> None:
    """Reports one of the first two steps of a process, which is awaited."""
    if on_first_steps is None or step > 2:
        return
    if step == 1:
        on_first_steps(0)
    jax.block_until_ready(awaited)
    on_first_steps(step)


def _layers_of_loss(config: TrainingConfig, num_layers: int, *, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the layers whose loss a step computes, from 1, and their weights."""
    if config.rotating_layers:
        return rotating_layers(num_layers, every=config.rotating_layers, step=step, weighting=config.layer_weights)
    return sample_layers(
        num_layers,
        sampled_layers=config.sampled_layers,
        generator=np.random.default_rng((config.seed, _LAYERS_STREAM, step)),
        weighting=config.layer_weights,
    )


def _start(
    config: TrainingConfig, model_config: ModelConfig, *, group: DeviceGroup, initial: Arrays | None
) -> tuple[Parameters, Any]:
    """Returns parameters and optimiser state before the first step."""
    if initial is None:
        initial = initialize_parameters(model_config, generator=np.random.default_rng((config.seed, _WEIGHTS_STREAM)))
    parameters = _placed(group, initial)
    with group.running():
        return parameters, initial_optimizer_state(config.optimizer, config.steps, parameters=parameters)


def _placed(group: DeviceGroup, arrays: Arrays) -> Parameters:
    """Returns copies of arrays on a group of devices, since the buffers are donated later."""
    if group.division.parts == 1:
        return {name: jnp.array(np.asarray(array), jnp.float32, copy=True) for name, array in arrays.items()}
    return {
        name: group.place(name, array if isinstance(array, StoredArray) else np.array(array, np.float32, copy=True))
        for name, array in arrays.items()
    }


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _finite_mean(losses: Sequence[Any], step: int) -> float:
    mean = float(np.mean(jax.device_get(losses)))
    if not np.isfinite(mean):
        raise FloatingPointError(
            f"the training loss is {mean} at step {step}. Lower the learning rates, or start from other weights."
        )
    return mean


def _fetch(arrays: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Returns copies on the host: a view would change when its buffer is donated to the next step."""
    return {name: np.array(array, copy=True) for name, array in arrays.items()}


def _leaves_by_place(tree: Any) -> dict[str, jax.Array]:
    return {jax.tree_util.keystr(place): leaf for place, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _restored(tree: Any, saved: FloatArrays) -> Any:
    """Returns the tree with its leaves replaced by saved ones."""
    expected = _leaves_by_place(tree)
    if {name: leaf.shape for name, leaf in expected.items()} != {name: leaf.shape for name, leaf in saved.items()}:
        raise ResumeError(
            "the interrupted run kept its optimiser in another form: it was another version of calm-beam or of optax. "
            "Go on with that one, or start a new run."
        )
    leaves = [jnp.array(saved[name], leaf.dtype, copy=True) for name, leaf in expected.items()]
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(tree), leaves)


def _check_inputs(
    model_config: ModelConfig,
    pairs: Sequence[Pair],
    *,
    validation_pairs: Sequence[Pair],
    initial: Arrays | None,
) -> None:
    if not pairs:
        raise ValueError("pairs must hold at least one pair, got none.")
    pad_id = architecture_of(model_config).pad_id
    known = f"[{0 if pad_id is None else 1}, {model_config.vocab_size})"
    without = "" if pad_id is None else " without padding"
    # An id beyond the embedding would silently read its last row.
    for name, group in (("pairs", pairs), ("validation_pairs", validation_pairs)):
        for index, pair in enumerate(group):
            outside = [
                token for side in pair for token in side if token == pad_id or not 0 <= token < model_config.vocab_size
            ]
            if outside:
                raise ValueError(
                    f"{name}[{index}] has id {outside[0]}; ids must be in {known}, the model's vocabulary{without}."
                )
    if initial is not None:
        expected = parameter_shapes(model_config)
        found = {name: tuple(array.shape) for name, array in initial.items()}
        if found != expected:
            wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
            raise ValueError(
                f"initial must hold the {len(expected)} arrays of the model; {', '.join(wrong[:4])} "
                f"{'is' if len(wrong) == 1 else 'are'} missing, unknown or of another shape."
            )


class TrainingLog:
    """A JSONL file with one row per report, for plotting."""

    def __init__(self, path: pathlib.Path, *, after_step: int) -> None:
        """Prepares a log without touching files.

        Args:
          path: The file.
          after_step: The last step of an earlier process, whose rows up to that step are kept; 0 starts a new log.
        """
        self._path = path
        self._after_step = after_step
        self._earlier_seconds = 0.0
        self._start = 0.0
        self.has_begun = False

    def begin(self) -> None:
        """Creates the file, with its folder if needed, or drops an earlier log's rows that will be written again."""
        self.has_begun = True
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in _read_rows(self._path) if row["step"] <= self._after_step]
        with replacing(self._path) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        self._earlier_seconds = kept[-1]["seconds"] if kept else 0.0
        self._start = time.monotonic()

    def append(self, progress: Progress) -> None:
        """Adds a row."""
        row: dict[str, Any] = {
            "step": progress.step,
            "loss": progress.loss,
            "target_tokens": progress.target_tokens,
            "seconds": round(self._earlier_seconds + time.monotonic() - self._start, 3),
        }
        if progress.validation is not None:
            row["validation_losses"] = progress.validation.losses
            if progress.validation.score is not None:
                row["validation_score"] = progress.validation.score
        with writing(self._path), open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def move_to(self, path: pathlib.Path) -> None:
        """Moves the file to its final place, and deletes its folder if that is empty."""
        os.replace(self._path, path)
        self._remove_folder()

    def delete(self) -> None:
        """Deletes the file, and its folder if that is empty."""
        self._path.unlink(missing_ok=True)
        self._remove_folder()

    def _remove_folder(self) -> None:
        with contextlib.suppress(OSError):
            self._path.parent.rmdir()


def _read_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    # A killed process may have written half of its last row.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
