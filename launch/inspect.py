"""`calm-beam inspect PATH`: describes a manifest or a checkpoint, and checks its integrity.

    calm-beam inspect calibration

Check whether a model is the one that was calibrated:

    calm-beam inspect calibration --checkpoint=model
"""

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Sequence

from calm_beam.checkpoints import Checkpoint, load_checkpoint, missing_folder, stored_architecture
from calm_beam.extras import MissingExtraError
from calm_beam.inputs.vocabularies.tokenizer_json import TOKENIZER, read_tokenizer_files
from calm_beam.inputs.vocabularies.vocabulary import open_vocabulary
from calm_beam.manifest import (
    SCHEMAS,
    Manifest,
    SettingManifest,
    clusters_in_words,
    confirming_in_words,
    engine_in_words,
    flaws_in_words,
    near_ties_in_words,
    plans_in_words,
    read_any_manifest,
    repeats_in_words,
    rounds_in_words,
    served_in_words,
    unseen_in_words,
    without_keys,
)
from calm_beam.manifest.plan_list import GENERATIONS, PLANS, PlanList
from calm_beam.options import Options, again, options_of
from calm_beam.options.groups import FactsOfAny, ModelSource, Trusted
from calm_beam.storage import exists, is_file, is_folder, joined, obstacle, parent
from calm_beam.text import counted, printable_line

from .flags import FlagParser, UsageError, add_request, naming, parse_own_flags, request_of
from .flags.requests import with_result
from .flags.shared_options import declared
from .terminal import PlainConsole, give
from .terminal.summary import choices_table, confirmation_lines, print_choices, speed_lines, tests_in_words


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared(Options):
    """The model that a manifest is checked against."""

    checkpoint: str | os.PathLike[str] | None = again(
        ModelSource, "checkpoint", sentence="check that the manifest belongs to this model, and can be served by it"
    )
    vocabulary: str | None = again(
        ModelSource,
        "vocabulary",
        sentence="its SentencePiece model; default: in or next to --checkpoint",
        belongs_to=(),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectRequest(Compared, FactsOfAny, Trusted):
    """How a manifest or a checkpoint is read, and the model it is checked against."""

    def naming_a_model(self) -> str | None:
        """Returns the first option given that is about a model; None if there is none."""
        return next((name for name, _ in options_of(InspectRequest) if getattr(self, name) is not None), None)


def flag_parsers() -> tuple[FlagParser, ...]:
    """Returns the parsers of all forms of the command."""
    return (with_result(_parser()),)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    (parser,) = flag_parsers()
    flags = parse_own_flags(parser, argv)
    _inspect(flags.path, request_of(InspectRequest, flags, parser=parser))
    return 0


def _inspect(path: str, request: InspectRequest) -> None:
    manifest_path = _manifest_in(path)
    console = PlainConsole()
    if manifest_path is not None:
        manifest = read_any_manifest(manifest_path)
        if isinstance(manifest, SettingManifest):
            if request.naming_a_model():
                raise UsageError(f"{path}: is of kind settings: it belongs to no model. Leave out what names one.")
            _describe_external(console, manifest)
            _describe_plans(console, manifest, path=manifest_path)
            give({"manifest": manifest.to_dict()})
            return
        checkpoint = _named_checkpoint(request)
        agreed = None if checkpoint is None else _check_agreement(manifest, request, checkpoint)
        operations = () if checkpoint is None else _operations(manifest, checkpoint)
        _describe_manifest(console, manifest, operations=operations)
        _describe_plans(console, manifest, path=manifest_path)
        if agreed:
            console.print(agreed)
        give({"manifest": manifest.to_dict(), "agreement": agreed})
    elif given := next((name for name in ("checkpoint", "vocabulary", "confidence") if getattr(request, name)), None):
        raise UsageError(f"{path} holds no manifest; --{given} is for checking one.")
    else:
        _refuse_unfinished(path)
        _describe_checkpoint(console, load_checkpoint(path, declared=declared(request)))


def _parser() -> FlagParser:
    parser = FlagParser(prog="calm-beam inspect", doc=__doc__)
    parser.add_argument("path", help="a manifest, a calibration directory that holds one, or a checkpoint")
    add_request(parser, InspectRequest)
    return parser


def _manifest_in(path: str) -> str | None:
    """Returns the path of the manifest that a path names or contains; None if there is none."""
    with naming("PATH"):
        if not exists(path):
            raise UsageError(missing_folder(path, expected="file or directory"))
        manifest = joined(path, "manifest.json") if is_folder(path) else path
        if why := obstacle(manifest):
            raise UsageError(f"{manifest}: {why}")
        return manifest if is_file(manifest) else None


def _refuse_unfinished(path: str) -> None:
    """Refuses the folder of a calibration that has no manifest yet, which is no model either.

    Raises:
      UsageError: If it is one; says how to go on.
    """
    if is_folder(joined(path, PLANS)) and is_folder(joined(path, GENERATIONS)):
        raise UsageError(
            f"{path}: a calibration that did not finish, without a manifest yet. The same command with --resume goes "
            "on with it; --overwrite begins again."
        )


def _named_checkpoint(request: InspectRequest) -> Checkpoint | None:
    """Returns the model to compare a manifest with; None if none is named.

    Raises:
      UsageError: If a vocabulary is named without a model.
    """
    if request.checkpoint is None:
        if (given := request.naming_a_model()) is not None:
            raise UsageError(f"--{given} belongs to --checkpoint, which is missing.")
        return None
    return load_checkpoint(os.fspath(request.checkpoint), declared=declared(request))


def _operations(manifest: Manifest, checkpoint: Checkpoint) -> Sequence[float | None]:
    """Returns what decoding takes of the full model's operations, for each entry."""
    # Imported here, since it needs JAX, which a manifest alone does not.
    from calm_beam.evaluation.flops import DecoderSizes, shares_of_operations

    return shares_of_operations(manifest, DecoderSizes.of(checkpoint.config))


def _check_agreement(manifest: Manifest, request: InspectRequest, checkpoint: Checkpoint) -> str:
    """Returns a sentence that a manifest belongs to a model.

    Raises:
      ManifestError: If it does not, or cannot be served, with the message of `calm-beam generate`.
    """
    # Imported here, as above.
    from calm_beam.decoding.engine_choice import Machine
    from calm_beam.serving.agreement import agreed_settings, other_engine_in_words, recorded_vocabulary, served_engine

    vocabulary = recorded_vocabulary(manifest.vocabulary, checkpoint, path=request.vocabulary)
    others: dict[str, None] = {}
    for entry in manifest.calibrations:
        settings = agreed_settings(
            manifest, entry, checkpoint=checkpoint, vocabulary=vocabulary, confidence=request.confidence
        )
        served = served_engine(
            manifest,
            settings,
            config=checkpoint.config,
            engine="auto",
            exit_head="auto",
            machine=Machine.here(),
        )
        others[other_engine_in_words(manifest, entry, served=served.batch)] = None
    with_vocabulary = "" if vocabulary is None else ", and to its vocabulary"
    found = f"It belongs to the model in {request.checkpoint}{with_vocabulary}."
    return " ".join([found, *(f"Here, {sentence}" for sentence in others if sentence)])


def _describe_manifest(console: PlainConsole, manifest: Manifest, *, operations: Sequence[float | None]) -> None:
    model, decode, data = manifest.model, manifest.decode, manifest.data
    pareto = None if manifest.plan is None else manifest.plan.pareto
    tau, interval = manifest.shared_by_variants("tau"), manifest.shared_by_variants("exit_interval")
    schedule = decode.schedule if tau is None else f"{decode.schedule}, tau {tau:g}"
    first = "the variant's layer" if pareto else f"layer {decode.min_exit_layer}"
    steps = "" if interval in (None, 1) else f" in steps of {interval}"
    confidence = manifest.shared_by_variants("confidence") or "the variant's"
    console.print(f"Manifest of {printable_line(manifest.created)}{_form_in_words(manifest)}; its digest is right.")
    console.print(f"Model: {counted(model.layers, 'decoder layer')}, {model.fingerprint}", soft_wrap=True)
    console.print(f"  read from {printable_line(model.uri)}", soft_wrap=True)
    console.print(
        f"Exits: confidence {confidence}, schedule {schedule}, state propagation {decode.state_propagation}, "
        f"from {first} on{steps}; {printable_line(decode.precision_in_words())}."
    )
    console.print(printable_line(engine_in_words(manifest)))
    if near_ties := near_ties_in_words(manifest):
        console.print(near_ties)
    if pareto is not None:
        console.print(f"Variants: {'; '.join(variant.in_words() for variant in pareto.variants)}.")
        console.print(
            "Each was tested by itself, at an equal share of epsilon."
            if data.choosing is None
            else f"{data.choosing:,} of {data.units:,} {data.unit} chose what the others tested, drawn by a hash."
        )
    console.print(
        f"Lengths: inputs up to {counted(decode.max_input_length, 'token')}, outputs up to {decode.max_decode_length}; "
        f"task prefix {decode.task_prefix!r}."
    )
    if manifest.vocabulary is not None and (chat := manifest.vocabulary.chat) is not None:
        system = "no system message" if chat.system is None else f"the system message {chat.system!r}"
        turns = "all of one turn" if data.several_turns is None else f"{data.several_turns:,} of several turns"
        console.say(printable_line(f"Prompts are chats, by a template, with {system}; {turns}."))
    if manifest.vocabulary is not None and (stops := manifest.vocabulary.stop_strings) is not None:
        _describe_stop_strings(console, stops)
    clusters = "" if data.clusters is None else f" in {counted(data.clusters, 'cluster')}"
    console.print(
        f"Calibration set: {counted(data.examples, 'example')}{clusters} of "
        f"{printable_line(', '.join(data.patterns))}; {flaws_in_words(data)}.",
        # A path that is broken into lines cannot be copied.
        soft_wrap=True,
    )
    for line in _of_examples(manifest):
        console.print(printable_line(line))
    if data.groups is not None and manifest.plan is not None:
        groups = ", ".join(f"{printable_line(each.name)} ({counted(each.examples, 'example')})" for each in data.groups)
        console.print(f"Groups by {printable_line(manifest.plan.group_key or '')}: {groups}.")
    console.print(choices_table(manifest, operations))
    for found in (*confirmation_lines(manifest), *speed_lines(manifest)):
        console.print(found)
    console.print(tests_in_words(manifest))
    for line in filter(None, (rounds_in_words(manifest), clusters_in_words(manifest), served_in_words(manifest))):
        console.print(printable_line(line))
    if manifest.plan is not None:
        console.print(f"Plan settled before the run: {manifest.plan.digest}", soft_wrap=True)
    console.print(printable_line(without_keys(manifest.guarantee)))


def _form_in_words(manifest: Manifest | SettingManifest) -> str:
    """Returns a clause saying that a manifest has an earlier version's format; empty if it has the current one."""
    return "" if manifest.schema_version == max(SCHEMAS) else f", of form {SCHEMAS[manifest.schema_version]}"


def _of_examples(manifest: Manifest) -> Iterator[str]:
    """Yields facts about the examples other than their number."""
    if manifest.data.unseen:
        yield unseen_in_words(manifest.data.unseen)
    if confirming := confirming_in_words(manifest):
        yield f"Confirmation: {confirming}"
    if repeats := repeats_in_words(manifest):
        yield repeats


def _describe_external(console: PlainConsole, manifest: SettingManifest) -> None:
    data, plan = manifest.data, manifest.plan
    form = _form_in_words(manifest)
    console.print(f"Manifest of {printable_line(manifest.created)}, of kind settings{form}; its digest is right.")
    console.print(f"It is about a sweep of {counted(len(manifest.settings), 'setting')} that was made elsewhere.")
    if (decoder := manifest.decoder) is not None:
        failed = (
            "" if not decoder.failed else f"; {counted(decoder.failed, 'example')} without an answer count with loss 1"
        )
        console.say(printable_line(f"Decoded elsewhere, by {decoder.name}{failed}."))
    if plan.baseline is not None:
        of_task = "" if plan.task is None else f" of {plan.task}"
        of_task = of_task if plan.consistency is None else f", {plan.consistency} consistency"
        better = "" if plan.direction is None else f" (a {plan.direction} score is better)"
        console.say(printable_line(f"Losses: {plan.metric}{of_task}{better}, against {plan.baseline}."))
    clusters = "" if data.clusters is None else f" in {counted(data.clusters, 'cluster')}"
    groups = "" if not data.groups else f" and {counted(len(data.groups), 'group')}"
    console.say(f"Examples: {data.examples:,}{clusters}{groups}, of {printable_line(', '.join(data.patterns))}.")
    print_choices(console, manifest)
    console.print(f"Plan settled before the run: {plan.digest}", soft_wrap=True)
    console.print(printable_line(without_keys(manifest.guarantee)))


def _describe_plans(console: PlainConsole, manifest: Manifest | SettingManifest, *, path: str) -> None:
    """Prints which plan of the same outputs the manifest is about, the earlier plans, and the number of later ones."""
    earlier = manifest.earlier_plans or ()
    of = "losses" if isinstance(manifest, SettingManifest) else "outputs"
    if earlier:
        console.print(plans_in_words(earlier, of=of))
    for each in earlier:
        seen = "" if each.answered else ", no result shown"
        console.print(f"  {each.plan}, by {printable_line(each.command)}, {each.asked}{seen}", soft_wrap=True)
    later = len(PlanList(parent(path)).plans()) - len(earlier) - 1
    if later > 0:
        console.print(
            f"{counted(later, 'more plan was', several='more plans were')} asked of these {of} since. A user who picks "
            "one of several results after seeing them has the guarantee of none."
        )


def _describe_stop_strings(console: PlainConsole, texts: Sequence[str]) -> None:
    console.say(printable_line(f"Outputs end before {' or '.join(map(repr, texts))}."))


def _describe_checkpoint(console: PlainConsole, checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    weights = sum(array.size for array in checkpoint.arrays.values())
    console.print(f"Checkpoint in {checkpoint.layout} layout: {checkpoint.uri}", soft_wrap=True)
    console.print(f"Fingerprint: {checkpoint.fingerprint()}", soft_wrap=True)
    console.print(f"{stored_architecture(config).in_words(config)}; {weights:,} weights.")
    for sentence in (*checkpoint.stated, *checkpoint.assumed):
        console.say(sentence)
    console.print(f"Exit classifier: {'yes' if config.exit_classifier else 'no'}.")
    give(
        {
            "uri": checkpoint.uri,
            "layout": checkpoint.layout,
            "fingerprint": checkpoint.fingerprint(),
            "weights": weights,
            "layers": config.num_decoder_layers,
            "exit_classifier": bool(config.exit_classifier),
            "vocabulary": checkpoint.vocabulary_uri,
            "assumed": checkpoint.assumed,
        }
    )
    if stops := checkpoint.generation.stop_strings:
        _describe_stop_strings(console, stops)
    if checkpoint.vocabulary_path is None:
        console.print("Vocabulary: none in or next to it.")
    else:
        _describe_vocabulary(console, checkpoint.vocabulary_path, uri=checkpoint.vocabulary_uri)


def _describe_vocabulary(console: PlainConsole, path: pathlib.Path, *, uri: str | None) -> None:
    try:
        vocabulary = open_vocabulary(path)
    except MissingExtraError as error:
        console.say(f"Vocabulary: {uri}, which was not opened: {error}")
    else:
        sentinels = f", {vocabulary.extra_ids} of them sentinels" if vocabulary.extra_ids else ""
        console.say(f"Vocabulary: {vocabulary.size} ids{sentinels}, {uri}")
    if path.name == TOKENIZER and read_tokenizer_files(str(path)).chat_template is not None:
        console.say(
            "Chat template: yes. Commands that make prompts of texts need --chat_template: model for this one, a file, "
            "or none."
        )
