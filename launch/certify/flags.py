"""The flags of `calm-beam certify`, which are the options of a request."""

from calm_beam.launch.flags import FlagParser, add_request

from .request import CertifyRequest

_ESSENTIALS = (
    "--losses",
    "--baseline",
    "--candidates",
    "--task",
    "--metric",
    "--direction",
    "--order",
    "--delta",
    "--epsilon",
    "--sequential",
    "--output",
    "--overwrite",
)


def certify_parser(doc: str | None = None) -> FlagParser:
    """Returns the parser of the command line; its help shows what the docstring says."""
    parser = FlagParser(prog="calm-beam certify", doc=doc, essentials=_ESSENTIALS)
    add_request(parser, CertifyRequest)
    return parser
