"""Identification of data files by content."""

import pathlib

from calm_beam.inputs.files import digest_of_files
from calm_beam.storage import replacing


def test_data_files_are_known_by_content(tmp_path: pathlib.Path) -> None:
    """Names, folders and order of data files do not matter, but every byte does; SeqIO data are identified by name."""
    for name, text in (("a", "1"), ("b", "2"), ("c", "1"), ("d", "3")):
        (tmp_path / name).write_text(text)
    a, b, c, d = (str(tmp_path / name) for name in "abcd")
    assert digest_of_files([a, b]) == digest_of_files([b, c])
    assert digest_of_files([a, b]) != digest_of_files([a, d])
    assert digest_of_files([a, b]) != digest_of_files([a])
    assert digest_of_files(["seqio:wmt/test/00000-of-00001"]) != digest_of_files(["seqio:wmt/dev/00000-of-00001"])


def test_data_on_cloud_storage_are_known_by_content(bucket: str) -> None:
    """Objects are identified by size and checksum, which the service keeps, not by name."""
    for name, text in (("a", "1"), ("b", "1"), ("c", "2")):
        with replacing(f"{bucket}/{name}") as temporary:
            temporary.write_text(text)
    a, b, c = (digest_of_files([f"{bucket}/{name}"]) for name in "abc")
    assert a == b != c
