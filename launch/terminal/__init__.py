"""What people see: lines, tables, progress, colours, and the streams they go to."""

from .lines import PlainConsole as PlainConsole
from .lines import command_lines as command_lines
from .lines import give as give
from .lines import said_as as said_as
from .lines import say as say
from .lines import say_detail as say_detail
from .lines import say_loading as say_loading
from .lines import show_details as show_details
from .lines import tell as tell
from .lines import wrapped as wrapped
