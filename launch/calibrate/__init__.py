"""`calm-beam calibrate`: its flags, where generations come from, and the command."""

from .command import main as main
