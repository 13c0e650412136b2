"""Flags that mean something only beside another one, and would be ignored without it."""

import argparse
import dataclasses
from collections.abc import Iterable, Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Partners:
    """A flag and what it belongs to.

    Attributes:
      flag: The flag, such as `--max_failures`.
      partners: Flags one of which has to be there, each as `--data`, or as `--on_error=list` if only a value will do.
    """

    flag: str
    partners: tuple[str, ...]

    def is_alone(self, flags: argparse.Namespace, *, actions: Mapping[str, argparse.Action]) -> bool:
        """Returns whether the flag was given and none of its partners.

        Args:
          flags: What was parsed.
          actions: The parser's, by flag.
        """
        return self._holds(self.flag, flags, actions) and not any(
            self._holds(partner, flags, actions) for partner in self.partners
        )

    def in_words(self) -> str:
        """Returns what is wrong where the flag is alone."""
        return f"{self.flag} belongs to {self.partners[0]}, which is missing"

    @staticmethod
    def _holds(flag: str, flags: argparse.Namespace, actions: Mapping[str, argparse.Action]) -> bool:
        """Returns whether a flag has the value that is named after it; without one, whether it was given."""
        name, _, value = flag.partition("=")
        if name not in actions:
            return False
        found = getattr(flags, actions[name].dest, None)
        if value:
            return value in (found if isinstance(found, Iterable) and not isinstance(found, str) else (found,))
        return found is not None and found != actions[name].default
