r"""`calm-beam convert`: writes a model in another layout, vocabulary included.

A Hugging Face, Orbax or T5X model in the native layout, in half the space:

    calm-beam convert --checkpoint=flan-t5-small --output=model --layout=native --dtype=float16

A file of GGUF, dequantised, with the tokenizer and the chat template that it holds:

    calm-beam convert --checkpoint=smollm2.gguf --output=smollm2 --layout=native

A model with a head that only its training needed, without it:

    calm-beam convert --checkpoint=free_t5 --output=free_model --layout=native --drop_arrays='cm_head.*'

A trained model in T5X's layout, as step 2000, to be served or fine-tuned there (docs/t5x.md):

    calm-beam convert --checkpoint=model --output=t5x_model --layout=t5x --step=2000

The same as a folder that Hugging Face's transformers loads:

    calm-beam convert --checkpoint=model --output=hf_model --layout=hugging_face
"""

import dataclasses
import json
import os
import pathlib
import re
import shlex
import tempfile
from collections.abc import Callable, Sequence

from calm_beam.checkpoints import (
    Checkpoint,
    CheckpointError,
    find_model,
    load_checkpoint,
    store_model,
    write_gguf_tokenizer,
    write_hugging_face,
    write_native,
    write_t5x,
)
from calm_beam.errors import CalmBeamError, UsageError
from calm_beam.inputs.vocabularies.vocabulary import VocabularyError, missing_sentinels
from calm_beam.options import Options, again, option
from calm_beam.options.groups import FactsOfAny, ModelSource, Replacing
from calm_beam.options.kinds import pattern, whole_number
from calm_beam.storage import check_writable, exists, is_cloud_path, joined

from .flags import FlagParser, naming, parsed, request_parser
from .flags.shared_options import declared
from .terminal import tell

_ESSENTIALS = ("--checkpoint", "--output", "--layout", "--step", "--dtype", "--overwrite")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion(Options):
    """Which model is written, and as what."""

    checkpoint: str | os.PathLike[str] = again(
        ModelSource,
        "checkpoint",
        default=dataclasses.MISSING,
        sentence="the model: native, Hugging Face, GGUF, T5X or Orbax, or a folder of steps",
    )
    drop_arrays: re.Pattern[str] | None = option(
        None,
        "leave out arrays whose whole stored name matches, such as heads that only training needs",
        kind=pattern,
        metavar="REGEX",
    )
    output: str | os.PathLike[str] = option(dataclasses.MISSING, "folder to write to")
    layout: str = option(dataclasses.MISSING, "layout to write", choices=("native", "hugging_face", "t5x"))
    step: int | None = option(
        None, "for t5x: number of the step; default: that of --checkpoint, or 1", kind=whole_number(1)
    )
    dtype: str | None = option(
        None, "for native and hugging_face: precision as stored; default: float32", choices=("float32", "float16")
    )
    overwrite: bool = again(
        Replacing, "overwrite", sentence="write even if --output holds files; replaces a model of that layout"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layout == "t5x" and self.dtype is not None:
            raise UsageError(
                f"--dtype={self.dtype} is for --layout=native and hugging_face: T5X's is written in float32."
            )
        if self.layout != "t5x" and self.step is not None:
            raise UsageError(f"--step={self.step} is for --layout=t5x: the {self.layout} layout has no steps.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertRequest(Conversion, FactsOfAny):
    """A model in another layout."""


def flag_parsers() -> tuple[FlagParser, ...]:
    """Returns the parsers of all forms of the command."""
    return (request_parser("convert", ConvertRequest, doc=__doc__, essentials=_ESSENTIALS),)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    (parser,) = flag_parsers()
    request = parsed(ConvertRequest, argv, parser=parser)
    try:
        _convert(request)
    except CalmBeamError:
        raise
    except ValueError as error:
        raise ConversionError(str(error)) from error
    return 0


class ConversionError(CalmBeamError, ValueError):
    """A model that the other layout cannot hold."""


def _convert(request: ConvertRequest) -> None:
    """Checks everything, writes, and reads back what was written."""
    path = os.fspath(request.output)
    with tempfile.TemporaryDirectory(prefix="calm-beam-") as folder:
        try:
            checkpoint = load_checkpoint(
                os.fspath(request.checkpoint), declared=declared(request), drop_arrays=request.drop_arrays
            )
            if checkpoint.layout == "gguf" and checkpoint.vocabulary_path is None:
                tokenizer = write_gguf_tokenizer(checkpoint.directory, pathlib.Path(folder) / "tokenizer")
                checkpoint = dataclasses.replace(checkpoint, vocabulary_path=tokenizer)
            vocabulary_path = checkpoint.vocabulary_path
            extra_ids = missing_sentinels(vocabulary_path) if vocabulary_path else 0
        except (CheckpointError, VocabularyError, OSError) as error:
            raise UsageError(f"--checkpoint: {error}") from error
        # Step 0 is a model that T5X would not find.
        step = (request.step or checkpoint.step or 1) if request.layout == "t5x" else None
        if is_cloud_path(path):
            _check_cloud_output(path)
            model = pathlib.Path(folder) / "model"
            _write(model, checkpoint, request, extra_ids=extra_ids, step=step)
            store_model(model, path)
        else:
            output = pathlib.Path(path)
            _check_output(output, layout=request.layout, step=step, overwrite=request.overwrite)
            _write(output, checkpoint, request, extra_ids=extra_ids, step=step)
    _report(checkpoint, load_checkpoint(path))


def _write(
    output: pathlib.Path, checkpoint: Checkpoint, request: ConvertRequest, *, extra_ids: int, step: int | None
) -> None:
    """Writes the model in the native layout or Hugging Face's, or as a step in T5X's."""
    config, arrays, vocabulary_path = checkpoint.config, checkpoint.arrays, checkpoint.vocabulary_path
    if step is not None:
        write_t5x(output, config, arrays=arrays, step=step, vocabulary_path=vocabulary_path, extra_ids=extra_ids)
        return
    write: Callable[..., None] = write_hugging_face if request.layout == "hugging_face" else write_native
    write(
        output,
        config,
        arrays=arrays,
        vocabulary_path=vocabulary_path,
        extra_ids=extra_ids,
        dtype=request.dtype or "float32",
        generation=checkpoint.generation,
    )


def _check_cloud_output(output: str) -> None:
    """Refuses a non-empty folder on Cloud Storage: a model there cannot be replaced atomically."""
    with naming("--output"):
        if exists(output):
            raise UsageError(
                f"--output={output}: is not empty. On Cloud Storage a model is written to a folder of its own only: "
                "name another, or empty it."
            )
        check_writable(joined(output, "config.json"))


def _check_output(output: pathlib.Path, *, layout: str, step: int | None, overwrite: bool) -> None:
    """Refuses an output folder in which readers would find another model than the one written."""
    if output.exists() and not output.is_dir():
        raise UsageError(f"--output={output}: is a file, expected a folder or nothing.")
    if not output.is_dir() or not any(output.iterdir()):
        return
    if not overwrite:
        raise UsageError(f"--output={output}: is not empty. Name another folder, or pass --overwrite.")
    found = find_model(output)
    if found is not None and (found.layout, found.step) != (layout, step):
        which = f"{found.layout} model" if found.step is None else f"{found.layout} model of step {found.step}"
        raise UsageError(
            f"--output={output}: holds a {which}. --overwrite replaces models of the same layout and step only: name "
            "another folder."
        )


def _report(checkpoint: Checkpoint, written: Checkpoint) -> None:
    before, after = checkpoint.fingerprint(), written.fingerprint()
    tell(f"Read {checkpoint.uri} ({checkpoint.layout}).")
    for sentence in (*checkpoint.stated, *checkpoint.assumed):
        tell(sentence)
    if checkpoint.dropped:
        tell(f"Left out {len(checkpoint.dropped)} arrays: {', '.join(checkpoint.dropped)}.")
    tell(f"Wrote {written.uri} ({written.layout}).")
    if checkpoint.vocabulary_path is None:
        tell("There is no vocabulary in or next to the model, so none was copied.")
    if stops := set(checkpoint.generation.stop_strings) - set(written.generation.stop_strings):
        asked = shlex.quote(json.dumps(sorted(stops)))
        tell(f"This layout holds no stop strings: calibrate with --stop_strings={asked}.")
    tell(f"Fingerprint: {after}")
    if before != after:
        tell(f"Weights were rounded. Manifests of the model as it was ({before}) do not belong to this one.")
