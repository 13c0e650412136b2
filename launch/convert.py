r"""`calm-beam convert`: writes a model in another layout, vocabulary included.

A Hugging Face, Orbax or T5X model in the native layout, in half the space:

    calm-beam convert --checkpoint=flan-t5-small --output=model --layout=native --dtype=float16

A model with a head that only its training needed, without it:

    calm-beam convert --checkpoint=free_t5 --output=free_model --layout=native --drop_arrays='cm_head.*'

A trained model in T5X's layout, as step 2000, to be served or fine-tuned there (docs/t5x.md):

    calm-beam convert --checkpoint=model --output=t5x_model --layout=t5x --step=2000
"""

import argparse
import pathlib
import tempfile
from collections.abc import Sequence

from calm_beam.checkpoints import (
    Checkpoint,
    CheckpointError,
    find_model,
    load_checkpoint,
    store_model,
    write_native,
    write_t5x,
)
from calm_beam.errors import CalmBeamError
from calm_beam.inputs.vocabularies.vocabulary import VocabularyError, missing_sentinels
from calm_beam.storage import check_writable, exists, is_cloud_path, joined

from .flags import FlagParser, UsageError, add_model_flags, naming, parse_own_flags, pattern, whole_number
from .flags.model import declared
from .terminal import tell

_ESSENTIALS = ("--checkpoint", "--output", "--layout", "--step", "--dtype", "--overwrite")


def flag_parsers() -> tuple[FlagParser, ...]:
    """Returns the parsers of all forms of the command."""
    return (_parser(),)


def main(argv: Sequence[str]) -> int:
    """Converts a model.

    Args:
      argv: Flags, without the program's name.

    Returns:
      Exit status: 0 done, 1 failure, 2 bad usage.
    """
    flags = parse_own_flags(_parser(), argv)
    try:
        _run(flags)
    except CalmBeamError:
        raise
    except ValueError as error:
        raise ConversionError(str(error)) from error
    return 0


class ConversionError(CalmBeamError, ValueError):
    """A model that the other layout cannot hold."""


def _parser() -> FlagParser:
    parser = FlagParser(prog="calm-beam convert", doc=__doc__, essentials=_ESSENTIALS)
    add = parser.add_argument
    add("--checkpoint", required=True, help="the model: native, Hugging Face, T5X or Orbax, or a folder of steps")
    add_model_flags(parser)
    add(
        "--drop_arrays",
        metavar="REGEX",
        type=pattern,
        help="leave out arrays whose whole stored name matches, such as heads that only training needs",
    )
    add("--output", required=True, help="folder to write to")
    add("--layout", choices=("native", "t5x"), required=True, help="layout to write")
    add("--step", type=whole_number(1), help="for t5x: number of the step; default: that of --checkpoint, or 1")
    add("--dtype", choices=("float32", "float16"), help="for native: precision as stored; default: float32")
    add("--overwrite", action="store_true", help="write even if --output holds files; replaces a model of that layout")
    return parser


def _run(flags: argparse.Namespace) -> None:
    """Checks everything, writes, and reads back what was written."""
    if flags.layout == "t5x" and flags.dtype is not None:
        raise UsageError(f"--dtype={flags.dtype} is for --layout=native: T5X's layout is written in float32.")
    if flags.layout == "native" and flags.step is not None:
        raise UsageError(f"--step={flags.step} is for --layout=t5x: the native layout has no steps.")
    try:
        checkpoint = load_checkpoint(flags.checkpoint, declared=declared(flags), drop_arrays=flags.drop_arrays)
        vocabulary_path = checkpoint.vocabulary_path
        extra_ids = missing_sentinels(vocabulary_path) if vocabulary_path else 0
    except (CheckpointError, VocabularyError, OSError) as error:
        raise UsageError(f"--checkpoint: {error}") from error
    # Step 0 is a model that T5X would not find.
    step = (flags.step or checkpoint.step or 1) if flags.layout == "t5x" else None
    if is_cloud_path(flags.output):
        _check_cloud_output(flags.output)
        with tempfile.TemporaryDirectory(prefix="calm-beam-") as folder:
            _write(pathlib.Path(folder), checkpoint, extra_ids=extra_ids, step=step, dtype=flags.dtype)
            store_model(pathlib.Path(folder), flags.output)
    else:
        output = pathlib.Path(flags.output)
        _check_output(output, layout=flags.layout, step=step, overwrite=flags.overwrite)
        _write(output, checkpoint, extra_ids=extra_ids, step=step, dtype=flags.dtype)
    _report(checkpoint, load_checkpoint(flags.output))


def _write(
    output: pathlib.Path, checkpoint: Checkpoint, *, extra_ids: int, step: int | None, dtype: str | None
) -> None:
    """Writes the model in the native layout, or as a step in T5X's."""
    config, arrays, vocabulary_path = checkpoint.config, checkpoint.arrays, checkpoint.vocabulary_path
    if step is None:
        dtype = dtype or "float32"
        write_native(output, config, arrays=arrays, vocabulary_path=vocabulary_path, extra_ids=extra_ids, dtype=dtype)
    else:
        write_t5x(output, config, arrays=arrays, step=step, vocabulary_path=vocabulary_path, extra_ids=extra_ids)


def _check_cloud_output(output: str) -> None:
    """Refuses a folder on Cloud Storage that holds anything: there, a model is not replaced in one step."""
    with naming("--output"):
        if exists(output):
            raise UsageError(
                f"--output={output}: is not empty. On Cloud Storage a model is written to a folder of its own only: "
                "name another, or empty it."
            )
        check_writable(joined(output, "config.json"))


def _check_output(output: pathlib.Path, *, layout: str, step: int | None, overwrite: bool) -> None:
    """Refuses an output folder in which the model written would not be the one that is read."""
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
        tell("There is no vocabulary in or beside the model, so none was copied.")
    tell(f"Fingerprint: {after}")
    if before != after:
        tell(f"Weights were rounded. Manifests of the model as it was ({before}) do not belong to this one.")
