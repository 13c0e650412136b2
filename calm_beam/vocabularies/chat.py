"""Prompts as a chat: what a template makes of an instruction and a user's text, rendered as transformers does.

Templates come with models, so they are code of strangers: they run in Jinja's sandbox, which lets them change nothing
and see nothing but the chat. Today's date is nothing that they see, either: with it, prompts would be others tomorrow
than those that were calibrated.
Source: transformers `utils/chat_template_utils.py` (`render_jinja_template`).
"""

import functools
import json
from typing import Any

from calm_beam.extras import imported
from calm_beam.manifest import ChatRecord

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
      VocabularyError: If the template cannot be rendered; says why.
    """
    system = [] if chat.system is None else [{"role": "system", "content": chat.system}]
    jinja2 = _jinja2()
    try:
        made: str = _compiled(chat.template).render(
            messages=[*system, {"role": "user", "content": text}],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **dict(chat.tokens),
        )
    except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise VocabularyError(_in_words(error)) from error
    return made


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    _jinja2()
    # Submodules are loaded by their own names.
    sandbox = imported("jinja2.sandbox", extra="tokenizers", needed_for="a chat template")
    extensions = imported("jinja2.ext", extra="tokenizers", needed_for="a chat template")
    nodes = imported("jinja2.nodes", extra="tokenizers", needed_for="a chat template")

    base: Any = extensions.Extension

    class Generation(base):  # type: ignore[misc]
        """What marks an answer for training, and changes no prompt."""

        tags = frozenset(("generation",))

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, extensions.loopcontrols]
    )
    # What is drawn anew each time would make other prompts each time.
    del environment.filters["random"], environment.globals["lipsum"]
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment.from_string(template)


def _jinja2() -> Any:
    return imported("jinja2", extra="tokenizers", needed_for="a chat template")


def _to_json(value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, **more: Any) -> str:
    # Unlike Jinja's own, it leaves HTML's characters as they are; templates may name these by position.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **more)


def _raise(message: object) -> None:
    raise _jinja2().TemplateError(str(message))


def _in_words(error: Exception) -> str:
    if _DATE in str(error):
        return (
            f"the chat template calls {_DATE}, today's date: tomorrow's prompts would be others than those that were "
            "calibrated. Pass a template that has a date in it, or none."
        )
    return f"the chat template cannot be rendered: {type(error).__name__}: {str(error)[:300]}"
