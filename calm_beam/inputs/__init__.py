"""Readers of data sets: JSONL, plain text, Parquet, TFRecord and SeqIO tasks, all giving the same checked examples.

`calm_beam.inputs.formats` defines the formats. It is loaded when data are first read, since the manifest reader imports
this package for its vocabulary records only. A format's packages are imported when one of its files is read.
"""

from typing import TYPE_CHECKING

from calm_beam.extras import on_first_use

if TYPE_CHECKING:
    from .files import DataFiles as DataFiles
    from .files import NoFilesError as NoFilesError
    from .formats import FORMATS as FORMATS
    from .formats import check_installed as check_installed
    from .formats import format_of as format_of
    from .formats import no_examples as no_examples
    from .formats import parts_of as parts_of
    from .formats import place_of as place_of
    from .formats import read_examples as read_examples
    from .reading import AS_USUAL as AS_USUAL
    from .reading import FilePart as FilePart
    from .reading import Reading as Reading
    from .reading import is_seqio as is_seqio
    from .reading import seqio_name as seqio_name
    from .tensorflow_formats import seqio_shards as seqio_shards

__getattr__ = on_first_use(
    __name__,
    {
        "files": ("DataFiles", "NoFilesError"),
        "formats": ("FORMATS", "check_installed", "format_of", "no_examples", "parts_of", "place_of", "read_examples"),
        "reading": ("AS_USUAL", "FilePart", "Reading", "is_seqio", "seqio_name"),
        "tensorflow_formats": ("seqio_shards",),
    },
)
