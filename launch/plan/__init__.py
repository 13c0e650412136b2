"""`calm-beam plan`: how many examples a promise needs."""

from .command import main as main
