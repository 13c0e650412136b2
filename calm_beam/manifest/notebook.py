"""HTML of values in notebooks, from the reports if they are installed."""

import pkgutil

# Imported by name: reports depend on manifests, and manifests need only the standard library.
_VIEWS = "calm_beam.report.notebook"


def html_of(value: object, view: str) -> str | None:
    """Returns a value as HTML; None, for its text, in calm-beam-serving, which has no reports.

    Args:
      value: A manifest or an answer.
      view: Name of the function of `calm_beam.report.notebook` that shows such values.
    """
    try:
        shown: str = pkgutil.resolve_name(f"{_VIEWS}:{view}")(value)
    except ModuleNotFoundError as error:
        if error.name != "calm_beam.report":
            raise
        return None
    return shown
