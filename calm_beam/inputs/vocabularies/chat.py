"""Prompts as a chat: what a template makes of an instruction and a user's text, rendered as transformers does.

Templates do not see today's date: with it, prompts would be others tomorrow than those that were calibrated.
"""

from calm_beam.errors import UsageError
from calm_beam.extras import imported

from .chat_process import render
from .model import VocabularyError
from .record import ChatRecord
from .tokenizer_files import read_text, read_tokenizer_files

OWN_TEMPLATE = "model"
"""Names the template that lies beside a tokenizer."""
NO_TEMPLATE = "none"
"""Says that prompts are taken as they are, although there is a template."""

_DATE = "strftime_now"


def chosen_chat(
    template: str | None, *, tokenizer: str, system: str | None, has_texts: bool = True
) -> ChatRecord | None:
    """Returns how prompts become chats; None if they are taken as they are.

    A model that was taught chats answers other prompts badly, and nothing in its outputs says so. So where there is a
    template, it has to be said whether it is used.

    Args:
      template: As in `chat_of`, or `NO_TEMPLATE`; None if nothing is said.
      tokenizer: The vocabulary.
      system: As in `chat_of`.
      has_texts: Whether any prompt is text; ids are never made chats of.

    Raises:
      UsageError: If there is a template and nothing is said, or a system prompt has no template.
      VocabularyError: As in `chat_of`.
      MissingExtraError: As in `chat_of`.
    """
    must_say = template is None and has_texts and tokenizer.endswith(".json")
    if must_say and read_tokenizer_files(tokenizer).chat_template is not None:
        raise UsageError(
            f"vocabulary {tokenizer}: has a chat template, so say whether prompts become chats: "
            f"--chat_template={OWN_TEMPLATE} takes that template, --chat_template=FILE another one, and "
            f"--chat_template={NO_TEMPLATE} takes prompts as they are (chat_template=... in Python)."
        )
    if template in (None, NO_TEMPLATE):
        if system is not None:
            raise UsageError("--system belongs to --chat_template, which is missing or none.")
        return None
    assert template is not None
    return chat_of(template, tokenizer=tokenizer, system=system)


def chat_of(template: str, *, tokenizer: str, system: str | None) -> ChatRecord:
    """Returns how prompts become chats.

    Args:
      template: `OWN_TEMPLATE`, or the path of a file with a Jinja template.
      tokenizer: The `tokenizer.json`, beside which special tokens are named.
      system: What the chat begins with, before the user's text; None if it begins with that.

    Raises:
      VocabularyError: If there is no template, or it cannot be rendered.
      MissingExtraError: If the package that renders it is not installed.
    """
    if not tokenizer.endswith(".json"):
        raise VocabularyError(
            f"chat templates belong to a tokenizer.json; vocabulary {tokenizer} is a SentencePiece model."
        )
    files = read_tokenizer_files(tokenizer)
    text = files.chat_template if template == OWN_TEMPLATE else read_text(template)
    if text is None:
        raise VocabularyError(
            f"vocabulary {tokenizer}: there is no chat template beside it, in tokenizer_config.json or "
            "chat_template.jinja. Name a file that holds one."
        )
    chat = ChatRecord(template=text, system=system, tokens=files.special_tokens)
    whole = rendered(chat, "probe")
    if "probe" not in whole or (system is not None and system.strip() not in whole):
        raise VocabularyError(f"the chat template leaves out the user's text or the system's: it made {whole[:200]!r}.")
    return chat


def rendered(chat: ChatRecord, text: str) -> str:
    """Returns the prompt that a chat's template makes of a user's text, up to where the answer begins.

    Raises:
      VocabularyError: If the template cannot be rendered, or not within limits of time, memory and length; says why.
      MissingExtraError: If the package that renders it is not installed.
    """
    imported("jinja2", extra="tokenizers", needed_for="a chat template")
    texts = [] if chat.system is None else [chat.system]
    messages = [{"role": "system", "content": system} for system in texts]
    variables = {
        "messages": [*messages, {"role": "user", "content": text}],
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
        **chat.tokens,
    }
    try:
        made = render(chat.template, variables, texts=sum(map(len, (*texts, text))))
    except VocabularyError as error:
        if _DATE in str(error):
            raise VocabularyError(
                f"the chat template calls {_DATE}, today's date: tomorrow's prompts would be others than those that "
                "were calibrated. Pass a template that has a date in it, or none."
            ) from error
        raise
    for name, is_there in (("NUL characters", _has_nul), ("lone surrogates, which are no text", _has_surrogate)):
        if is_there(made) and not any(map(is_there, (*texts, text))):
            raise VocabularyError(f"the chat template makes {name}: no tokenizer knows what they mean.")
    return made


def _has_nul(text: str) -> bool:
    return "\0" in text


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)
