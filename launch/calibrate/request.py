"""The request of a calibration: the options of `calm-beam calibrate` and `calm_beam.calibrate`, and their meaning.

Fields hold the given values. Properties fill in defaults, so that nothing rewrites a request.
"""

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import ClassVar

from calm_beam.calibration.guarantee import PROCEDURE, Guarantee, every_guarantee
from calm_beam.calibration.pareto import MOST_BY_THEMSELVES, variants_plan
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.errors import UsageError
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.thresholds import uniform_grid
from calm_beam.inputs import Reading
from calm_beam.inputs.demo import embedded
from calm_beam.inputs.set_parts import CALIBRATING, Split, salt_of
from calm_beam.launch.flags.shared_options import Job, MetricFiles
from calm_beam.launch.flags.task import TaskRequest, refuse_decoding
from calm_beam.manifest import (
    LATENCY,
    VARIANT_MEASURES,
    ManifestError,
    ParetoPlan,
    SequentialPlan,
    Variant,
)
from calm_beam.metrics.registry import DEFAULT_METRIC, METRICS, is_binary, is_bleurt
from calm_beam.options import listed
from calm_beam.options.groups import DELTA, GRID_STEP, ExitGrid, Failures, Replacing, Spread
from calm_beam.risk.pvalues import P_VALUES

from .options import BATCH, ROUND_EXAMPLES, GoingOn, Guarantees, Sequential, Tails, Tests, Variants

MEASURE = "softmax"
"""The confidence measure where nobody says, and the tool does not choose."""
_DECIDES_OUTPUTS = (TaskRequest, ExitGrid, Failures, Spread, Replacing, Job, Sequential)
# Options of those groups that also apply to stored generations; and other options that do not.
_ALSO_OF_STORED = ("thresholds", "grid_step", "on_error", "max_failures", "overwrite")
_OF_RUNS = (
    *("confidence", "tau", "min_exit_layer", "exit_interval", "exits", "objective"),
    *("sweep", "resume", "holdout_share"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateRequest(
    TaskRequest,
    ExitGrid,
    Failures,
    Spread,
    Replacing,
    Job,
    Guarantees,
    Tails,
    MetricFiles,
    Tests,
    Variants,
    Sequential,
    GoingOn,
):
    """A calibration as a user asks for it.

    Attributes:
      candidates: Variants to sweep, instead of every combination of lists; `--exits=auto` fills them in once the model
        is known.
    """

    ELSEWHERE: ClassVar[Mapping[str, str]] = {"settings": "It belongs to decoder, which is missing."}

    candidates: tuple[Variant, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_lists(self)
        _check_variants(self)
        _check_tests(self)
        if self.resume and self.overwrite:
            raise UsageError("--resume goes on with what is there, --overwrite begins again: leave one of them out.")

    def check_given(self, names: Collection[str]) -> None:
        """Refuses options about decoding if nothing is decoded.

        Args:
          names: Options that were given, with any value.
        """
        if self.generations is not None:
            refuse_decoding(
                names, *_DECIDES_OUTPUTS, also=_OF_RUNS, allowed=_ALSO_OF_STORED, generations=self.generations
            )

    @property
    def is_demo(self) -> bool:
        """Whether neither model nor data were named: the demo model and data are meant."""
        return self.generations is None and super().is_demo

    @property
    def guarantees_asked(self) -> Sequence[Guarantee] | None:
        """Guarantees that were given one by one; None if lists are combined."""
        return None

    @property
    def consistencies(self) -> tuple[str, ...]:
        """Requested kinds of consistency."""
        if self.guarantees_asked is not None:
            return tuple(dict.fromkeys(guarantee.consistency for guarantee in self.guarantees_asked))
        return listed(self.consistency) or (embedded.CONSISTENCIES if self.is_demo else ("textual",))

    @property
    def metrics(self) -> tuple[str, ...]:
        """Requested metrics, by the names that were given."""
        if self.guarantees_asked is not None:
            return tuple(dict.fromkeys(guarantee.metric for guarantee in self.guarantees_asked))
        return listed(self.metric) or (embedded.METRICS if self.is_demo else (DEFAULT_METRIC,))

    @property
    def deltas(self) -> tuple[float, ...]:
        """Requested risk tolerances, if lists are combined."""
        return listed(self.delta) or (embedded.DELTAS if self.is_demo else (DELTA,))

    @property
    def epsilons(self) -> tuple[float, ...]:
        """Allowed probabilities of error."""
        if self.guarantees_asked is not None:
            return tuple(dict.fromkeys(guarantee.epsilon for guarantee in self.guarantees_asked))
        return listed(self.epsilon)

    @property
    def needs_references(self) -> bool:
        """Whether every example must have references."""
        return "risk" in self.consistencies

    @property
    def p_values(self) -> tuple[str, ...]:
        """Tests of one threshold that were requested by name."""
        given = [self.p_value, *(guarantee.p_value for guarantee in self.guarantees_asked or ())]
        return tuple(dict.fromkeys(name for name in given if name is not None))

    @property
    def procedures(self) -> tuple[str, ...]:
        """Tests of the grid that were requested by name."""
        given = [self.procedure, *(guarantee.procedure for guarantee in self.guarantees_asked or ())]
        return tuple(dict.fromkeys(name for name in given if name is not None))

    @property
    def leaves_tests_open(self) -> bool:
        """Whether the request names no test of one threshold, and more than one is possible."""
        return not self.sequential and not self.p_values

    def asked_of(self, full_names: Mapping[str, str]) -> tuple[Guarantee, ...]:
        """Returns the guarantees that are named, or every combination of the lists.

        Args:
          full_names: Full name of every requested metric, by the name that was given.

        Raises:
          ValueError: If a value or a combination is not allowed.
        """
        # The only test that is valid for looking after every round, and the only one for variants.
        p_value = "signed_mixture" if self.sequential else None
        procedure = None if self.pareto is None else self.pareto.procedure
        if self.guarantees_asked is not None:
            return tuple(
                dataclasses.replace(
                    guarantee,
                    metric=full_names[guarantee.metric],
                    p_value=guarantee.p_value or p_value,
                    procedure=procedure or guarantee.procedure,
                )
                for guarantee in self.guarantees_asked
            )
        return every_guarantee(
            consistencies=self.consistencies,
            metrics=[full_names[name] for name in self.metrics],
            deltas=self.deltas,
            epsilons=self.epsilons,
            tails=listed(self.tail),
            risk_loss=self.risk_loss,
            p_value=self.p_value or p_value,
            procedure=procedure or self.procedure or PROCEDURE,
        )

    @property
    def rules(self) -> tuple[ExitRule, ...]:
        """The exit rules of all combinations of the lists.

        Raises:
          ValueError: If a rule is not allowed.
        """
        return tuple(
            self.rule(confidence=measure, tau=tau, min_exit_layer=layer, exit_interval=interval)
            for measure, tau, layer, interval in _combinations(self)
        )

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The differences between the combinations of the lists; empty if there is one combination."""
        if self.candidates:
            return self.candidates
        combinations = list(_combinations(self))
        if len(combinations) == 1:
            return ()
        # Variants do not name the settings that all of them share.
        has_measures, has_intervals = len(listed(self.confidence)) > 1, len(listed(self.exit_interval)) > 1
        return tuple(
            Variant(
                tau=tau,
                min_exit_layer=layer,
                confidence=measure if has_measures else None,
                exit_interval=interval if has_intervals else None,
            )
            for measure, tau, layer, interval in combinations
        )

    @property
    def pareto(self) -> ParetoPlan | None:
        """How several variants are tested; None if there is one."""
        if not self.variants:
            return None
        objective = self.objective_name if self.is_auto else None
        return variants_plan(self.variants, selection_share=self.selection_share, objective=objective)

    @property
    def is_auto(self) -> bool:
        """Whether the tool chooses the exit rules: it does unless another option does."""
        if self.exits is not None:
            return self.exits == self.AUTO
        return not self.candidates and self.says_exits is None and self.against_auto is None

    @property
    def says_exits(self) -> str | None:
        """The first option that says how tokens exit; None if none does."""
        return next((name for name in _SAY_EXITS if self.is_given(name)), None)

    @property
    def says_rule(self) -> bool:
        """Whether a measure is named, or layers that may exit."""
        return any(map(self.is_given, _OF_RULE))

    @property
    def against_auto(self) -> str | None:
        """A clause naming an option that allows only one exit rule, and why; None if there is none."""
        if self.generations is not None:
            return f"--generations={self.generations} is decoded already"
        return next((f"{flag} {why}" for flag, why in _go_with_one_way(self)), None)

    @property
    def objective_name(self) -> str:
        """The quantity that exits should save, without the batch size."""
        return (self.objective or LATENCY).partition(":")[0]

    @property
    def objective_batch(self) -> int:
        """Batch size at which the savings of exits are measured."""
        if self.objective_name == LATENCY:
            return 1
        return int((self.objective or "").partition(":")[2] or BATCH)

    @property
    def stop_plan(self) -> SequentialPlan | None:
        """When tests are evaluated, and what stops them; None if all examples are always counted.

        Raises:
          UsageError: If a rule is not allowed.
        """
        if self.examples_of_a_round is None:
            return None
        try:
            return SequentialPlan(
                round_examples=self.examples_of_a_round,
                stop_at_threshold=self.stop_at_threshold,
                stop_at_layers=self.stop_at_layers,
                stop_gain=self.stop_gain,
            )
        except ManifestError as error:
            raise UsageError(f"--{error}.") from error

    @property
    def examples_of_a_round(self) -> int | None:
        """Number of examples per round; None without rounds."""
        return (self.round_examples or ROUND_EXAMPLES) if self.sequential else None

    @property
    def order(self) -> str | None:
        """Salt of the order in which rounds take examples; None without rounds."""
        return salt_of(self.seed) if self.sequential else None

    @property
    def part(self) -> Split | None:
        """The part of the examples that chooses; None if all of them do."""
        if self.holdout_share is None:
            return None
        return Split(name=CALIBRATING, confirm_share=self.holdout_share, salt=salt_of(self.seed))

    @property
    def own_reading(self) -> Reading:
        """How the data are read."""
        return self.reading(
            cluster_key=self.cluster_key, group_key=self.group_key, needs_references=self.needs_references
        )

    def settings(self) -> DecodeSettings:
        """Returns the settings that determine the outputs; those of the first variant if there are several.

        Raises:
          ValueError: If a value or a combination is wrong.
        """
        # Small tolerances need thresholds close to 1 if many layers may exit.
        default = embedded.THRESHOLDS if self.is_demo or self.is_auto else uniform_grid(GRID_STEP)
        return DecodeSettings.of(self, self.rules[0].with_source(), thresholds=self.grid or default)


_LISTS = ("confidence", "tau", "min_exit_layer", "exit_interval")
# Names that a rule shares with grids: a grid belongs to one measure, too.
_OF_RULE = ("confidence", "min_exit_layer", "exit_interval")
_SAY_EXITS = (*_LISTS, "thresholds", "grid_step", "schedule", "state_propagation", "token_from", "patience")


def _combinations(request: CalibrateRequest) -> Iterator[tuple[str, float | None, int, int]]:
    """Yields every combination of the lists of variants, or every candidate."""
    if request.candidates:
        for each in request.candidates:
            assert each.confidence is not None, "candidates say all"
            assert each.exit_interval is not None, "candidates say all"
            yield each.confidence, each.tau, each.min_exit_layer, each.exit_interval
        return
    yield from itertools.product(
        listed(request.confidence) or (MEASURE,),
        listed(request.tau) or (None,),
        listed(request.min_exit_layer) or (1,),
        listed(request.exit_interval) or (1,),
    )


def _check_lists(request: CalibrateRequest) -> None:
    """Refuses lists with repeated values, and a share that no list needs."""
    for name in _LISTS:
        values = listed(getattr(request, name))
        if repeated := next((value for value in values if values.count(value) > 1), None):
            shown = repeated if isinstance(repeated, str) else f"{repeated:g}"
            raise UsageError(f"--{name} lists {shown} twice. Give every value once.")
    if request.is_auto:
        _check_auto(request)
        return
    if request.objective is not None:
        other = f"--{request.says_exits or 'exits'} says how tokens exit"
        raise UsageError(
            f"--objective={request.objective} says what --exits=auto is to save, and "
            f"{request.against_auto or other}: leave one of them out."
        )
    if request.selection_share is not None and len(list(_combinations(request))) == 1:
        raise UsageError(
            f"--selection_share belongs to lists of {' or '.join(f'--{name}' for name in _LISTS)}, and there is none."
        )


def _go_with_one_way(request: CalibrateRequest) -> Iterator[tuple[str, str]]:
    """Yields flags that allow only one exit rule, each with the reason."""
    if request.sequential:
        yield "--sequential", "goes through one grid in rounds"
    if request.sweep == "lazy":
        yield "--sweep=lazy", "goes down one grid as far as its test does"
    if request.group_key is not None:
        yield "--group_key", "gives groups entries of their own"
    asked = (guarantee.procedure for guarantee in request.guarantees_asked or ())
    procedure = request.procedure or next((name for name in asked if name != PROCEDURE), None)
    if procedure is not None:
        yield f"--procedure={procedure}", "tests the grid of one"


def _check_auto(request: CalibrateRequest) -> None:
    """Refuses options that decide exits, if the tool is to choose them."""
    given = next((name for name in _OF_RULE if request.is_given(name)), None)
    if given is not None or len(listed(request.tau)) > 1:
        raise UsageError(f"--exits=auto chooses how tokens exit, and --{given or 'tau'} does: leave one of them out.")
    if request.patience is not None:
        raise UsageError("--exits=auto tries no confidence that has a --patience: leave one of them out.")


def _check_variants(request: CalibrateRequest) -> None:
    """Refuses options that do not work with several variants."""
    count = len(list(_combinations(request)))
    if count == 1 and not request.is_auto:
        return
    lists = f"--confidence, --tau, --min_exit_layer and --exit_interval give {count} variants, "
    if request.is_auto:
        lists = "--exits=auto tries several variants, "
    for flag, why in _go_with_one_way(request):
        raise UsageError(f"{lists}and {flag} {why}. Give one value of each, or leave {flag.partition('=')[0]} out.")
    measures = listed(request.confidence)
    if len(measures) > 1 and (other := next((name for name in measures if name not in VARIANT_MEASURES), None)):
        raise UsageError(
            f"--confidence lists {other}, which has to be calibrated by itself. Lists take "
            f"{', '.join(VARIANT_MEASURES)}."
        )
    try:
        pareto = request.pareto
    except ManifestError as error:
        raise UsageError(f"--{error}.") from error
    table = next((name for name in request.p_values if P_VALUES[name].needs_table), None)
    if pareto is not None and pareto.choosing_share is not None and table is not None:
        raise UsageError(
            f"of {count} variants, among which a part of the examples chooses, losses are only summed, and "
            f"--p_value={table} needs every single one. Take another p-value, or at most {MOST_BY_THEMSELVES} "
            "variants without --selection_share."
        )


def _check_tests(request: CalibrateRequest) -> None:
    """Refuses tests that do not fit the losses, before anything is read."""
    if request.risk_loss is not None and not request.needs_references:
        raise UsageError("--risk_loss belongs to --consistency=risk, which is missing.")
    if request.group_key is not None and request.cluster_key is not None:
        raise UsageError(
            "--group_key and --cluster_key cannot be given together: a cluster may hold prompts of several groups. "
            "Leave one of them out."
        )
    fractional = [name for name in request.metrics if (name in METRICS and not is_binary(name)) or is_bleurt(name)]
    for name in request.p_values:
        if request.group_key is not None and P_VALUES[name].needs_table:
            raise UsageError(
                f"--p_value={name} needs every single loss, and those of groups are only summed. Take another one, or "
                "leave --group_key out."
            )
        if not P_VALUES[name].takes_fractions and fractional:
            # Other losses than 0 and 1 would be noticed, but only after everything was decoded.
            raise UsageError(
                f"--p_value={name} is for losses of 0 and 1 only, and those of {fractional[0]} lie in between. Take "
                "hoeffding_bentkus, or --metric=exact_match."
            )
    for name in request.procedures:
        if request.sweep == "lazy" and name != "fixed_sequence":
            raise UsageError(
                f"--sweep=lazy stops where fixed sequence testing fails; --procedure={name} looks at thresholds below. "
                "Leave one of them out."
            )
