"""The request of `calm-beam report`."""

import dataclasses
import os

from calm_beam.manifest import MANIFEST
from calm_beam.manifest.files import REPORT
from calm_beam.options import Options, again, option
from calm_beam.options.groups import FactsOfAny, ModelSource, Trusted
from calm_beam.options.kinds import whole_number
from calm_beam.storage import base_name, parent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reported(Options):
    """The calibration to report, and the output file."""

    calibration: str | os.PathLike[str] | None = option(
        None, "output directory of calibrate, or of certify", metavar="DIR"
    )
    output: str | os.PathLike[str] | None = option(
        None, f"where to; default: {REPORT} in that directory", metavar="FILE"
    )
    generations: str | None = option(
        None, "its generations, if it was made with --generations; default: its own", metavar="DIR"
    )
    checkpoint: str | os.PathLike[str] | None = again(
        ModelSource, "checkpoint", sentence="the model, if it is no longer where the manifest says"
    )
    vocabulary: str | None = again(
        ModelSource,
        "vocabulary",
        sentence="SentencePiece model; default: in or next to the checkpoint",
        belongs_to=(),
    )
    speedup: str | None = option(
        None, "output directory of calm-beam evaluate --speedup with the same model", metavar="DIR"
    )
    max_examples: int = option(
        500, "most examples to show; fewer where the page would grow beyond 5 MB", kind=whole_number(0)
    )
    seed: int = option(0, "of the draw of examples", kind=whole_number(0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportRequest(Reported, FactsOfAny, Trusted):
    """The report of a calibration, or of a certification."""

    @property
    def folder(self) -> str:
        """The directory of the calibration, which its manifest may name."""
        named = os.fspath(self.calibration or "")
        return parent(named) if base_name(named) == MANIFEST else named

    @property
    def named_model(self) -> str | None:
        """Folder of the model, where one was named."""
        return None if self.checkpoint is None else os.fspath(self.checkpoint)
