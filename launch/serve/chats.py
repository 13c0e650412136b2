"""The messages of a chat, as far as they are what was calibrated: a system prompt, and one text of a user."""

from collections.abc import Sequence
from typing import Any

from calm_beam.inputs.messages import role_and_text
from calm_beam.manifest import Manifest

from .refusals import RefusedError

_SHAPE = (
    'messages must be [{"role": "user", "content": "..."}], after the calibrated system message or without one: what '
    "was calibrated are answers to one text of a user"
)


def user_text(messages: Sequence[Any], manifest: Manifest) -> str:
    """Returns the text of the user, which the calibrated chat template makes a prompt of.

    Args:
      messages: Of the request.
      manifest: What was calibrated.

    Raises:
      RefusedError: If the manifest has no chat template, or the messages are other than what was calibrated.
    """
    chat = None if manifest.vocabulary is None else manifest.vocabulary.chat
    if chat is None:
        raise RefusedError(
            400,
            "the model was calibrated without a chat template, on prompts as they are: POST /v1/completions, or "
            "calibrate with --chat_template",
            param="messages",
            code="not_calibrated",
        )
    try:
        texts = [role_and_text(message) for message in messages]
    except ValueError as error:
        raise RefusedError(400, str(error), param="messages") from error
    *before, (role, text) = texts or [("", "")]
    if role != "user" or len(before) > 1 or any(each not in ("system", "developer") for each, _ in before):
        raise RefusedError(400, _SHAPE, param="messages", code="not_calibrated")
    for _, system in before:
        if system != (chat.system or ""):
            calibrated = "without one" if chat.system is None else f"with {chat.system!r:.200}"
            raise RefusedError(
                400,
                f"the system message is not the one that was calibrated: chats were calibrated {calibrated}. Leave it "
                "out: the calibrated one stands before the text in any case",
                param="messages",
                code="not_calibrated",
            )
    return text
