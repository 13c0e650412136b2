"""What people see: lines, tables, progress, colours, and the streams they go to."""

from .lines import PlainConsole as PlainConsole
from .lines import said_as as said_as
from .lines import say as say
from .lines import tell as tell
from .lines import wrapped as wrapped
