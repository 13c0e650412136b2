"""The flags of `calm-beam generate`, which are the options of a request."""

from calm_beam.launch.flags import FlagParser, add_request

from .request import GenerateRequest

_ESSENTIALS = (
    "--manifest",
    "--checkpoint",
    "--prompt",
    "--input",
    "--output",
    "--overwrite",
    "--show_layers",
    "--delta",
    "--consistency",
    "--metric",
    "--resume",
)


def generate_parser(doc: str | None) -> FlagParser:
    """Returns the parser of the command line; its help shows what the docstring says."""
    parser = FlagParser(prog="calm-beam generate", doc=doc, essentials=_ESSENTIALS)
    add_request(parser, GenerateRequest)
    return parser
