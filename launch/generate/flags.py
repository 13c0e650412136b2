"""The flags of `calm-beam generate`, and which of them go together."""

import argparse

from calm_beam.inputs import Reading
from calm_beam.launch.flags import (
    FlagParser,
    UsageError,
    add_exit_head_flag,
    add_memory_flags,
    add_model_flags,
    add_worker_flags,
    share,
    utf8_text,
    whole_number,
)
from calm_beam.launch.flags.accelerators import add_job_flags
from calm_beam.launch.flags.manifest import add_confidence_flag, add_entry_flags, add_precision_flags

SHOWS_WHAT_IS_PRINTED = "--show_layers colours what is printed: rows of --output have exit_layers of themselves."

# As `calm_beam.outputs.job.FORMATS`.
_FORMATS = ("parquet", "jsonl")
_OF_FOLDERS = (
    "output_format",
    "on_error",
    "max_failures",
    "probe_share",
    "probe_salt",
    "bleurt_checkpoint",
    "token_budget",
    "num_shards",
    "model_copies",
    "resume",
    "accelerator",
)
_ESSENTIALS = (
    "--manifest",
    "--checkpoint",
    "--prompt",
    "--input",
    "--output",
    "--overwrite",
    "--show_layers",
    "--delta",
    "--consistency",
    "--metric",
    "--resume",
)


def generate_parser(doc: str | None) -> FlagParser:
    """Returns the parser of the command line; its help shows what the docstring says."""
    parser = FlagParser(prog="calm-beam generate", doc=doc, essentials=_ESSENTIALS)
    parser.add_argument("--manifest", required=True, help="a manifest, or the calibration directory that holds one")
    parser.add_argument("--checkpoint", help="model folder; default: where the manifest says that it was")
    add_model_flags(parser)
    add_confidence_flag(parser)
    add_precision_flags(parser)
    parser.add_argument("--vocabulary", help="SentencePiece model or tokenizer.json; default: beside the checkpoint")
    parser.add_argument("--prompt", help="the prompt; default: --input, or standard input")
    parser.add_argument("--input", help="files of prompts: a path or a glob")
    parser.add_argument(
        "--data_format",
        choices=("jsonl", "text", "parquet", "tfrecord"),
        help="format of --input; default: by suffix (.jsonl, .txt, .tfrecord, each also with .gz; .parquet)",
    )
    parser.add_argument("--inputs_field", help="field of a row with the prompt; default: input, in TFRecord inputs")
    parser.add_argument(
        "--group_key",
        type=utf8_text,
        help="field of a row of --input with the prompt's group, under a manifest with groups",
    )
    parser.add_argument(
        "--output",
        help="JSONL file to write, or a folder with a slash at its end, for answers in shards; default: texts, to "
        "standard output",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier --output")
    parser.add_argument("--show_layers", action="store_true", help="colour every token by the layer at which it left")
    add_memory_flags(parser)
    add_exit_head_flag(parser)
    parser.add_argument(
        "--exact_engine", action="store_true", help="refuse to serve by another engine than the manifest was made by"
    )
    add_entry_flags(parser)
    _add_folder_flags(parser)
    add_job_flags(parser)
    parser.only_with("--overwrite", "--output")
    parser.only_with("--max_failures", "--on_error=list")
    return parser


def _add_folder_flags(parser: FlagParser) -> None:
    """Adds the flags of answers in shards; none of them has a default, so that it shows which were given."""
    folder = parser.add_argument_group(
        "with --output=FOLDER/, answers in shards (Beam's own flags, such as --runner, may be added)"
    )
    folder.add_argument(
        "--output_format",
        choices=_FORMATS,
        help="of the files of answers: parquet, or jsonl, packed by gzip; default: parquet",
    )
    folder.add_argument(
        "--on_error",
        choices=("fail", "list"),
        help="for prompts that have no answer, also when tried again alone: end the run, or list them in "
        "failures.jsonl; default: fail",
    )
    folder.add_argument(
        "--max_failures",
        type=whole_number(0),
        help="with --on_error=list, end the run if more prompts fail; default: 1 %% of them, at least 10",
    )
    folder.add_argument(
        "--probe_share",
        type=share,
        metavar="SHARE",
        help="answer this share of the prompts, such as 1%%, by the full model too, and write their losses to "
        "losses.jsonl, for calm-beam monitor",
    )
    folder.add_argument(
        "--probe_salt",
        help="decides which prompts those are, by a hash of their ids; keep it secret if others choose the ids; "
        "default: the manifest's digest",
    )
    folder.add_argument("--bleurt_checkpoint", help="with --probe_share, for the metric bleurt: its folder")
    add_worker_flags(folder)
    folder.add_argument(
        "--resume",
        action="store_true",
        help="go on with a run that was killed or failed: answer the missing prompts only",
    )
    parser.set_defaults(model_copies=None)


def flag_of_folders(flags: argparse.Namespace) -> str | None:
    """Returns the first flag given that means something only for answers in shards; None if there is none."""
    given = (name for name in _OF_FOLDERS if getattr(flags, name) not in (None, False))
    return next((f"--{name}" for name in given), None)


def check_input_flags(flags: argparse.Namespace) -> None:
    """Refuses flags about files or groups of prompts that contradict each other.

    Raises:
      UsageError: If there are some.
    """
    if flags.group is not None and flags.group_key is not None:
        raise UsageError("--group names the group of all prompts, --group_key that of each: leave one of them out.")
    for name in ("data_format", "inputs_field", "group_key"):
        if flags.input is None and getattr(flags, name) is not None:
            raise UsageError(f"--{name} belongs to --input, which is missing.")


def prompt_reading(flags: argparse.Namespace) -> Reading:
    """Returns how the files of `--input` are read."""
    return Reading(data_format=flags.data_format, inputs_field=flags.inputs_field, group_key=flags.group_key)
