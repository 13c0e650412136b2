"""What variants cost a token, as it was settled before any loss was seen: what the cheapest of them is chosen by.

No promise rests on these numbers. They are fixed when the plan is, so that whatever they are, wrong ones choose badly
and prove as much.
"""

import dataclasses
from typing import Self

from calm_beam.exits.measures import Need
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.token_cost import TokenCost
from calm_beam.manifest import CostRecord, Variant

_TESTS = {"logits_test": Need.LOGITS, "states_test": Need.STATES, "classifier_test": Need.CLASSIFIER}


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariantCosts:
    """What a token costs by variant and mean layer.

    Attributes:
      cost: What it is made of.
      rule: All of a variant's exit rule that it does not say itself.
    """

    cost: TokenCost
    rule: ExitRule

    @classmethod
    def of_record(cls, record: CostRecord, *, rule: ExitRule, layers: int) -> Self:
        """Returns what a manifest says.

        Args:
          record: Of the manifest.
          rule: That of any variant.
          layers: Decoder depth.
        """
        tests = {need: getattr(record, name) for name, need in _TESTS.items()}
        cost = TokenCost(
            layers=layers,
            layer=record.layer,
            skipped=record.skipped,
            output=record.output,
            tests={need: test for need, test in tests.items() if test is not None},
        )
        return cls(cost=cost, rule=rule)

    def full(self) -> float:
        """Returns what a token of the full model costs."""
        return self.cost.full()

    def at_mean(self, layers: float, variant: Variant) -> float:
        """Returns what tokens of a variant cost on average that use so many layers."""
        return self.cost.at_mean(layers, dataclasses.replace(self.rule, **variant.fields_of_rule()))


def tests_by_name(cost: TokenCost) -> dict[str, float]:
    """Returns the tests of a cost, by the names that a manifest has for them."""
    return {name: float(cost.tests[need]) for name, need in _TESTS.items() if need in cost.tests}
