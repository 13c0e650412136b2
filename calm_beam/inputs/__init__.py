"""Reading data sets: JSONL, plain text, Parquet, TFRecord and SeqIO tasks, all to the same checked examples.

What a format is, and which there are: `calm_beam.inputs.formats`. Packages that a format needs are imported when one of
its files is read.
"""

from calm_beam.inputs.seqio_names import is_seqio as is_seqio
from calm_beam.inputs.seqio_names import seqio_name as seqio_name

from .files import DataFiles as DataFiles
from .files import NoFilesError as NoFilesError
from .formats import FORMATS as FORMATS
from .formats import check_installed as check_installed
from .formats import format_of as format_of
from .formats import no_examples as no_examples
from .formats import parts_of as parts_of
from .formats import place_of as place_of
from .formats import read_examples as read_examples
from .parts import FilePart as FilePart
from .reading import AS_USUAL as AS_USUAL
from .reading import Reading as Reading
from .seqio_tasks import seqio_shards as seqio_shards
