"""`calm-beam evaluate`: the experiments of the paper, one module each."""

from .command import main as main
