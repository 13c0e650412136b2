"""Rows that hold a chat: `messages`, as chat models and their data sets have them."""

from collections.abc import Sequence
from typing import Any

KEY = "messages"
"""What a row has them under."""

_EXPECTED = 'expected [{"role": "user", "content": "..."}], with or without the assistant\'s answer behind it'


def of_one_turn(messages: Any) -> tuple[str, str | None]:
    """Returns what a user says, and what an assistant answers, if that is there.

    Args:
      messages: One of a user, and one of an assistant or none; the content of each is a text, or parts of type text.

    Raises:
      ValueError: If they are others; says which.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ValueError(f"{KEY} is no list; {_EXPECTED}")
    said = [role_and_text(message) for message in messages]
    roles = [role for role, _ in said]
    if any(role in ("system", "developer") for role in roles):
        raise ValueError(
            f"{KEY} has a {roles[0]} message. What every chat begins with is said once, with --system, and not in rows"
        )
    if roles not in (["user"], ["user", "assistant"]):
        raise ValueError(
            f"{KEY} are of {', '.join(roles) or 'nobody'}; {_EXPECTED}: answers to one text of a user are calibrated"
        )
    return said[0][1], (said[1][1] if len(said) > 1 else None)


def role_and_text(message: Any) -> tuple[str, str]:
    """Returns who says what in a message: its content is a text, or parts that are texts.

    Raises:
      ValueError: If it is no such message.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"each of {KEY} must be an object with role and content")
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text") or "") for part in content)
    if not isinstance(content, str):
        raise ValueError("the content of a message must be a text, or parts of type text")
    return message["role"], content
