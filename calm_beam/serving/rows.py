"""Answers as rows of files."""

from typing import Any

from .answer import Answer


def answer_row(request_id: str, answer: Answer, *, has_groups: bool) -> dict[str, Any]:
    """Returns an answer as a row of a file, in plain values.

    Args:
      request_id: What the row is called.
      answer: The answer.
      has_groups: Whether the manifest tells groups apart; then the row says for which group, and at which threshold,
        the prompt was answered.
    """
    row: dict[str, Any] = {
        "id": request_id,
        "text": answer.text,
        "tokens": answer.tokens,
        "exit_layers": answer.exit_layers,
        "confidences": answer.confidences,
        "layers_used": answer.layers_used,
        "layers_saved": answer.layers_saved,
        "truncated": answer.truncated,
    }
    if has_groups and answer.entry is not None:
        row |= {"group": answer.group, "threshold": answer.entry.threshold}
    return row
