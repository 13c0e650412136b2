"""`calm-beam serve`: answers prompts over HTTP under a manifest, as OpenAI's interface does.

    calm-beam serve --manifest=calibration --consistency=textual --delta=0.05 --port=8000
    calm-beam serve --manifest=calibration --consistency=textual --delta=0.05 --losses=losses.jsonl --probe_share=1%

Prompts of all requests are decoded in one batch, which they join and leave at any step: POST /v1/completions, and
/v1/chat/completions where a chat template was calibrated, both with streaming. A wrong request gets a status of 4xx,
and its error says what is wrong; 503 means not ready, or busy: retry later. A request may have 16 prompts, or as many
as `--max_waiting` if that is less.

The port is open at once. Until the model is loaded and all is compiled, GET /readyz answers 503 and says how far that
is; what is compiled is kept for the next start. GET /healthz, /metrics (for Prometheus) and /manifest are there before.
`--full_model` runs all layers for every token: after an alarm, until another threshold is calibrated.
SIGTERM or Ctrl-C ends the service at any time; what was taken is answered first.

Needs pip install 'calm-beam[serve]'. Exit status: 0 ended as it was told, 1 failure, 2 bad usage.
"""

from collections.abc import Sequence

from calm_beam.launch.flags import FlagParser, parsed, request_parser

from .request import ServeRequest

_ESSENTIALS = (
    "--manifest",
    "--checkpoint",
    "--host",
    "--port",
    "--name",
    "--batch_size",
    "--max_waiting",
    "--lazy",
    "--full_model",
    "--losses",
    "--probe_share",
    "--delta",
    "--consistency",
    "--metric",
)


def flag_parsers() -> tuple[FlagParser, ...]:
    """Returns the parsers of all forms of the command."""
    return (request_parser("serve", ServeRequest, doc=__doc__, essentials=_ESSENTIALS),)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    (parser,) = flag_parsers()
    request = parsed(ServeRequest, argv, parser=parser)
    # Here, since they need the extra.
    from .request import prepare

    served = prepare(request)
    from .run import run

    return run(request, served)
