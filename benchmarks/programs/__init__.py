"""Every program that calm-beam has a device run: for checks by compilers, and for benchmarks."""

from .models import LARGE_MODELS as LARGE_MODELS
from .models import MODELS as MODELS
from .placement import Placement as Placement
from .program import Program as Program
from .programs import large_programs as large_programs
from .programs import programs as programs
