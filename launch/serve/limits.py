"""What the service takes upon itself."""

import dataclasses

# Of a letter in JSON: two halves of a surrogate pair, escaped.
_MOST_BYTES_PER_CHARACTER = 12
_MOST_BYTES_BESIDES = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What the service takes upon itself.

    Attributes:
      prompt_characters: Longest prompt, or all prompts of a request together: characters, or token ids. What is longer
        is refused before it is tokenized.
      prompts: Most prompts of a request.
      waiting: Prompts that wait for their turn, beside those for which the batch has room; more are turned away.
      measuring: Sampled requests that wait to be decoded by the full model too, or are still being answered.
      arrival_seconds: How long a request may take to arrive, from the connection or its first byte to its last.
      ending_seconds: How long what was taken may take once the service is told to end; then connections are closed.
    """

    prompt_characters: int = 4000
    prompts: int = 16
    waiting: int = 64
    measuring: int = 32
    arrival_seconds: float = 10.0
    ending_seconds: int = 20

    def __post_init__(self) -> None:
        """Refuses limits under which some requests would never find room."""
        if not 1 <= self.prompts <= self.waiting:
            raise ValueError(f"prompts must be from 1 to waiting, {self.waiting}, got {self.prompts}.")

    @property
    def body_bytes(self) -> int:
        """Longest body of a request."""
        return _MOST_BYTES_PER_CHARACTER * self.prompt_characters + _MOST_BYTES_BESIDES
