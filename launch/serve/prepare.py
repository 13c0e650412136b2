"""What is found out before the port opens: the manifest, its entry, and what is not installed."""

from calm_beam.extras import imported
from calm_beam.launch.flags import UsageError, as_usage
from calm_beam.launch.flags.manifest import check_precision, entry_choice, find_manifest
from calm_beam.manifest import ManifestError, read_manifest
from calm_beam.storage import open_input

from .limits import Limits
from .request import ServeRequest
from .served import Served

# A letter of a prompt is a token at most, and words have some; what is longer is cut anyway, or refused.
_CHARACTERS_PER_TOKEN = 32
_LEAST_CHARACTERS = 4000
_PROMPTS_OF_A_REQUEST = 16


def prepare(request: ServeRequest) -> Served:
    """Returns what is promised, having refused what can be refused without the model.

    Raises:
      UsageError: If the manifest has no such entry, or another precision was asked for.
      MissingExtraError: If a package is missing by which it is served.
    """
    for module in ("fastapi", "uvicorn", "prometheus_client"):
        imported(module, extra="serve", needed_for="calm-beam serve")
    path = find_manifest(request.manifest)
    manifest = read_manifest(path)
    check_precision(request, manifest.decode)
    try:
        with as_usage():
            entry = manifest.calibration(entry_choice(request, manifest))
    except ManifestError as error:
        # The manifest is sound; what was asked for is not in it.
        raise UsageError(str(error)) from error
    with open_input(path) as file:
        content = file.read()
    characters = max(_LEAST_CHARACTERS, _CHARACTERS_PER_TOKEN * manifest.decode.max_input_length)
    limits = Limits(
        prompt_characters=characters,
        prompts=min(_PROMPTS_OF_A_REQUEST, request.max_waiting),
        waiting=request.max_waiting,
    )
    return Served(
        manifest=manifest,
        entry=entry,
        content=content,
        name=request.name,
        limits=limits,
        is_lazy=request.lazy,
    )
