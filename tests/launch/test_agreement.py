"""All commands that compare a model with a manifest agree."""

import dataclasses
import pathlib
from collections.abc import Callable

import pytest

from calm_beam.checkpoints import load_checkpoint
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary
from calm_beam.launch.cli import main
from calm_beam.manifest import Manifest, ManifestError, VocabularyRecord, write_manifest
from calm_beam.serving import Generator
from tests.builders import train_vocabulary
from tests.calm_beam.serving.builders import build_served_manifest
from tests.pipelines import text_rows, write_model, write_rows, write_vocabulary


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a model and its vocabulary, the same model with others or none, another model, and data."""
    folder = tmp_path_factory.mktemp("agreement")
    ours, theirs = write_vocabulary(folder / "ours.model"), train_vocabulary(folder / "theirs.model", size=45)
    write_model(folder / "model", vocabulary=ours)
    write_model(folder / "with_theirs", vocabulary=theirs)
    write_model(folder / "with_none")
    write_model(folder / "other", vocabulary=ours, seed=1)
    write_rows(folder / "rows.jsonl", text_rows(4))
    return folder


def _extra_ids(manifest: Manifest) -> Manifest:
    assert manifest.vocabulary is not None
    return _vocabulary(manifest, dataclasses.replace(manifest.vocabulary, extra_ids=3))


def _too_many_ids(manifest: Manifest) -> Manifest:
    assert manifest.vocabulary is not None
    return _vocabulary(manifest, dataclasses.replace(manifest.vocabulary, extra_ids=100))


def _vocabulary(manifest: Manifest, record: VocabularyRecord | None) -> Manifest:
    return dataclasses.replace(manifest, vocabulary=record)


def _no_vocabulary(manifest: Manifest) -> Manifest:
    return _vocabulary(manifest, None)


def _other_depth(manifest: Manifest) -> Manifest:
    return dataclasses.replace(manifest, model=dataclasses.replace(manifest.model, layers=5))


def _float16(manifest: Manifest) -> Manifest:
    return dataclasses.replace(manifest, decode=dataclasses.replace(manifest.decode, dtype="float16"))


def _oracle(manifest: Manifest) -> Manifest:
    return dataclasses.replace(manifest, decode=dataclasses.replace(manifest.decode, confidence="oracle"))


def _classifier(manifest: Manifest) -> Manifest:
    return dataclasses.replace(manifest, decode=dataclasses.replace(manifest.decode, confidence="classifier"))


def _as_it_is(manifest: Manifest) -> Manifest:
    return manifest


@pytest.mark.parametrize(
    ("model", "vocabulary", "change", "message"),
    [
        ("model", None, _as_it_is, None),
        ("model", "ours", _as_it_is, None),
        ("with_none", "ours", _as_it_is, None),
        ("with_theirs", "ours", _as_it_is, None),
        ("model", None, _extra_ids, None),
        ("other", None, _as_it_is, "Thresholds hold for no other model"),
        ("with_theirs", None, _as_it_is, "the same text would be other tokens"),
        ("model", "theirs", _as_it_is, "the same text would be other tokens"),
        ("with_none", None, _as_it_is, "there is no vocabulary in or next to"),
        ("model", "ours", _no_vocabulary, "the manifest is about token ids, without a vocabulary"),
        ("model", None, _too_many_ids, "they do not belong together"),
        ("model", None, _other_depth, "says that the model has 5 decoder layers, but it has 4"),
        ("model", None, _float16, "dtype must be one of float32, bfloat16; got 'float16'"),
        ("model", None, _oracle, "need every layer for every token"),
        ("model", None, _classifier, "needs decoder/meta_cls in the checkpoint"),
    ],
)
def test_nobody_disagrees(
    model: str,
    vocabulary: str | None,
    change: Callable[[Manifest], Manifest],
    message: str | None,
    folder: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A model and manifest that `inspect` matches, and no others, are taken by `Generator`, `generate` and `verify`."""
    ours = folder / "ours.model"
    manifest = change(build_served_manifest(load_checkpoint(folder / "model"), vocabulary=Vocabulary(ours)))
    write_manifest(manifest, tmp_path / "manifest.json")
    named = None if vocabulary is None else folder / f"{vocabulary}.model"
    flags = [f"--checkpoint={folder / model}", *([] if named is None else [f"--vocabulary={named}"])]
    commands = {
        "inspect": [str(tmp_path)],
        "generate": [f"--manifest={tmp_path}", "--prompt=the cat"],
        "verify": [f"--manifest={tmp_path}", f"--data={folder / 'rows.jsonl'}"],
    }
    if message is None:
        # The rest of verify takes time and is tested elsewhere.
        del commands["verify"]
        Generator.from_manifest(manifest, folder / model, vocabulary=named)
    else:
        with pytest.raises(ManifestError, match=message):
            Generator.from_manifest(manifest, folder / model, vocabulary=named)
        if change is _oracle:
            # Analysis of fresh data may run, as it was calibrated.
            del commands["verify"]
    for command, arguments in commands.items():
        status = main([command, *arguments, *flags])
        printed = capsys.readouterr()
        assert (status == 0) == (message is None), command
        assert ("It belongs to the model in" in printed.out) == (message is None and command == "inspect")
        if message is not None:
            assert message in printed.err or command == "verify"
            # The line about how many tokens the model takes may come first.
            assert f"\ncalm-beam {command}: " in f"\n{printed.err}"
            assert printed.out == ""
