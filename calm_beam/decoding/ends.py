"""Where outputs end."""

import functools
import operator
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np

_Tokens = TypeVar("_Tokens", np.ndarray, jax.Array)


def is_end(tokens: _Tokens, end_ids: Sequence[int]) -> Any:
    """Returns which tokens end an output, bool, shape of `tokens`.

    Args:
      tokens: Ids, any shape.
      end_ids: Those that end one; at least one.
    """
    return functools.reduce(operator.or_, (tokens == end for end in end_ids))
