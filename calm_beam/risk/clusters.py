"""Losses of examples that belong together: averaged, since the cluster is what is drawn independently.

Questions on one paragraph, or turns of one conversation, resemble each other. Counted one by one they would feign more
independent draws than there were, and the bound would not hold.
"""

import numpy as np


def means_up(sums: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Returns means of losses, rounded up to a multiple of 2^-32.

    Args:
      sums: Any shape, int64 in units of 2^-32.
      sizes: Of how many losses, at least 1; of a shape that broadcasts to it.
    """
    # Integer division rounds down, so that of the negated sum rounds up.
    return np.asarray(-(-sums // sizes))
