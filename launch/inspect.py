"""`calm-beam inspect PATH`: says in words what a manifest or a checkpoint holds, and checks its integrity."""

from collections.abc import Sequence

from calm_beam.checkpoints import load_checkpoint
from calm_beam.counted import counted
from calm_beam.manifest import Manifest, read_manifest
from calm_beam.printable import printable_line
from calm_beam.storage import exists, is_file, is_folder, joined
from calm_beam.vocabulary import Vocabulary

from .flags import FlagParser, UsageError, naming, parse_own_flags
from .summary import choices_table, tests_in_words
from .terminal import PlainConsole


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = FlagParser(prog="calm-beam inspect", description=(__doc__ or "").split(": ", 1)[1])
    parser.add_argument("path", help="a manifest, a calibration directory that holds one, or a checkpoint")
    parser.add_argument("--checkpoint", help="check that the manifest belongs to this model")
    flags = parse_own_flags(parser, argv)
    path = flags.path
    manifest_path = _manifest_in(path)
    console = PlainConsole()
    if manifest_path is not None:
        expected = load_checkpoint(flags.checkpoint).fingerprint() if flags.checkpoint else None
        _describe_manifest(console, read_manifest(manifest_path, model_fingerprint=expected))
        if expected:
            console.print(f"It belongs to the model in {flags.checkpoint}.")
    elif flags.checkpoint:
        raise UsageError(f"{path} holds no manifest; --checkpoint is for checking one.")
    else:
        _describe_checkpoint(console, path)
    return 0


def _manifest_in(path: str) -> str | None:
    """Returns the manifest that a path names or holds, or None if there is none there."""
    with naming("PATH"):
        if not exists(path):
            raise UsageError(f"{path}: no such file or directory.")
        manifest = joined(path, "manifest.json") if is_folder(path) else path
        return manifest if is_file(manifest) else None


def _describe_manifest(console: PlainConsole, manifest: Manifest) -> None:
    model, decode, data = manifest.model, manifest.decode, manifest.data
    schedule = decode.schedule if decode.tau is None else f"{decode.schedule}, tau {decode.tau:g}"
    steps = "" if decode.exit_interval == 1 else f" in steps of {decode.exit_interval}"
    console.print(f"Manifest of {printable_line(manifest.created)}; its digest is right.")
    console.print(f"Model: {counted(model.layers, 'decoder layer')}, {model.fingerprint}", soft_wrap=True)
    console.print(f"  read from {printable_line(model.uri)}", soft_wrap=True)
    console.print(
        f"Exits: confidence {decode.confidence}, schedule {schedule}, state propagation {decode.state_propagation}, "
        f"from layer {decode.min_exit_layer} on{steps}; {decode.dtype}."
    )
    console.print(
        f"Lengths: inputs up to {counted(decode.max_input_length, 'token')}, outputs up to {decode.max_decode_length}; "
        f"task prefix {decode.task_prefix!r}."
    )
    clusters = "" if data.clusters is None else f" in {counted(data.clusters, 'cluster')}"
    console.print(
        f"Calibration set: {counted(data.examples, 'example')}{clusters} of "
        f"{printable_line(', '.join(data.patterns))}; "
        f"{counted(data.duplicates, 'repeated input')}, "
        f"{data.truncated} cut, {data.failed} failed."
    )
    console.print(choices_table(manifest))
    console.print(tests_in_words(manifest))
    if manifest.plan is not None:
        console.print(f"Plan that the run started with: {manifest.plan.digest}", soft_wrap=True)
    console.print(printable_line(manifest.guarantee))


def _describe_checkpoint(console: PlainConsole, path: str) -> None:
    checkpoint = load_checkpoint(path)
    config = checkpoint.config
    weights = sum(array.size for array in checkpoint.arrays.values())
    console.print(f"Checkpoint in {checkpoint.layout} layout: {checkpoint.uri}", soft_wrap=True)
    console.print(f"Fingerprint: {checkpoint.fingerprint()}", soft_wrap=True)
    console.print(
        f"T5 with {'gated GELU' if config.gated_mlp else 'ReLU'}: {config.num_encoder_layers} encoder and "
        f"{counted(config.num_decoder_layers, 'decoder layer')}, width {config.emb_dim}, "
        f"{counted(config.num_heads, 'head')} of "
        f"{config.head_dim}, feed-forward {config.mlp_dim}, {config.vocab_size} token ids, "
        f"{'tied' if config.tied_head else 'untied'} head; {weights:,} weights."
    )
    console.print(f"Exit classifier: {'yes' if config.exit_classifier else 'no'}.")
    if checkpoint.vocabulary_path is None:
        console.print("Vocabulary: none in or beside it.")
    else:
        vocabulary = Vocabulary(checkpoint.vocabulary_path)
        console.print(f"Vocabulary: {vocabulary.size} ids, {checkpoint.vocabulary_uri}", soft_wrap=True)
