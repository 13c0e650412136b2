"""Flags that several commands share, what they name, and the parser."""

from calm_beam.errors import UsageError as UsageError
from calm_beam.errors import as_usage as as_usage
from calm_beam.errors import naming as naming

from .parser import FlagParser as FlagParser
from .parser import HelpShown as HelpShown
from .parser import parse_flags as parse_flags
from .parser import parse_own_flags as parse_own_flags
from .requests import add_request as add_request
from .requests import given_flags as given_flags
from .requests import parsed as parsed
from .requests import parsed_with_beam as parsed_with_beam
from .requests import request_of as request_of
from .requests import request_parser as request_parser
