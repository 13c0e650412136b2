"""How long prompts may be where nobody says so."""

from .architecture import ModelConfig
from .registry import architecture_of

USUAL_INPUT_LENGTH = 512
"""Most tokens of a prompt, where the model has room for them."""


def default_input_length(config: ModelConfig, *, steps: int) -> int:
    """Returns the most tokens of a prompt where nobody says how many: 512, or what the model has room for.

    Args:
      config: Of the model.
      steps: Most tokens of an output, which need room, too.
    """
    room = architecture_of(config).room_for_prompts(config, steps=steps)
    return USUAL_INPUT_LENGTH if room is None else min(USUAL_INPUT_LENGTH, room)
