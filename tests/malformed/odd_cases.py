"""More cases: odd places for files, odd flags, and paths that are no files."""

import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from .cases import Case, Here, calibrate, inspect, writing
from .place import CALIBRATE


def _append(content: bytes) -> Callable[[Here], None]:
    def spoil(here: Here) -> None:
        with open(here / "rows.jsonl", "ab") as file:
            file.write(content)

    return spoil


def _row(**fields: str) -> bytes:
    """Returns a row whose values are JSON as given."""
    values = {"id": '"x"', "input": '"the cat"', "references": '["a"]', **fields}
    return ("{" + ", ".join(f'"{key}": {value}' for key, value in values.items()) + "}\n").encode()


def _folder(name: str) -> Callable[[Here], None]:
    """Returns a function that puts a folder in place of a file."""

    def spoil(here: Here) -> None:
        for path in list(here.glob(name)) or [here / name]:
            path.unlink(missing_ok=True)
            path.mkdir(parents=True)

    return spoil


def _link(name: str, to: str) -> Callable[[Here], None]:
    def spoil(here: Here) -> None:
        (here / name).unlink(missing_ok=True)
        (here / name).symlink_to(to)

    return spoil


def _pipe(name: str) -> Callable[[Here], None]:
    def spoil(here: Here) -> None:
        (here / name).unlink(missing_ok=True)
        os.mkfifo(here / name)

    return spoil


def _every(pattern: str, content: bytes) -> Callable[[Here], None]:
    def spoil(here: Here) -> None:
        for path in here.glob(pattern):
            path.write_bytes(content)

    return spoil


def _in_latin_1(here: Here) -> None:
    (here / "rows.txt").write_bytes("the cat\ncafé\n".encode("latin-1"))


def _in_utf_16(here: Here) -> None:
    (here / "rows.jsonl").write_bytes((here / "rows.jsonl").read_text().encode("utf-16"))


def _with_marks(here: Here) -> None:
    """Writes lines with a byte order mark and CRLF, as on Windows."""
    content = (here / "rows.jsonl").read_bytes()
    (here / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n"))


def _file_for_a_folder(here: Here) -> None:
    (here / "out").mkdir()
    (here / "out" / "generations").write_text("x")


def _no_timings(here: Here) -> None:
    for path in here.glob("done/generations/*/timing-0*.json"):
        path.unlink()


def _half_of_all(pattern: str) -> Callable[[Here], None]:
    def spoil(here: Here) -> None:
        for path in here.glob(pattern):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return spoil


def _replaced_by_a_model(here: Here) -> None:
    shutil.rmtree(here / "done" / "generations")
    shutil.copytree(here / "model", here / "done" / "generations" / "model")


def _case(line: str, *names: str, **fields: Any) -> Case:
    return Case(argv=tuple(line.split()), names=names, **fields)


_MEMORY = "/proc/self/mem"
_GENERATE = "generate --manifest=done/manifest.json --checkpoint=model"
_VERIFY = "verify --manifest=done/manifest.json --checkpoint=model --data=rows.jsonl --metric=own_metrics:share"
_MONITOR = "monitor --manifest=done/manifest.json --state=state.json --losses=-"
_AGAIN = "calibrate --generations=done --metric=token_f1 --delta=0.2 --epsilon=0.1 --output=out"
_PLAN = "plan --pilot=done --examples=1000"
_TIMINGS = "done/generations/*/timing-0*.json"
_TRAIN = "train --data=rows.jsonl --output=new"
_BAD = "\udcff"

ODD_CASES: Mapping[str, Case] = {
    # Data that are no files, or no data.
    **{
        f"memory as {kind}": calibrate(f"--data={_MEMORY}", f"--data_format={kind}", names=(_MEMORY, "cannot be read"))
        for kind in ("jsonl", "text", "parquet")
    },
    "memory as gzip": calibrate("--data=m.jsonl.gz", names=("m.jsonl.gz",), spoil=_link("m.jsonl.gz", _MEMORY)),
    "memory as prompts": _case(f"{_GENERATE} --input={_MEMORY} --data_format=jsonl", "--input", _MEMORY),
    "memory as losses": _case(f"monitor --manifest=done/manifest.json --losses={_MEMORY}", _MEMORY),
    "memory as a pilot": _case(f"plan --pilot={_MEMORY} --delta=0.1", _MEMORY),
    "memory as a manifest": _case(f"inspect {_MEMORY}", _MEMORY, "cannot be read"),
    "memory to train on": _case(f"train --data={_MEMORY} --data_format=jsonl --output=new", _MEMORY),
    "a device without an end": calibrate("--data=/dev/zero", "--data_format=jsonl", names=("/dev/zero", "device")),
    "a device behind a link": calibrate(
        "--data=z.jsonl", names=("z.jsonl", "device"), spoil=_link("z.jsonl", "/dev/zero")
    ),
    "a link to nothing": calibrate("--data=n.jsonl", names=("n.jsonl", "link"), spoil=_link("n.jsonl", "absent")),
    "a folder as data": calibrate("--data=d.jsonl", names=("d.jsonl", "directory"), spoil=_folder("d.jsonl")),
    "no data at all": calibrate(names=("rows.jsonl", "no examples"), spoil=writing("rows.jsonl", b"")),
    "half a gzip file": calibrate(
        "--data=rows.jsonl.gz", names=("rows.jsonl.gz", "gzip"), spoil=writing("rows.jsonl.gz", b"\x1f\x8b\x08\0\0")
    ),
    "no Parquet at all": calibrate("--data=rows.parquet", names=("rows.parquet",), spoil=writing("rows.parquet", b"")),
    "a name of 100,000 letters": calibrate(f"--data={'r' * 100_000}", names=("--data",)),
    # Contents of data files.
    "Latin 1 in JSON": calibrate(
        names=("line 13", "UTF-8"), spoil=_append(_row(input='"caf\xe9"').decode().encode("latin-1"))
    ),
    "Latin 1 in plain text": calibrate(
        "--data=rows.txt", "--consistency=textual", names=("rows.txt, line 2", "UTF-8"), spoil=_in_latin_1
    ),
    "UTF-16": calibrate(names=("line 1", "UTF-8"), spoil=_in_utf_16),
    **{
        f"{value} where nobody looks": calibrate(names=("rows.jsonl, line 13", value), spoil=_append(_row(score=score)))
        for value, score in {
            "NaN": "NaN",
            "Infinity": "[Infinity]",
            "-Infinity": '{"a": -Infinity}',
            "1e400": "1e400",
        }.items()
    },
    "an integer of 5,000 digits": calibrate(names=("line 13",), spoil=_append(_row(score="1" + "0" * 5000))),
    "100,000 brackets where nobody looks": calibrate(names=("line 13",), spoil=_append(_row(score="[" * 100_000))),
    "a NUL byte": calibrate(names=("line 13",), spoil=_append(b"\0\n")),
    "a NUL character": calibrate(names=("line 13", "NUL"), spoil=_append(_row(input='"a\\u0000b"'))),
    "half a surrogate pair": calibrate(names=("line 13", "Unicode"), spoil=_append(_row(id='"\\ud800"'))),
    "a key twice where nobody looks": calibrate(
        names=("line 13", "twice"), spoil=_append(_row(score='{"a": 1, "a": 2}'))
    ),
    "a cluster that is a list": calibrate("--cluster_key=c", names=("line 1", "'c'"), spoil=_append(_row(c="[1]"))),
    "a token id of 400 digits": calibrate(
        "--checkpoint=ids_model",
        names=("line 1", "input_ids"),
        spoil=writing("rows.jsonl", f'{{"input_ids": [{10**400}]}}\n'),
    ),
    "a byte order mark and two-character ends": calibrate(
        names=(), spoil=_with_marks, statuses=(0,), lines=20, may_write=("out",)
    ),
    # Arguments that are not text.
    **{
        f"bytes in {flag}": Case(argv=(*CALIBRATE, f"{flag}={_BAD}"), names=(flag, "\\udcff", "UTF-8"))
        for flag in ("--task_prefix", "--data", "--output", "--system", "--cluster_key", "--metric", "--runner")
    },
    "bytes as a prompt": Case(argv=(*_GENERATE.split(), f"--prompt={_BAD}"), names=("--prompt", "UTF-8")),
    "bytes as a path": Case(argv=("inspect", _BAD), names=("\\udcff", "UTF-8")),
    "a NUL in a flag": calibrate("--task_prefix=a\0b", names=("--task_prefix=a\\x00b", "NUL")),
    # Flags that lack their partner, or make no sense.
    "a limit of failures that end the run": calibrate("--max_failures=3", names=("--max_failures", "--on_error")),
    "a limit of prompts that end the run": _case(
        f"{_GENERATE} --input=rows.jsonl --output=out/ --max_failures=3", "--max_failures", "--on_error=list"
    ),
    "replacing no file": _case(f"{_GENERATE} --prompt=a --overwrite", "--overwrite", "--output"),
    "a checkpoint of a metric that is not asked": calibrate(
        "--bleurt_checkpoint=none", names=("--bleurt_checkpoint", "--metric=bleurt")
    ),
    "a format of no data": _case("calibrate --output=out --data_format=text", "--data_format", "--data"),
    "a vocabulary of no model": _case("calibrate --output=out --vocabulary=model", "--vocabulary", "--checkpoint"),
    "more than all tokens": _case("suitability --agreeing=1.5", "--agreeing", "up to 1"),
    "thresholds that are equal": calibrate("--thresholds=0.5,0.5", names=("thresholds", "0.5")),
    "a share of NaN": calibrate("--holdout_share=nan", names=("--holdout_share", "nan")),
    "a seed of 400 digits": calibrate(f"--seed={'9' * 400}", names=("--seed",)),
    "a stray word": calibrate("stray", names=("stray",)),
    "states after minus one step": _case(f"{_TRAIN} --save_every=-1", "--save_every"),
    "a rate of NaN": _case(f"{_TRAIN} --muon_learning_rate=nan", "--muon_learning_rate"),
    # Existing files in the way of outputs.
    **{
        f"a folder for {name}": calibrate("--output=o", names=(f"o/{name}",), spoil=_folder(f"o/{name}"))
        for name in ("manifest.json", "risk_table.csv", "failures.jsonl", "report.html")
    },
    "a file for the generations": calibrate(names=("out/generations",), spoil=_file_for_a_folder),
    "a device for the output": calibrate("--output=/dev/null", names=("/dev/null",)),
    "an output below a loop": calibrate("--output=loop/x", names=("loop",), spoil=_link("loop", "loop")),
    "an output nobody may write": calibrate("--output=/proc/x", names=("/proc/x",)),
    "a full device for answers": _case(f"{_GENERATE} --prompt=a --output=/dev/full", "--output", "/dev/full"),
    **{
        f"a folder for {name} of answers": _case(
            f"{_GENERATE} --input=rows.jsonl --output=o/", f"o/{name}", spoil=_folder(f"o/{name}")
        )
        for name in ("complete.json", "generate.json", "failures.jsonl")
    },
    # Files that are not results.
    **{
        f"{kind} for the manifest, {line.split()[0]}": _case(line, "done", spoil=spoil)
        for line in ("inspect done", "report --calibration=done", f"{_GENERATE} --prompt=a", _VERIFY, _MONITOR)
        for kind, spoil in {
            "a folder": _folder("done/manifest.json"),
            "nothing": writing("done/manifest.json", b""),
            "bytes": writing("done/manifest.json", bytes(range(256))),
            "a pipe": _pipe("done/manifest.json"),
        }.items()
    },
    "a manifest of a number too large": inspect(
        "done/manifest.json", "1e400", spoil=writing("done/manifest.json", '{"schema": 1e400}')
    ),
    "a folder for the risk table": _case(
        "report --calibration=done", "risk_table.csv", spoil=_folder("done/risk_table.csv")
    ),
    "no risk table at all": _case(
        "report --calibration=done", "risk_table.csv", spoil=writing("done/risk_table.csv", b"")
    ),
    "bytes for the list of failures": _case(
        "report --calibration=done", "failures.jsonl, line 1", spoil=writing("done/failures.jsonl", bytes(range(256)))
    ),
    "damaged timings": _case(_PLAN, "timing-00000", "damaged", spoil=_every(_TIMINGS, b"\xff")),
    "half of the timings": _case(_PLAN, "timing-00000", "damaged", spoil=_half_of_all(_TIMINGS)),
    "a list for a timing": _case(_PLAN, "timing-00000", "damaged", spoil=_every(_TIMINGS, b"[]")),
    "a folder for a timing of the run": _case(
        _PLAN, "timing-run", "damaged", spoil=_every("done/generations/*/timing-run.json", b"[" * 100_000)
    ),
    "timings that were removed": _case(_PLAN, "holds no timings", spoil=_no_timings),
    **{
        f"{kind} for {name}": _case(_AGAIN, named, spoil=spoil(f"done/generations/*/{name}"), may_write=("out",))
        for name, named in {"decode.json": "decode.json", "complete.json": "complete.json"}.items()
        for kind, spoil in {
            "a folder": _folder,
            "bytes": lambda pattern: _every(pattern, b"\xff\x00"),
            "null": lambda pattern: _every(pattern, b"null"),
        }.items()
    },
    "an empty shard": _case(
        _AGAIN,
        "00001-of-00003.parquet",
        "damaged",
        spoil=_every("done/generations/*/*-00001-of-*.parquet", b""),
        may_write=("out",),
    ),
    "a model for generations": _case(_AGAIN, "done", spoil=_replaced_by_a_model, may_write=("out",)),
    "a state of bytes": _case(_MONITOR, "state.json", "UTF-8", spoil=writing("state.json", b"\xff\0"), stdin=b"0.1\n"),
    "a folder for the state": _case(_MONITOR, "state.json", spoil=_folder("state.json"), stdin=b"0.1\n"),
    "a prompt of 100 MB": Case(argv=tuple(_GENERATE.split()), names=("line 1",), stdin=b"a" * 100_000_000),
}
