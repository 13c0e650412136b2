"""Options: every option is declared once, for flags, arguments in Python, keys of files and workers."""

from .option import Option as Option
from .option import OptionError as OptionError
from .option import Options as Options
from .option import again as again
from .option import default_of as default_of
from .option import listed as listed
from .option import option as option
from .option import options_of as options_of
from .option import switch as switch
