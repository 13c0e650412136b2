"""The heads that certify decisions, in the form that was chosen."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .quantised_head import CertifiedHead, quantised_head


def heads_of_form(form: str, weights: Sequence[tuple[jax.Array, int]]) -> list[CertifiedHead | None]:
    """Returns the heads that certify decisions, one for each kernel of a model; None where exact heads decide.

    Args:
      form: As `head_forms.head_form` returns it.
      weights: Of each head, shape (width, vocabulary) or its transpose, with the axis of the vocabulary.
    """
    if form == "exact":
        return [None] * len(weights)
    return [quantised_head(jnp.moveaxis(each, axis, 0), form) for each, axis in weights]
