"""What notebooks show of a value: asked of the reports where they are installed."""


def html_of(value: object, view: str) -> str | None:
    """Returns a value as HTML; None, for its text, in calm-beam-serving, which has no reports.

    Args:
      value: A manifest or an answer.
      view: Name of the function of `calm_beam.report.notebook` that shows such values.
    """
    # Here, since manifests are read without anything but the standard library, and services do without reports.
    try:
        from calm_beam.report import notebook
    except ModuleNotFoundError as error:
        if error.name != "calm_beam.report":
            raise
        return None
    shown: str = getattr(notebook, view)(value)
    return shown
