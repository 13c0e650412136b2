"""The same examples written in every format; importing it needs no TensorFlow."""

import gzip
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow
import pyarrow.parquet

Row = Mapping[str, Any]


def write_parquet(path: pathlib.Path, rows: Sequence[Row], *, row_group_size: int = 1000) -> pathlib.Path:
    """Writes rows as Parquet and returns the path; missing keys become null."""
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, row_group_size=row_group_size)
    return path


def write_tfrecord(
    path: pathlib.Path, rows: Sequence[Row], *, inputs: str = "inputs", targets: str = "targets"
) -> pathlib.Path:
    """Writes rows as records of tf.Example, compressed if the name ends in `.gz`, and returns the path."""
    import tensorflow

    plain = path.with_name(f"{path.name}.plain")
    with tensorflow.io.TFRecordWriter(str(plain)) as writer:
        for row in rows:
            writer.write(tf_example(row, inputs=inputs, targets=targets))
    content = plain.read_bytes()
    plain.unlink()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def tf_example(row: Row, *, inputs: str = "inputs", targets: str = "targets") -> bytes:
    """Returns a row as a serialized tf.Example, with texts as bytes and ids, of one reference, as int64."""
    names = {"input": inputs, "input_ids": inputs, "references": targets, "reference_ids": targets}
    if "reference_ids" in row:
        (ids,) = row["reference_ids"]
        row = {**row, "reference_ids": ids}
    return feature_map({names.get(key, key): value for key, value in row.items()})


def feature_map(features: Mapping[str, Any]) -> bytes:
    """Returns features as a serialized tf.Example: bytes and texts, integers, floats, or lists of them."""
    from tensorflow import train

    def feature(value: Any) -> Any:
        values = value if isinstance(value, list) else [value]
        if all(isinstance(each, int) for each in values):
            return train.Feature(int64_list=train.Int64List(value=values))
        if all(isinstance(each, float) for each in values):
            return train.Feature(float_list=train.FloatList(value=values))
        encoded = [each.encode() if isinstance(each, str) else each for each in values]
        return train.Feature(bytes_list=train.BytesList(value=encoded))

    by_name = {name: feature(value) for name, value in features.items()}
    return train.Example(features=train.Features(feature=by_name)).SerializeToString()
