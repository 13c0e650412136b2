"""What `calm-beam verify` does once its flags are parsed."""

import argparse
import dataclasses
import glob
import sys
from collections.abc import Collection, Sequence

import numpy as np
from apache_beam.options.pipeline_options import PipelineOptions

from calm_beam.calibration.anytime import AnytimeEvidence
from calm_beam.calibration.fingerprint import content_sum_of, fingerprint_text
from calm_beam.calibration.verification import FreshLosses, Verdict, promised_thresholds, verify_each
from calm_beam.decoding.recorded import recorded_settings
from calm_beam.exits.measures import check_named
from calm_beam.inputs import read_examples
from calm_beam.inputs.examples import Example
from calm_beam.inputs.set_parts import CALIBRATING, CONFIRMING, SetPart
from calm_beam.inputs.vocabularies.chat import NO_TEMPLATE
from calm_beam.launch.flags import UsageError, as_usage
from calm_beam.launch.flags.data import asked_shards
from calm_beam.launch.flags.manifest import check_precision, find_manifest
from calm_beam.launch.flags.metrics import checked_metrics, metric_settings
from calm_beam.launch.run_sweep import run_sweep
from calm_beam.launch.runners import Workers
from calm_beam.launch.runners.dataflow import job_paths
from calm_beam.launch.runners.shared_folder import passing_folder, shared_place
from calm_beam.launch.setup_run import prepare_run
from calm_beam.launch.terminal import PlainConsole, say, tell
from calm_beam.launch.terminal.summary import group_line, variant_lines
from calm_beam.launch.terminal.tables import PlainTable
from calm_beam.manifest import Calibration, Manifest, ManifestError, Variant, read_manifest, unseen_in_words
from calm_beam.metrics.registry import BLEURT, check_may_run, check_source, full_name, get_metric
from calm_beam.outputs import DecodeJob, read_generations, stored_prompts
from calm_beam.outputs.assignment import BATCH
from calm_beam.outputs.prepared import PreparedSweep
from calm_beam.outputs.shard_order import with_unique_ids
from calm_beam.risk.pvalues import P_VALUES
from calm_beam.risk.tails import tail_in_words
from calm_beam.serving.agreement import check_model, check_vocabulary
from calm_beam.storage import joined, list_files, parent
from calm_beam.text import counted, printable_line
from calm_beam.transforms import ReadExamples

from .carried import take_up
from .verdicts import BROKEN, check_alpha, conclude, verdict_in_words

# Order of bets in manifests that do not say; any that was fixed beforehand will do.
_DEFAULT_SALT = "calm-beam/0"
# Flags of what workers read: what is scored, and against what, is read here.
_WORKERS_PATHS = ("checkpoint", "vocabulary", "data")


def verify_manifest(flags: argparse.Namespace, options: PipelineOptions) -> int:
    """Tests as the flags say, tells about it and returns the exit status of the command."""
    with as_usage():
        check_alpha(flags.alpha)
        path = find_manifest(flags.manifest)
        manifest = read_manifest(path)
        check_precision(flags, manifest.decode)
        promised = tuple(entry for entry in manifest.calibrations if entry.threshold is not None)
        entries = promised
        if flags.metric is not None:
            entries = _with_metrics(entries, flags, manifest=manifest)
        if not entries:
            of_them = "" if flags.metric is None else f" of {', '.join(flags.metric)}"
            tell(f"Every entry of the manifest{of_them} says never exit: there is nothing that could be broken.")
            return 0
        _check_entries(entries, flags, manifest=manifest)
        _take_policies(flags, manifest)
        workers = Workers.prepared(
            options,
            accelerator=flags.accelerator,
            paths=job_paths(flags, _WORKERS_PATHS),
            num_shards=lambda: asked_shards(flags),
        )
        workers.refuse_template(command="verify")
        by_variant: dict[Variant | None, list[Calibration]] = {}
        for entry in entries:
            by_variant.setdefault(entry.variant, []).append(entry)
        runs = _prepare(flags, manifest, variants=list(by_variant.values()), runs_here=workers.are_here)
        place = shared_place(workers)
        state = take_up(flags, path, manifest=manifest.digest, promises=len(promised))
        fresh_examples = _check_data(runs[0], flags, manifest=manifest, path=path)
        names = {example.id if example.cluster is None else example.cluster for example in fresh_examples}
        if state is not None:
            are_own = any(example.has_own_id or example.cluster is not None for example in fresh_examples)
            state.check_new(names, are_own=are_own, unit="example" if flags.cluster_key is None else "cluster")
    fresh = {
        variant: _decode(run, workers, place=place, flags=flags, manifest=manifest, entries=of_variant)
        for (variant, of_variant), run in zip(by_variant.items(), runs, strict=True)
    }
    # Which they are depends on no loss.
    tested = [entry for entry in entries if fresh[entry.variant].has_any(entry)]
    if without := sorted({entry.group or "" for entry in entries} - {entry.group or "" for entry in tested}):
        say(f"the fresh data have no example of group {', '.join(map(printable_line, without))}: not tested")
    if state is None:
        verdicts = verify_each([fresh[entry.variant] for entry in tested], tested, alpha=flags.alpha)
    else:
        state.keep(
            state.evidence.after_run(
                names,
                [_losses_of(fresh.get(entry.variant), entry, entries=entries) for entry in promised],
                entries=promised,
            )
        )
        verdicts = state.evidence.verdicts(promised)
    about = [verdict.entry for verdict in verdicts]
    others = sum(entry not in entries and entry not in about for entry in promised)
    evidence = None if state is None else state.evidence
    _print(manifest, list(fresh.values()), verdicts=verdicts, others=others, evidence=evidence, flags=flags)
    return BROKEN if any(verdict.is_broken for verdict in verdicts) else 0


def _losses_of(
    fresh: FreshLosses | None, entry: Calibration, *, entries: Collection[Calibration]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns an entry's losses, and the same as lenient as can be; None if it is not tested or has none."""
    if fresh is None or entry not in entries or not fresh.has_any(entry):
        return None
    return fresh.at(entry), fresh.at(entry, lenient=True)


def _with_metrics(
    entries: tuple[Calibration, ...], flags: argparse.Namespace, *, manifest: Manifest
) -> tuple[Calibration, ...]:
    """Returns the entries of the metrics that `--metric` names; which they are is settled before any loss is seen."""
    # Others are taken as they are: to look one up might import it.
    named = {full_name(name, metric_settings(flags)) if name == BLEURT else name for name in flags.metric}
    known = dict.fromkeys(entry.metric for entry in manifest.calibrations)
    for name in sorted(named - known.keys()):
        raise UsageError(f"--metric={name}: the manifest has no entry of it, only of {', '.join(known)}.")
    return tuple(entry for entry in entries if entry.metric in named)


def _check_entries(entries: Sequence[Calibration], flags: argparse.Namespace, *, manifest: Manifest) -> None:
    metrics = sorted({entry.metric for entry in entries})
    for name in metrics:
        how = f"pass --metric={','.join(metrics)}, or name the metrics to test without it"
        check_may_run(name, named=flags.metric or (), how=how)
        check_source(name, manifest.software)
    for entry in entries:
        if entry.p_value not in P_VALUES:
            raise UsageError(
                f"the manifest was made with p-value {entry.p_value!r}, which this calm-beam does not know. Upgrade it."
            )
    checked_metrics(metrics, metric_settings(flags))


def _take_policies(flags: argparse.Namespace, manifest: Manifest) -> None:
    """Adds to the flags what else the manifest decides; one without a plan was made with the defaults."""
    plan = manifest.plan
    flags.checkpoint = flags.checkpoint or manifest.model.uri
    flags.extra_ids = manifest.vocabulary.extra_ids if manifest.vocabulary else 0
    flags.recorded_chat = manifest.vocabulary.chat if manifest.vocabulary else None
    if flags.recorded_chat is None:
        flags.chat_template = NO_TEMPLATE
    flags.cluster_key = plan.cluster_key if plan else None
    flags.group_key = plan.group_key if plan else None
    if flags.group_key is None and manifest.data.groups is not None:
        raise UsageError("the manifest has groups, but no plan that says which field of a row names them.")
    flags.on_error = plan.on_error if plan else "fail"
    flags.on_long = plan.on_long if plan else "truncate"
    # However many fail: the verdicts count them.
    flags.max_failures = sys.maxsize


def _prepare(
    flags: argparse.Namespace, manifest: Manifest, *, variants: Sequence[Sequence[Calibration]], runs_here: bool
) -> list[PreparedSweep]:
    """Returns a run for the entries of each variant, whose model and vocabulary are those of the manifest."""
    check_named(manifest.decode.confidence, flags.confidence)
    settings = [recorded_settings(manifest.decode_of(entries[0]), promised_thresholds(entries)) for entries in variants]
    run = prepare_run(
        flags,
        needs_references=any(entry.consistency == "risk" for entries in variants for entry in entries),
        cluster_key=flags.cluster_key,
        group_key=flags.group_key,
        settings=settings[0],
        # Without one, metrics have compared token ids, and have to do so again.
        finds_vocabulary=manifest.vocabulary is not None,
        runs_here=runs_here,
    )
    try:
        check_model(manifest.model, run.checkpoint)
        check_vocabulary(manifest.vocabulary, run.vocabulary, checkpoint=run.checkpoint)
    except ManifestError as error:
        raise UsageError(f"--checkpoint {flags.checkpoint}: {error}") from error
    run = run.without_weights()
    # What was confirmed is a promise about the decoder that serves.
    decoder = None if manifest.confirmation is None else BATCH
    return [
        dataclasses.replace(run, request=dataclasses.replace(run.request, settings=each, decoder=decoder))
        for each in settings
    ]


def _check_data(run: PreparedSweep, flags: argparse.Namespace, *, manifest: Manifest, path: str) -> list[Example]:
    """Returns the fresh examples; refuses the calibration set itself, and tells how many of its prompts come again."""
    fresh: list[Example] = []
    for index, name in enumerate(run.paths):
        fresh.extend(read_examples(name, run.reading, file_index=index))
    unique = with_unique_ids(fresh)
    if _fingerprints(unique, manifest) & _used_fingerprints(manifest):
        raise UsageError(
            f"--data {','.join(flags.data)}: is the calibration set itself. What chose the threshold cannot test it: "
            "take examples that were drawn anew."
        )
    known = {group.name for group in manifest.data.groups or ()}
    if manifest.data.groups is not None and (unknown := {str(example.group) for example in fresh} - known):
        say(
            f"the manifest knows no group {', '.join(printable_line(name) for name in sorted(unknown))}: such examples "
            "count for the promises about all prompts alone"
        )
    beside = glob.escape(parent(path))
    stored = list_files(joined(beside, "generations", "*", "*.parquet"))
    stored += list_files(joined(beside, "confirmation", "generations", "*", "*.parquet"))
    if not stored:
        say(
            "whether the data share prompts with the calibration set is unknown: its generations are not "
            "beside the manifest"
        )
        return unique
    calibrated = {_whole_prompt(run, prompt) for name in stored for prompt in stored_prompts(name)}
    shared = sum(_whole_prompt(run, (example.input, example.input_ids)) in calibrated for example in fresh)
    if shared:
        say(
            f"warning: {shared} of {counted(len(fresh), 'prompt')} {'is' if shared == 1 else 'are'} in the calibration "
            "set too. Unless prompts repeat by themselves, the data are not fresh, and what they seem to prove again "
            "they do not."
        )
    return unique


def _fingerprints(examples: Sequence[Example], manifest: Manifest) -> set[str]:
    """Returns the fingerprints of examples: of all of them, and of each part, where some confirm what others chose."""
    share = None if manifest.plan is None else manifest.plan.confirm_share
    sets = [examples]
    if manifest.plan is not None and share is not None:
        parts = [SetPart(name=name, confirm_share=share, salt=manifest.plan.salt) for name in (CALIBRATING, CONFIRMING)]
        sets += [[example for example in examples if part.takes(example)] for part in parts]
    return {fingerprint_text(content_sum_of(some)) for some in sets if some}


def _used_fingerprints(manifest: Manifest) -> set[str]:
    confirmed = () if manifest.confirmation is None else (manifest.confirmation.data.fingerprint,)
    return {manifest.data.fingerprint, *confirmed}


def _whole_prompt(
    run: PreparedSweep, prompt: tuple[str | None, tuple[int, ...] | None]
) -> str | tuple[int, ...] | None:
    """Returns a prompt as token ids, where they can be had: what came as text may come back as ids."""
    text, ids = prompt
    if text is None or run.vocabulary is None:
        return text if ids is None else ids
    ids, _ = run.vocabulary.encode_prompt(run.settings.task_prefix + text, room=sys.maxsize)
    return ids


def _decode(
    run: PreparedSweep,
    workers: Workers,
    *,
    place: str,
    flags: argparse.Namespace,
    manifest: Manifest,
    entries: Sequence[Calibration],
) -> FreshLosses:
    """Returns the losses of the fresh data; the outputs themselves are not kept."""
    metrics = {entry.metric: get_metric(entry.metric, metric_settings(flags)) for entry in entries}
    pipeline = workers.new_pipeline()
    with passing_folder(place, name="calm-beam-verify-") as folder, workers.shown_progress() as progress:
        read = pipeline | "ReadExamples" >> ReadExamples(run.data, num_shards=run.num_shards, progress=progress)
        run_sweep(pipeline, read, sweep=run, folder=folder, workers=workers, progress=progress)
        return FreshLosses.of(
            (item for path in DecodeJob.shard_files(folder) for item in read_generations(path)),
            entries,
            metrics=metrics,
            salt=manifest.plan.salt if manifest.plan else _DEFAULT_SALT,
            on_error=flags.on_error,
        )


def _print(
    manifest: Manifest,
    fresh: Sequence[FreshLosses],
    *,
    verdicts: Sequence[Verdict[Calibration]],
    others: int,
    evidence: AnytimeEvidence | None,
    flags: argparse.Namespace,
) -> None:
    console = PlainConsole()
    table = PlainTable("The manifest's entries on fresh data")
    table.add_column("consistency\nmetric", overflow="fold")
    table.add_numbers("delta\nepsilon", "threshold", "risk then\nnow", "p proved\np broken", "verdict")
    for verdict in verdicts:
        entry = verdict.entry
        table.add_row(
            f"{group_line(entry)}"
            f"{entry.consistency}{' (relu)' if entry.known_loss == 'relu' else ''}{tail_in_words(entry.known_loss)}\n"
            f"{printable_line(entry.metric)}",
            f"{entry.delta:g}\n{entry.epsilon:g}",
            f"{entry.threshold:g}{variant_lines(entry.variant)}",
            f"{entry.risk:.4f}\n{verdict.risk:.4f}",
            f"{verdict.p_value:.2g}\n{verdict.excess_p_value:.2g}",
            verdict_in_words(verdict),
        )
    console.print(table)
    losses = fresh[0]
    failed = max(each.failed for each in fresh)
    units = counted(losses.examples, "example") if flags.cluster_key is None else counted(len(losses.table), "cluster")
    never = sum(entry.threshold is None for entry in manifest.calibrations)
    if manifest.confirmation is not None:
        units += ", decoded by the decoder that serves"
    console.print(
        f"{units}, {failed} failed; {never} of the manifest's entries {'says' if never == 1 else 'say'} never exit."
    )
    for each in fresh:
        if each.unseen:
            console.print(printable_line(unseen_in_words([found.record() for found in each.unseen])))
    if others:
        console.print(f"{counted(others, 'promise')} of other metrics {'was' if others == 1 else 'were'} not tested.")
    conclude(console, verdicts, alpha=flags.alpha, evidence=evidence)
