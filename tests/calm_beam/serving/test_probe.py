"""Losses in service are those of calibration, of a sample that does not depend on them."""

import dataclasses
import json
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from calm_beam.launch.cli import main
from calm_beam.manifest import Calibration, ManifestError, Objective, write_manifest
from calm_beam.metrics import rouge_l
from calm_beam.metrics.registry import METRICS, MetricError
from calm_beam.outputs import Generation, Output
from calm_beam.outputs.scoring import score_generation
from calm_beam.risk.losses import LOSS_SCALE, to_signed_fixed_point
from calm_beam.serving import Answer, Generator, LossProbe, OutputError
from tests.builders import build_checkpoint
from tests.calm_beam.calibration.builders import build_example
from tests.calm_beam.serving.builders import build_entry, build_served_manifest
from tests.pipelines import CONFIG

_CHECKPOINT = build_checkpoint(CONFIG)
_PROMPTS = [[5, 9, 12, 1], [7, 3, 1], [20, 21, 22, 23, 24, 1], [63], [40, 2, 1]]


def _probe(path: pathlib.Path, entry: Calibration | None = None, **options: Any) -> tuple[Generator, LossProbe]:
    manifest = build_served_manifest(_CHECKPOINT, (entry or build_entry(0.2),))
    generator = Generator.from_manifest(manifest, _CHECKPOINT)
    return generator, LossProbe(generator, path, **{"share": 1.0, "salt": "a", **options})


def _rows(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _calibrated_loss(answer: Answer, full: Answer, entry: Calibration, references: Sequence[str]) -> int:
    outputs = [
        Output(text=a.text, tokens=a.tokens, exit_layers=a.exit_layers, confidences=a.confidences)
        for a in (full, answer)
    ]
    generation = Generation(
        example=build_example(references=tuple(references)),
        truncated=False,
        duplicate=False,
        failure=None,
        outputs=tuple(outputs),
    )
    assert entry.loss is not None
    objective = Objective(entry.consistency, entry.metric, loss=entry.loss)
    return int(score_generation(generation, [objective], metrics=METRICS, num_thresholds=1)[0, 0])


@pytest.mark.parametrize(
    "entry",
    [
        build_entry(0.2),
        build_entry(0.2, consistency="risk", loss="signed", p_value="signed_mixture"),
        build_entry(0.2, consistency="risk", loss="relu"),
        build_entry(0.2, loss="dissimilarity>0.3", p_value="exact_binomial"),
        build_entry(0.2, consistency="risk", loss="relu>0.3", p_value="exact_binomial"),
    ],
    ids=lambda entry: entry.loss,
)
def test_losses_are_those_of_calibration(tmp_path: pathlib.Path, entry: Calibration) -> None:
    """Each kind of loss is that of scoring the same outputs; some differ from 0, and all are in the file."""
    generator, probe = _probe(tmp_path / "losses", entry)
    found = []
    for number, prompt in enumerate(_PROMPTS):
        answer, full = generator.generate(prompt), generator.full_model().generate(prompt)
        # References are one of the two outputs, so that losses of both signs occur.
        right = (full, answer)[number % 2]
        # As ids, since the manifest has no vocabulary; eos and padding are not part of the text.
        references = ([*right.tokens, 0], [9, 9, 9]) if entry.consistency == "risk" else ()
        texts = (right.text, "9 9 9") if references else ()
        loss = probe.observe(str(number), prompt, answer=answer, references=references)
        assert int(to_signed_fixed_point([loss])[0]) == _calibrated_loss(answer, full, entry, texts)
        found.append(loss)
    assert max(found) > 0
    assert min(found) < 0 or entry.loss != "signed"
    about = {"failure": None, "manifest": generator.manifest.digest, "calibration": 0}
    assert _rows(tmp_path / "losses") == [
        {"id": str(number), "loss": loss, **about} for number, loss in enumerate(found)
    ]


def score(candidate: str, references: Sequence[str]) -> float:
    """Returns a score, as a user's metric does."""
    return float(candidate in references)


def test_a_manifest_runs_no_code(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's metric is imported only if the caller names it for the probe, and no other in its place."""
    own = "tests.calm_beam.serving.test_probe:score"
    _probe(tmp_path / "losses", build_entry(0.2, metric=own), metric=own)
    _probe(tmp_path / "losses", build_entry(0.2), metric="token_f1")
    monkeypatch.setattr("importlib.import_module", lambda name: pytest.fail(f"{name} was imported"))
    with pytest.raises(MetricError, match=f"^metric '{own}' is code that the manifest names, .* name it: LossProbe"):
        _probe(tmp_path / "losses", build_entry(0.2, metric=own))
    with pytest.raises(ManifestError, match=f'the entry is about metric "{own}", not "other:score"'):
        _probe(tmp_path / "losses", build_entry(0.2, metric=own), metric="other:score")


def test_a_metric_that_was_changed_watches_nothing(tmp_path: pathlib.Path) -> None:
    """A metric whose source has changed since calibration is refused."""
    own = "tests.calm_beam.serving.test_probe:score"
    manifest = build_served_manifest(_CHECKPOINT, (build_entry(0.2, metric=own),))
    changed = dataclasses.replace(manifest, software={**manifest.software, own: f"sha256:{'0' * 64}"})
    with pytest.raises(MetricError, match=f'"{own}": its module is now sha256:'):
        LossProbe(Generator.from_manifest(changed, _CHECKPOINT), tmp_path / "losses", share=1.0, salt="a", metric=own)


def test_the_sample_is_decided_by_id_and_salt(tmp_path: pathlib.Path) -> None:
    """About the given share of ids is sampled, the same ones every time, other ones with another salt."""
    _, probe = _probe(tmp_path / "losses", share=0.3)
    _, other = _probe(tmp_path / "losses", share=0.3, salt="b")
    _, wider = _probe(tmp_path / "losses", share=0.6)
    ids = [f"request-{number}" for number in range(2000)]
    sampled = {name for name in ids if probe.is_sampled(name)}
    assert sampled == {name for name in ids if probe.is_sampled(name)}
    # Six standard deviations of a binomial.
    assert abs(len(sampled) - 600) < 123
    assert sampled != {name for name in ids if other.is_sampled(name)}
    assert sampled <= {name for name in ids if wider.is_sampled(name)}
    _, everything = _probe(tmp_path / "losses", share=1.0)
    assert all(everything.is_sampled(name) for name in ids)


@pytest.mark.parametrize(
    ("references", "message"),
    [
        (["7 9"], "request a: a reference is text, but the manifest has no vocabulary, so that answers are token ids."),
        ("7 9", "request a: references must be a list of texts, got the text '7 9'."),
        ([[7, 0.5]], "request a: a reference must be a text or a list of token ids, got [7, 0.5]."),
        ([], "request a: risk consistency needs references to measure a loss, got none."),
    ],
)
def test_references_that_cannot_be_compared_are_refused(
    references: Sequence[Any], message: str, tmp_path: pathlib.Path
) -> None:
    """Texts are not compared with ids, nor a text's letters taken for references; nothing is written."""
    generator, probe = _probe(tmp_path / "losses", build_entry(0.2, consistency="risk", loss="relu"))
    with pytest.raises(ValueError, match=re.escape(message)):
        probe.observe("a", _PROMPTS[0], answer=generator.generate(_PROMPTS[0]), references=references)
    assert (tmp_path / "losses").read_bytes() == b""


def test_failures_have_loss_1(tmp_path: pathlib.Path) -> None:
    """A request without an output, or whose loss cannot be measured, has loss 1 as in calibration."""
    generator, probe = _probe(tmp_path / "losses")
    answer = generator.generate(_PROMPTS[0])
    assert probe.observe_failure("a", OutputError("broken\nmodel")) == 1
    assert probe.observe("b", [99], answer=answer) == 1
    first, second = _rows(tmp_path / "losses")
    assert (first["loss"], first["failure"]) == (1, "OutputError: broken\nmodel")
    assert (second["loss"], second["failure"][:27]) == (1, "PromptError: the prompt: to")


def test_monitor_reads_the_rows(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`calm-beam monitor` reads the probe's rows as losses; those of failures are missing."""
    generator, probe = _probe(tmp_path / "losses", build_entry(0.9, delta=0.5))
    write_manifest(generator.manifest, tmp_path / "manifest.json")
    losses = [
        probe.observe(str(number), prompt, answer=generator.generate(prompt)) for number, prompt in enumerate(_PROMPTS)
    ]
    flags = ["monitor", f"--manifest={tmp_path}", f"--losses={tmp_path / 'losses'}"]
    assert main(flags) == 0
    mean = to_signed_fixed_point(losses).sum() / LOSS_SCALE / len(losses)
    assert f"5 losses, mean {mean:.4f}" in capsys.readouterr().out
    for number in range(20):
        probe.observe_failure(f"x{number}", OutputError("broken"))
    assert main(flags) == 4
    assert "25 losses, 20 of them missing" in capsys.readouterr().out


def test_monitor_refuses_rows_of_another_promise(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Losses of another entry or manifest are refused."""
    generator, probe = _probe(tmp_path / "losses")
    probe.observe_failure("a", OutputError("broken"))
    manifest = dataclasses.replace(generator.manifest, created="2026-02-01T12:00:00Z")
    write_manifest(manifest, tmp_path / "manifest.json")
    assert main(["monitor", f"--manifest={tmp_path}", f"--losses={tmp_path / 'losses'}"]) == 1
    assert "losses, line 1: was measured for another manifest or entry." in capsys.readouterr().err


def test_what_cannot_be_watched_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never exit, clusters, missing references, shares out of range and bad paths are refused with clear messages."""
    with pytest.raises(ManifestError, match="the entry says never exit: there is no risk to watch"):
        _probe(tmp_path / "losses", build_entry(None))
    manifest = build_served_manifest(_CHECKPOINT)
    data = dataclasses.replace(manifest.data, clusters=200)
    clustered = Generator.from_manifest(dataclasses.replace(manifest, data=data), _CHECKPOINT)
    with pytest.raises(ManifestError, match="is about clusters of prompts, whose mean losses are watched"):
        LossProbe(clustered, tmp_path / "losses", share=1, salt="")
    for share in (0, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"share must be in \(0, 1\], got"):
            _probe(tmp_path / "losses", share=share)
    with pytest.raises(OSError, match=r"the folder .*absent does not exist"):
        _probe(tmp_path / "absent" / "losses")
    with pytest.raises(OSError, match="are added to a local file"):
        LossProbe(Generator.from_manifest(manifest, _CHECKPOINT), "gs://bucket/losses", share=1, salt="")
    with pytest.raises(MetricError, match="on example"):
        _probe(tmp_path / "losses", build_entry(0.2, metric="builtins:len"), metric="builtins:len")
    # The rouge-score package is missing.
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    rouge_l._scorer.cache_clear()
    with pytest.raises(MetricError, match='metric "rouge_l" on example "of the trial": raised ModuleNotFoundError'):
        _probe(tmp_path / "losses", build_entry(0.2, metric="rouge_l"))
    generator, probe = _probe(tmp_path / "losses", build_entry(0.2, consistency="risk", loss="relu"))
    with pytest.raises(ValueError, match="request a: risk consistency needs references to measure a loss, got none"):
        probe.observe("a", _PROMPTS[0], answer=generator.generate(_PROMPTS[0]))
    assert (tmp_path / "losses").read_bytes() == b""
