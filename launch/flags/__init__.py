"""Flags that several commands share, what they name, and the parser."""

from calm_beam.errors import UsageError as UsageError

from .parser import FlagParser as FlagParser
from .parser import HelpShown as HelpShown
from .parser import add_chat_flags as add_chat_flags
from .parser import add_data_flags as add_data_flags
from .parser import add_decode_flags as add_decode_flags
from .parser import add_device_flag as add_device_flag
from .parser import add_exit_flags as add_exit_flags
from .parser import add_exit_head_flag as add_exit_head_flag
from .parser import add_memory_flags as add_memory_flags
from .parser import add_task_flags as add_task_flags
from .parser import add_worker_flags as add_worker_flags
from .parser import arithmetic_of as arithmetic_of
from .parser import as_usage as as_usage
from .parser import confidence as confidence
from .parser import confidences as confidences
from .parser import measures_in_words as measures_in_words
from .parser import naming as naming
from .parser import numbers as numbers
from .parser import parse_flags as parse_flags
from .parser import parse_own_flags as parse_own_flags
from .parser import paths as paths
from .parser import pattern as pattern
from .parser import refuse_decoding_flags as refuse_decoding_flags
from .parser import share as share
from .parser import texts as texts
from .parser import utf8_text as utf8_text
from .parser import whole_number as whole_number
from .parser import whole_numbers as whole_numbers
