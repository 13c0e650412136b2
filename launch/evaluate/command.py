"""What an experiment on a sample of prompts does once its flags are parsed."""

import importlib.metadata
import json
import platform
import time
from collections.abc import Sequence
from typing import Any

from apache_beam.options.pipeline_options import PipelineOptions

from calm_beam import __version__
from calm_beam.evaluation.performance import Task, measure_variants, measured_variants
from calm_beam.evaluation.sample import encoded_prompts, sample_in_words, sampled
from calm_beam.inputs.all_examples import read_all_examples
from calm_beam.inputs.examples import Example
from calm_beam.launch.flags import as_usage
from calm_beam.launch.flags.metrics import checked_metrics, metric_settings
from calm_beam.launch.runners import Workers
from calm_beam.launch.runners.shared_folder import shared_place
from calm_beam.launch.terminal import PlainConsole, give, say
from calm_beam.launch.terminal.progress import shown_progress
from calm_beam.options import options_of
from calm_beam.outputs.prepared import PreparedSweep
from calm_beam.report import write_page
from calm_beam.report.experiment_page import experiment_page
from calm_beam.report.figures import check_plots_available, write_figure
from calm_beam.storage import joined, replacing, staged

from .experiments import Findings, PreparedExperiment, PreparedSweeps, prepared_experiment
from .output import checked_output, write_rows
from .request import SampleRequest, SweptRequest
from .sweeps import decoded_by, prepared_sample, sweep_workers


def run_experiment(request: SampleRequest, options: PipelineOptions | None) -> int:
    """Runs an experiment, tells what it found and returns the exit status of the command.

    Args:
      request: What is asked for.
      options: Beam's, where it has sweeps; None where it runs without Beam.
    """
    name = request.experiment
    with as_usage((ValueError, OSError)):
        if request.is_demo:
            say("no --checkpoint and no --data: the demo model on the demo data")
        output = checked_output(request, _file_names(name))
        check_plots_available()
        (metric,) = checked_metrics([request.metric], metric_settings(request))
        workers = None
        if options is not None and isinstance(request, SweptRequest):
            workers = sweep_workers(request, options)
        run = prepared_sample(request, runs_here=workers is None or workers.are_here)
        if workers is not None:
            run = run.without_weights()
        prepared = prepared_experiment(request, run)
        examples = read_all_examples(run.paths, run.reading)
        chosen = sampled(examples, request.max_examples)
        task = _task(request, run, metric=metric, examples=chosen)
        place = None if workers is None else shared_place(workers)
    start = time.monotonic()
    with staged(output) as staging:
        if isinstance(prepared, PreparedSweeps) and workers is not None and place is not None:
            findings = _on_workers(prepared, task, examples=chosen, run=run, workers=workers, place=place)
        else:
            findings = _in_this_process(prepared, task)
        sample = sample_in_words(task.prompts, len(examples))
        provenance = {"sample": sample, **_provenance(request, run, metric=metric)}
        _write(staging, name, findings=findings, provenance=provenance)
    console = PlainConsole()
    for table in findings.tables:
        console.print(table)
    console.print(findings.notes)
    files = [joined(output, file) for file in _file_names(name)]
    give({"experiment": name, "output": output, "rows": findings.rows, **provenance}, files=files)
    console.print(f"{sample} {time.monotonic() - start:.0f} s.")
    console.print(f"Files: {', '.join(files)}", soft_wrap=True)
    return 0


def _in_this_process(prepared: PreparedExperiment | PreparedSweeps, task: Task) -> Findings:
    """Returns what an experiment finds that decodes one prompt after the other here."""
    passes = len(prepared.variants) if isinstance(prepared, PreparedSweeps) else 1
    with shown_progress(enabled=True) as progress:
        progress.report("read", passes * len(task.prompts))
        progress.report("compiling", 1)

        def decoded() -> None:
            progress.report("decoded", 1)

        if isinstance(prepared, PreparedSweeps):
            return prepared.findings(task, measure_variants(task, prepared.variants, decoded=decoded))
        return prepared.measure(task, decoded)


def _on_workers(
    prepared: PreparedSweeps,
    task: Task,
    *,
    examples: Sequence[Example],
    run: PreparedSweep,
    workers: Workers,
    place: str,
) -> Findings:
    """Returns what an experiment finds whose sweeps are decoded by others."""
    with workers.shown_progress() as progress:
        progress.report("read", len(prepared.variants) * len(examples))
        generations = (
            decoded_by(workers, examples, variant, run=run, place=place, progress=progress)
            for variant in prepared.variants
        )
        return prepared.findings(task, measured_variants(task, prepared.variants, generations))


def _task(request: SampleRequest, run: PreparedSweep, *, metric: str, examples: Sequence[Example]) -> Task:
    return Task(
        checkpoint=run.checkpoint,
        vocabulary=run.vocabulary,
        prompts=encoded_prompts(run, examples),
        metric=metric,
        metric_settings=metric_settings(request),
        max_input_length=run.settings.max_input_length,
        max_decode_length=request.max_decode_length,
        precision=run.settings.precision,
        **request.asked_of_decoder(),
    )


def _provenance(request: SampleRequest, run: PreparedSweep, *, metric: str) -> dict[str, Any]:
    """Returns what it takes to measure the same again."""
    packages = ("jax", "flax", "numpy", "rouge-score", "sentencepiece")
    left_out = (
        *("experiment", "output", "overwrite"),
        # Who decodes moves no output.
        *("accelerator", "model_copies", "model_parallelism", "num_shards"),
    )
    asked = {name: getattr(request, name) for name, _ in options_of(type(request)) if name not in left_out}
    asked |= {"metric": metric, "checkpoint": request.model_path, "data": request.patterns}
    return {
        "flags": dict(sorted(asked.items())),
        "model": {"fingerprint": run.model_fingerprint, "layers": run.checkpoint.config.num_decoder_layers},
        "vocabulary": run.vocabulary.fingerprint if run.vocabulary else None,
        "software": {
            "calm-beam": __version__,
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in packages},
        },
    }


def _file_names(name: str) -> tuple[str, ...]:
    return tuple(f"{name}.{suffix}" for suffix in ("csv", "json", "svg", "html"))


def _write(directory: str, name: str, *, findings: Findings, provenance: dict[str, Any]) -> None:
    table, content, plot, page = (joined(directory, file) for file in _file_names(name))
    write_rows(table, findings.rows)
    text = json.dumps({"experiment": name, **provenance, "rows": findings.rows}, ensure_ascii=False, indent=1)
    with replacing(content) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    write_figure(plot, [findings.charts], note="bars and bands: ± one standard error")
    write_page(
        experiment_page(
            name,
            headline=findings.headline,
            notes=findings.notes,
            charts=findings.charts,
            rows=findings.rows,
            provenance=provenance,
        ),
        page,
    )
