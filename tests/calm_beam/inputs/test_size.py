"""Estimates of the number of examples in files."""

import gzip
import json
import pathlib
import struct

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from calm_beam.inputs import DataFiles, Reading
from calm_beam.inputs.preview import estimated_examples


def _rows(count: int) -> bytes:
    """Returns rows with realistic lengths."""
    generator = np.random.default_rng(0)
    texts = ("".join(map(chr, generator.integers(97, 123, size=size))) for size in generator.integers(5, 400, count))
    return b"".join(json.dumps({"input": text}).encode() + b"\n" for text in texts)


def _estimate(path: pathlib.Path | str, *, reading: Reading | None = None) -> int | None:
    return estimated_examples(DataFiles.found(str(path), reading=reading or Reading()))


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".txt", ".txt.gz"])
def test_small_files_are_counted(tmp_path: pathlib.Path, suffix: str) -> None:
    """A file that is read whole has as many examples as lines, also without a last line break."""
    for content, count in ((_rows(50), 50), (_rows(50).rstrip(), 50), (b"", 0)):
        path = tmp_path / f"rows{suffix}"
        path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
        assert _estimate(path) == count


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_large_files_are_estimated(tmp_path: pathlib.Path, suffix: str) -> None:
    """Large files are estimated from the first megabyte, within a few per cent, deterministically."""
    path = tmp_path / f"rows{suffix}"
    content = _rows(30_000)
    path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    found = _estimate(path)
    assert found == pytest.approx(30_000, rel=0.05)
    assert _estimate(path) == found


def test_parquet_says_it(tmp_path: pathlib.Path) -> None:
    """Parquet's metadata have the number; an invalid file has none."""
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"input": ["a"] * 12_345}), path, row_group_size=1000)
    assert _estimate(path) == 12_345
    path.write_bytes(b"PAR1")
    assert _estimate(path) == 0


def test_records_are_counted_by_their_lengths(tmp_path: pathlib.Path) -> None:
    """TFRecord files are counted by record lengths, without TensorFlow."""
    from unittest import mock

    path = tmp_path / "rows.tfrecord"
    path.write_bytes(b"".join(struct.pack("<Q", size) + bytes(8 + size) for size in (5, 0, 300)))
    with mock.patch("calm_beam.inputs.tensorflow_formats.TFRecord.check_installed"):
        assert _estimate(path) == 3


def test_many_files_are_sampled(tmp_path: pathlib.Path) -> None:
    """Many files are estimated from a sample of them."""
    for number in range(100):
        (tmp_path / f"{number:03}.txt").write_text("a prompt\n" * 7)
    assert _estimate(tmp_path / "*.txt") == 700


def test_seqio_does_not_tell() -> None:
    """SeqIO tasks, and an empty list of files, have no estimate."""
    assert estimated_examples(DataFiles(patterns=("seqio:a:b",), files=())) is None
