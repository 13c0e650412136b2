"""Flags that several commands share, what they name, and the parser."""

from calm_beam.errors import UsageError as UsageError
from calm_beam.options.kinds import confidence as confidence
from calm_beam.options.kinds import confidences as confidences
from calm_beam.options.kinds import measures_in_words as measures_in_words
from calm_beam.options.kinds import numbers as numbers
from calm_beam.options.kinds import paths as paths
from calm_beam.options.kinds import pattern as pattern
from calm_beam.options.kinds import share as share
from calm_beam.options.kinds import texts as texts
from calm_beam.options.kinds import utf8_text as utf8_text
from calm_beam.options.kinds import whole_number as whole_number
from calm_beam.options.kinds import whole_numbers as whole_numbers

from .derived import add_options as add_options
from .derived import add_request as add_request
from .derived import given_flags as given_flags
from .derived import parsed as parsed
from .derived import parsed_with_beam as parsed_with_beam
from .derived import request_of as request_of
from .derived import request_parser as request_parser
from .derived import unheaded as unheaded
from .parser import FlagParser as FlagParser
from .parser import HelpShown as HelpShown
from .parser import as_usage as as_usage
from .parser import naming as naming
from .parser import parse_flags as parse_flags
from .parser import parse_own_flags as parse_own_flags
