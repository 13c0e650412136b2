"""Prompts as a chat: what a template makes of an instruction and a user's text, rendered as transformers does.

Templates do not see today's date: with it, prompts would be others tomorrow than those that were calibrated.
"""

from calm_beam.extras import imported
from calm_beam.manifest import ChatRecord

from .chat_process import render
from .model import VocabularyError
from .tokenizer_files import read_text, read_tokenizer_files

OWN_TEMPLATE = "model"
"""Names the template that lies beside a tokenizer."""

_DATE = "strftime_now"


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
