"""A web service that answers prompts under a manifest.

    python -m web_service --manifest=calibration/manifest.json --checkpoint=model --port=8000

Prompts of all requests are decoded in one batch, which they join and leave at any step. POST /generate takes
{"prompt": "..."} and gives text, tokens and the layer at which each token left; with "stream": true, each token as it
is made. POST /v1/completions is for clients of OpenAI's interface. What the client got wrong is a status of 4xx and
says what; 503 means: busy, come again. GET /health says what is served. A request that is not there as a whole after
some seconds is answered with 408, and its connection is closed.
"""

import argparse

import uvicorn

from calm_beam.decoding.compilation import use_compilation_cache
from calm_beam.serving import Generator, LossProbe

from .app import build_app
from .limits import Limits
from .timed_protocol import protocol_with


def main() -> None:
    """Serves until it is told to stop."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--manifest", required=True, help="the manifest's file")
    parser.add_argument("--checkpoint", required=True, help="folder of the model that was calibrated")
    parser.add_argument(
        "--consistency", help="of the entry to serve, where the manifest has several; so the next three"
    )
    parser.add_argument("--metric")
    parser.add_argument("--delta", type=float)
    parser.add_argument("--epsilon", type=float)
    parser.add_argument("--losses", help="file for the losses of a sample of the requests")
    parser.add_argument("--share", type=float, default=0.01, help="of the requests that are measured")
    parser.add_argument("--batch_size", type=int, help="most prompts decoded side by side; default: by memory")
    parser.add_argument("--name", default="calm-beam", help="of the model, for clients of /v1/completions")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    flags = parser.parse_args()
    use_compilation_cache()
    generator = Generator.from_manifest(
        flags.manifest,
        flags.checkpoint,
        consistency=flags.consistency,
        metric=flags.metric,
        delta=flags.delta,
        epsilon=flags.epsilon,
        batch_size=flags.batch_size,
    )
    probe = (
        LossProbe(generator, flags.losses, share=flags.share, salt="web-service", metric=flags.metric)
        if flags.losses
        else None
    )
    limits = Limits()
    app = build_app(generator, probe=probe, limits=limits, model=flags.name)
    uvicorn.run(app, host=flags.host, port=flags.port, http=protocol_with(limits), ws="none")


if __name__ == "__main__":
    main()
