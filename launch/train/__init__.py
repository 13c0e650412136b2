"""`calm-beam train`: its flags, its inputs, and both stages."""

from .command import main as main
