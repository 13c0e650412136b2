"""What a user says about a model, for the layouts that do not say it themselves."""

import dataclasses

from calm_beam.model import ACTIVATIONS

from .error import CheckpointError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declared:
    """What no array of a model shows: without it, a model decodes into something else and nothing fails.

    Attributes:
      activation: One of `ACTIVATIONS`; None to go by the files, or by T5 where they are silent.
      relative_max_distance: Distance from which all positions share a bucket; None in the same way.
    """

    activation: str | None = None
    relative_max_distance: int | None = None

    def __post_init__(self) -> None:
        if self.activation is not None and self.activation not in ACTIVATIONS:
            raise CheckpointError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {self.activation!r}.")

    def check(self, *, activation: str | None, relative_max_distance: int | None, source: str) -> None:
        """Refuses what a file of the model contradicts.

        Args:
          activation: What the file says; None if it says nothing.
          relative_max_distance: The same.
          source: The file.

        Raises:
          CheckpointError: If the user said something else.
        """
        for name, said, stored in (
            ("activation", self.activation, activation),
            ("relative_max_distance", self.relative_max_distance, relative_max_distance),
        ):
            if said is not None and stored is not None and said != stored:
                raise CheckpointError(
                    f"{name} is {stored} by {source}, but {said} was passed: leave {name} out, or mend that file."
                )
