"""How much work a sweep did, counted in rows that went through the model."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Counts of a sweep; those of several are added.

    Attributes:
      prompts: Prompts decoded.
      steps: Steps that prompts were decoded in side by side, whatever their number; 0 where nobody counts them.
      tokens: Tokens of the full model's outputs.
      layer_rows: Rows that went through a decoder layer. One pass of the full model takes `tokens` times L.
      ahead_rows: Those of them that went through a layer above the one that their token left at, before that was known.
      projection_rows: Rows that were projected onto the vocabulary by the exact head. One pass of the full model takes
        `tokens`.
      certified_rows: Rows that a certified head was asked about; what it left open is in `projection_rows` too.
      ahead_decisions: How many of the rows that heads were asked about were such.
      fill_rows: Keys and values made of propagated states for a layer that was skipped.
      padded_rows: Rows of padding that went through layers beside `layer_rows`.
    """

    prompts: int = 0
    steps: int = 0
    tokens: int = 0
    layer_rows: int = 0
    ahead_rows: int = 0
    projection_rows: int = 0
    certified_rows: int = 0
    ahead_decisions: int = 0
    fill_rows: int = 0
    padded_rows: int = 0

    def __add__(self, other: "Work") -> "Work":
        # Written out: it is called at every layer of every step.
        return Work(
            prompts=self.prompts + other.prompts,
            steps=self.steps + other.steps,
            tokens=self.tokens + other.tokens,
            layer_rows=self.layer_rows + other.layer_rows,
            ahead_rows=self.ahead_rows + other.ahead_rows,
            projection_rows=self.projection_rows + other.projection_rows,
            certified_rows=self.certified_rows + other.certified_rows,
            ahead_decisions=self.ahead_decisions + other.ahead_decisions,
            fill_rows=self.fill_rows + other.fill_rows,
            padded_rows=self.padded_rows + other.padded_rows,
        )

    def __sub__(self, other: "Work") -> "Work":
        return Work(**{name: getattr(self, name) - getattr(other, name) for name in _NAMES})


_NAMES = tuple(field.name for field in dataclasses.fields(Work))
