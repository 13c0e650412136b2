"""What a worker decodes on."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """What workers decode on.

    Attributes:
      hint: Resource hint of the step that decodes, and of no other; None for none.
      are_accelerators: Whether a worker on which JAX finds only a CPU refuses to decode.
    """

    hint: str | None = None
    are_accelerators: bool = False


ANY_DEVICES = Devices()
"""Whatever JAX finds."""


def require_accelerator() -> None:
    """Raises `RuntimeError` if JAX would compute on the CPU, which it does without a word where it finds no driver."""
    import jax

    if jax.default_backend() == "cpu":
        raise RuntimeError(
            "this worker was started with an accelerator, but JAX finds only its CPU. Use an image that has JAX for "
            "that accelerator (launch/Dockerfile), and let Dataflow install the driver of a GPU "
            "(install-nvidia-driver)."
        )
