"""The main job as one function of Python."""

import dataclasses
import os
from collections.abc import Sequence

from apache_beam.options.pipeline_options import PipelineOptions

from calm_beam.calibration.guarantee import Guarantee
from calm_beam.errors import UsageError
from calm_beam.exits.rule import ExitRule
from calm_beam.launch.flags.call import calling
from calm_beam.manifest import Manifest

from .job import run_calibration
from .request import CalibrateRequest

# What guarantees and a rule say by themselves.
_OF_GUARANTEES = ("consistency", "metric", "delta", "epsilon", "tail", "risk_loss", "p_value", "procedure")
_OF_RULE = (
    *("confidence", "tau", "min_exit_layer", "exit_interval"),
    *("schedule", "state_propagation", "token_from", "patience"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateCall(CalibrateRequest):
    """A calibration as Python asks for it: every option of the command, and values that stand for several.

    Attributes:
      model: Folder of the model, as `checkpoint`.
      exits: `auto`, the default unless another argument says how tokens exit, or goes with one way of exiting alone; or
        how tokens exit, instead of `confidence`, `schedule` and what goes with them.
      candidates: Variants that are swept, instead of every combination of lists; what `exits="auto"` comes to.
      guarantees: What is asked for, one by one, instead of lists of `consistency`, `metric`, `delta` and `epsilon`.
      options: Of the pipelines, among them their runner; in this process if omitted.
    """

    model: str | os.PathLike[str] | None = None
    guarantees: Sequence[Guarantee] | None = None
    options: PipelineOptions | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.model is not None and self.checkpoint is not None:
            raise UsageError("model and checkpoint both name the model: leave one of them out.")
        for value, names in (("guarantees", _OF_GUARANTEES), ("exits", _OF_RULE)):
            given = None if getattr(self, value) in (None, self.AUTO) else next(filter(self.is_given, names), None)
            if given is not None:
                raise UsageError(f"{value} and {given} say the same: leave one of them out.")
        super().__post_init__()

    def has(self, partner: str) -> bool:
        """Returns whether an option is given, in whatever form."""
        return super().has(partner) or (partner == "checkpoint" and self.model is not None)

    @property
    def named_model(self) -> str | None:
        """Folder of the model, where one was named."""
        return super().named_model if self.model is None else os.fspath(self.model)

    @property
    def guarantees_asked(self) -> Sequence[Guarantee] | None:
        """Guarantees that were given one by one."""
        return self.guarantees

    @property
    def rules(self) -> tuple[ExitRule, ...]:
        """The rule that was given, or every combination of the lists."""
        return (self.exits,) if isinstance(self.exits, ExitRule) else super().rules


@calling(CalibrateCall)
def calibrate(request: CalibrateCall) -> Manifest:
    """Calibrates a model on a data set, writes the result and returns its manifest.

        manifest = calm.calibrate(
            checkpoint="checkpoints/my_t5",
            data="data/*.jsonl.gz",
            guarantees=[calm.Guarantee("textual", "rouge_l_unicode", delta=0.1, epsilon=0.05)],
            output="calibration",
        )

    It is what `calm-beam calibrate` runs, and takes all of its options, by the same names: `--delta=0.05,0.1` is
    `delta=(0.05, 0.1)`, `--resume` is `resume=True`. The command also builds the report, which `calm-beam report` makes
    of what is written. With neither model nor data, the demo model is calibrated on the demo data.

    Raises:
      UsageError: If anything that was asked for is wrong; nothing has been written.
      PipelineError: If the pipeline fails; `resume=True` goes on from what it has stored.

    Source: CALM, section "Calibrating the confidence threshold", Algorithm "Learn-then-Test".
    """
    done = run_calibration(request, request.options if request.options is not None else PipelineOptions([]))
    if isinstance(done, str):
        raise UsageError(f"the job is written down in {done} as a template, and has not run: there is no manifest yet.")
    return done.manifest
