"""What a worker decodes on."""


def require_accelerator() -> None:
    """Raises `RuntimeError` if JAX would compute on the CPU, which it does without a word where it finds no driver."""
    import jax

    if jax.default_backend() == "cpu":
        raise RuntimeError(
            "this worker was started with an accelerator, but JAX finds only its CPU. Use an image that has JAX for "
            "that accelerator (launch/Dockerfile), and let Dataflow install the driver of a GPU "
            "(install-nvidia-driver)."
        )
