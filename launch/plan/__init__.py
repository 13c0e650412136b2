"""`calm-beam plan`: how many examples a promise needs, and what a run of so many will cost."""

from .command import flag_parsers as flag_parsers
from .command import main as main
