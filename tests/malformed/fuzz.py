"""Files with random damage, given to their readers.

Each kind of file has a reader: a function of the folder of the place. One file at a time is damaged, the reader called,
and the file restored. A reader may succeed, since not every damage shows, or raise one of our errors; anything else is
a defect. Run in batches, each in a process of its own, since a library in C++ may end the process.
"""

import dataclasses
import faulthandler
import io
import json
import pathlib
import random
import sys
import time
import traceback
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow.parquet

from calm_beam.calibration.loss_table import LossTable
from calm_beam.checkpoints import load_checkpoint
from calm_beam.errors import CalmBeamError
from calm_beam.inputs import Reading, parts_of, read_examples
from calm_beam.inputs.losses.runs import Run, RunScores, losses_of_runs, settled_direction
from calm_beam.inputs.losses.tables import RowReading, read_rows
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary
from calm_beam.manifest import read_manifest
from calm_beam.outputs import DecodeJob, FinishedSweep, read_generations, stored_shard
from tests.calm_beam.inputs.losses.builders import (
    ZSTANDARD,
    coin_rows,
    pack_in_zstandard,
    row_values,
    write_csv,
    write_helm,
    write_inspect,
    write_lighteval,
    write_lm_eval,
)
from tests.pipelines import text_rows, write_rows

SLOWEST = 10.0
"""Seconds that reading a damaged file may take."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of file: a glob in the place, and a reader that takes the folder of the place."""

    files: str
    read: Callable[[pathlib.Path], object]


def _checkpoint(name: str) -> Callable[[pathlib.Path], object]:
    def read(here: pathlib.Path) -> object:
        checkpoint = load_checkpoint(here / name)
        return checkpoint.parameters(), checkpoint.fingerprint(), checkpoint.vocabulary_uri

    return read


def _vocabulary(here: pathlib.Path) -> object:
    vocabulary = Vocabulary(here / "model" / "sentencepiece.model", extra_ids=3)
    return vocabulary.decode(vocabulary.encode("the cat sees <extra_id_0>")), vocabulary.fingerprint


def _examples(name: str) -> Callable[[pathlib.Path], object]:
    reading = Reading(needs_references=True)

    def read(here: pathlib.Path) -> object:
        path = str(here / name)
        return parts_of(path, file_index=0, reading=reading), list(read_examples(path, reading))

    return read


def _manifest(here: pathlib.Path) -> object:
    return read_manifest(here / "done" / "manifest.json")


def _generations(here: pathlib.Path) -> object:
    (folder,) = (here / "done" / "generations").iterdir()
    return [
        (stored_shard(str(path)), list(read_generations(path))) for path in sorted(folder.glob("generations-*.parquet"))
    ]


def _job(here: pathlib.Path) -> object:
    (folder,) = (here / "done" / "generations").iterdir()
    return FinishedSweep.read(str(folder), DecodeJob.read(str(folder)))


def _log(name: str, metric: str, *, cluster_key: str | None = None) -> Callable[[pathlib.Path], object]:
    """Returns a reader that compares a log with its twin, as `certify` does."""

    def read(here: pathlib.Path) -> object:
        runs = [Run.found(str(here / "logs" / folder / name), task=None) for folder in ("whole", "damaged")]
        whole, scores = (RunScores.read(run, metric=metric, cluster_key=cluster_key) for run in runs)
        said = {run.path: each for run in runs if (each := run.higher_is_better(metric)) is not None}
        direction = settled_direction(metric, said=said, asked=None)
        pairs = [(runs[1], scores)]
        return LossTable.of(losses_of_runs(whole, pairs, loss="signed", direction=direction)).units(
            order=[runs[1].name]
        )

    return read


def _losses(name: str) -> Callable[[pathlib.Path], object]:
    """Returns a reader of a table of losses, as in `certify`."""
    reading = RowReading(cluster_key="cluster")

    def read(here: pathlib.Path) -> object:
        sweep = LossTable.of(read_rows(str(here / "logs" / name), reading))
        return sweep.units(order=sweep.settings)

    return read


_HARNESS = _log("lm_eval", "exact_match,none", cluster_key="doc.passage")
_LIGHTEVAL = _log("lighteval", "acc", cluster_key="doc.specific.passage")
_HELM = _log("helm", "exact_match", cluster_key="extra_data.passage")

LOGS: Mapping[str, Kind] = {
    "log of lm-eval": Kind("logs/damaged/lm_eval/*/samples_*.jsonl", _HARNESS),
    "results of lm-eval": Kind("logs/damaged/lm_eval/*/results_*.json", _HARNESS),
    "log of lighteval": Kind("logs/damaged/lighteval/**/details_*.parquet", _LIGHTEVAL),
    "results of lighteval": Kind("logs/damaged/lighteval/**/results_*.json", _LIGHTEVAL),
    "log of Inspect": Kind("logs/damaged/log.eval", _log("log.eval", "match", cluster_key="metadata.passage")),
    "log of Inspect in zstandard": Kind("logs/damaged/packed.eval", _log("packed.eval", "match")),
    "log of Inspect in JSON": Kind("logs/damaged/log.json", _log("log.json", "match", cluster_key="metadata.passage")),
    "log of HELM": Kind("logs/damaged/helm/*/per_instance_stats.json", _HELM),
    "questions of HELM": Kind("logs/damaged/helm/*/scenario_state.json", _HELM),
    "schema of HELM": Kind("logs/damaged/helm/schema.json", _HELM),
    "losses in CSV": Kind("logs/losses.csv", _losses("losses.csv")),
    "losses in JSONL": Kind("logs/losses.jsonl", _losses("losses.jsonl")),
    "losses in Parquet": Kind("logs/losses.parquet", _losses("losses.parquet")),
}
"""Logs of frameworks of evaluation, the files next to them, and tables of losses."""

KINDS: Mapping[str, Kind] = {
    **LOGS,
    "native config": Kind("model/config.json", _checkpoint("model")),
    "native weights": Kind("model/model.safetensors", _checkpoint("model")),
    "Hugging Face config": Kind("hugging_face/config.json", _checkpoint("hugging_face")),
    "Hugging Face weights": Kind("hugging_face/model.safetensors", _checkpoint("hugging_face")),
    "T5X tree": Kind("t5x/checkpoint_1000/checkpoint", _checkpoint("t5x")),
    "T5X array": Kind("t5x/checkpoint_1000/target.decoder.layers_0.mlp.wo.kernel/*", _checkpoint("t5x")),
    "T5X metadata": Kind("t5x/checkpoint_1000/target.token_embedder.embedding/.zarray", _checkpoint("t5x")),
    "vocabulary": Kind("model/sentencepiece.model", _vocabulary),
    "JSONL": Kind("rows.jsonl", _examples("rows.jsonl")),
    "compressed JSONL": Kind("packed.jsonl.gz", _examples("packed.jsonl.gz")),
    "Parquet": Kind("rows.parquet", _examples("rows.parquet")),
    "manifest": Kind("done/manifest.json", _manifest),
    "generations": Kind("done/generations/*/generations-*.parquet", _generations),
    "job": Kind("done/generations/*/decode.json", _job),
    "completion": Kind("done/generations/*/complete.json", _job),
}


def add_files(here: pathlib.Path) -> None:
    """Adds to the place the files that only the fuzz run reads."""
    import gzip

    rows = [{"id": f"r{index}", **row} for index, row in enumerate(text_rows(12))]
    write_rows(here / "rows.jsonl", rows)
    (here / "packed.jsonl.gz").write_bytes(gzip.compress((here / "rows.jsonl").read_bytes()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), here / "rows.parquet")
    add_logs(here)


def add_logs(here: pathlib.Path) -> None:
    """Adds a log of every framework, each twice: one that stays whole, and one to be damaged."""
    scores = [1.0, 0.0, 1.0, 0.5, 1.0]
    for name in ("whole", "damaged"):
        folder = here / "logs" / name
        write_lm_eval(folder / "lm_eval", {"none": scores}, higher=True)
        write_lighteval(folder / "lighteval", scores, higher=True)
        write_helm(folder / "helm", scores, asked="", higher=True)
        for file in ("log.eval", "log.json"):
            write_inspect(folder / file, ["C", "I", "C", "P", "C"], header={"results": {"total_samples": 5}})
        pack_in_zstandard(folder / "log.eval", folder / "packed.eval")
    rows = coin_rows(8)
    write_csv(here / "logs" / "losses.csv", rows)
    write_rows(here / "logs" / "losses.jsonl", [row_values(row) for row in rows])
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([row_values(row) for row in rows]), here / "logs" / "losses.parquet"
    )


def damaged(content: bytes, generator: random.Random) -> bytes:
    """Returns the content with one random damage to its bytes or, in JSON, to one of its values.

    In JSON lines the damage is in one line; in a ZIP file it is in one member, or in the file itself.
    """
    if content.startswith(b"PK") and generator.random() < 0.5:
        return _with_a_member_changed(content, generator)
    if content.startswith(b"{") and content.count(b"\n{") and generator.random() < 0.8:
        lines = content.splitlines()
        place = generator.randrange(len(lines))
        return b"\n".join([*lines[:place], damaged(lines[place], generator), *lines[place + 1 :], b""])
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return _with_bytes_changed(content, generator)
    if generator.random() < 0.3:
        return _with_bytes_changed(content, generator)
    return json.dumps(_with_a_value_changed(value, generator)).encode()


def _with_a_member_changed(content: bytes, generator: random.Random) -> bytes:
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(changed, "w", zipfile.ZIP_DEFLATED) as target:
        members = [member for member in source.infolist() if member.compress_type != ZSTANDARD]
        place = generator.randrange(max(1, len(members)))
        for index, member in enumerate(members):
            part = source.read(member)
            target.writestr(member.filename, damaged(part, generator) if index == place else part)
    return changed.getvalue()


def _with_bytes_changed(content: bytes, generator: random.Random) -> bytes:
    changed = bytearray(content)
    # Headers matter more than the rest, and some formats have theirs at the end.
    near = min(len(changed), 400)
    place = generator.choice(
        [generator.randrange(near), len(changed) - 1 - generator.randrange(near), generator.randrange(len(changed))]
    )
    match generator.randrange(6):
        case 0:
            changed[place] ^= 1 << generator.randrange(8)
        case 1:
            changed[place] = generator.choice([0, 0x7F, 0x80, 0xFF])
        case 2:
            del changed[place:]
        case 3:
            del changed[place : place + generator.randrange(1, 40)]
        case 4:
            changed[place:place] = generator.randbytes(generator.randrange(1, 9))
        case _:
            other = generator.randrange(len(changed))
            changed[place : place + 8] = changed[other : other + 8]
    return bytes(changed)


_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 10**9, 10**30, -0.0, 0.5, 1e308, float("nan"), float("inf")),
    *(10**400, -1e-3, "C", "attachment://x", [1, [2]], {"type": "type"}),
    *("", "x", "\x00", "\ud800", "9" * 5000, "../../etc", [], {}, [[]], {"a": 1}, [None], ["x"]),
)


def _with_a_value_changed(value: Any, generator: random.Random) -> Any:
    """Returns plain values with one of them, at any depth, replaced, removed, or renamed."""
    inner = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not inner or generator.random() < 0.15:
        return generator.choice(_VALUES)
    key = generator.choice(inner)
    changed = dict(value) if isinstance(value, dict) else list(value)
    match generator.randrange(8):
        case 0:
            del changed[key]
        case 1 if isinstance(changed, dict):
            changed[generator.choice(["", "x", "__class__", f"{key}s"])] = changed.pop(key)
        case 2 if isinstance(changed, list):
            changed.append(changed[key])
        case _:
            changed[key] = _with_a_value_changed(value[key], generator)
    return changed


def read_damaged(kind_name: str, count: int, seed: int) -> None:
    """Reads files of the current folder with `count` damages; prints defects and counts as JSON."""
    faulthandler.enable()
    # Deterministic for one kind, whatever the others are.
    generator = random.Random(f"{kind_name}/{seed}")
    kind, here = KINDS[kind_name], pathlib.Path.cwd()
    files = sorted(path for path in here.glob(kind.files) if path.is_file())
    contents = {path: path.read_bytes() for path in files}
    kind.read(here)
    counts = {"accepted": 0, "refused": 0, "refused without a word": 0}
    for number in range(count):
        path = generator.choice(files)
        content = damaged(contents[path], generator)
        path.write_bytes(content)
        # Printed first, so that the log of a process that dies shows the damage.
        print(json.dumps({"number": number}), flush=True)
        start = time.monotonic()
        try:
            kind.read(here)
            counts["accepted"] += 1
        except CalmBeamError as error:
            counts["refused" if str(error).strip() else "refused without a word"] += 1
        except Exception as error:
            print(json.dumps({"defect": number, "file": path.name, "error": repr(error)[:500]}), flush=True)
            traceback.print_exc(file=sys.stderr)
        finally:
            path.write_bytes(contents[path])
        if (seconds := time.monotonic() - start) > SLOWEST:
            print(json.dumps({"defect": number, "file": path.name, "error": f"took {seconds:.0f} s"}), flush=True)
    print(json.dumps(counts), flush=True)
