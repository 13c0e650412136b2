"""Prompts as chats: a template renders an instruction and a user's text, as in transformers.

Templates do not see today's date: with it, tomorrow's prompts would differ from the calibrated ones.

A separate process renders them (`chat_renderer`), within limits of time, memory and length. Each rendering process has
one, started when needed and then kept: a start takes a tenth of a second, a prompt a tenth of a millisecond. It ends
with the process that started it.
"""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from calm_beam.errors import UsageError
from calm_beam.extras import imported
from calm_beam.inputs.examples import messages_of

from . import ChatRecord, VocabularyError
from .tokenizer_json import read_text, read_tokenizer_files

# Templates of published models take a millisecond of processor time and a few megabytes.
PROCESSOR_SECONDS = 1.0
MEMORY_BYTES = 512 << 20
# Generous, since other work may run on the machine.
_WALL_SECONDS = 120.0
# Limits on a prompt's length: a multiple of the chat's texts, plus the text that the template puts around them.
_MOST_AROUND = 1 << 20
_MOST_TIMES = 4
_MOST_ERROR = 64 << 10

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from calm_beam.inputs.vocabularies.chat_renderer import main; main()"
)


def render(template: str, variables: Mapping[str, Any], *, texts: int) -> str:
    """Returns the text that a template renders.

    Args:
      template: The template.
      variables: The template's variables, as JSON values.
      texts: Number of characters of the chat's texts.

    Raises:
      VocabularyError: If it cannot be rendered within the limits; says why.
    """
    return _RENDERER.render(template, variables, most=_MOST_AROUND + _MOST_TIMES * texts)


class _Renderer:
    """The rendering process, and a lock: one thread at a time uses it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def render(self, template: str, variables: Mapping[str, Any], *, most: int) -> str:
        request = {"template": template, "variables": variables, "most": most}
        with self._lock:
            process = self._running()
            answer = self._answer(process, f"{json.dumps(request)}\n".encode(), most=12 * most + _MOST_ERROR)
            if answer is None:
                raise VocabularyError(f"the chat template cannot be rendered: {self._ended()}.")
        if "error" in answer:
            raise VocabularyError(f"the chat template cannot be rendered: {answer['error']}")
        return answer["text"]

    def close(self) -> None:
        """Ends the process if this process started it."""
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _running(self) -> "subprocess.Popen[bytes]":
        # A forked process must not share its parent's renderer.
        if self._process is None or self._owner != os.getpid():
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps([path or os.getcwd() for path in sys.path])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            self._owner = os.getpid()
            limits = {"seconds": PROCESSOR_SECONDS, "memory_bytes": MEMORY_BYTES}
            self._send(self._process, f"{json.dumps(limits)}\n".encode())
        return self._process

    def _answer(self, process: "subprocess.Popen[bytes]", request: bytes, *, most: int) -> dict[str, str] | None:
        """Returns an answer; None if the process has ended, or does not answer in time."""
        if not self._send(process, request):
            return None
        assert process.stdout is not None
        reading, content, deadline = process.stdout.fileno(), bytearray(), time.monotonic() + _WALL_SECONDS
        while not content.endswith(b"\n"):
            ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(reading, 1 << 20) if ready else b""
            content += piece
            if not piece or len(content) > most:
                return None
        answer: dict[str, str] = json.loads(content)
        return answer

    def _send(self, process: "subprocess.Popen[bytes]", line: bytes) -> bool:
        assert process.stdin is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def _ended(self) -> str:
        """Ends the process, and returns the reason as text."""
        process, self._process = self._process, None
        assert process is not None
        try:
            process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"there was no answer after {_WALL_SECONDS:g} seconds"
        finally:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                try:
                    pipe.close()
                except BrokenPipeError:
                    # A request that it has not read.
                    continue
        if process.returncode == -signal.SIGPROF:
            return f"it takes more than {PROCESSOR_SECONDS:g} s of processor time"
        if process.returncode < 0:
            return f"the process that rendered it was ended by {signal.Signals(-process.returncode).name}"
        return f"the process that rendered it ended with status {process.returncode}"


_RENDERER = _Renderer()
atexit.register(_RENDERER.close)


OWN_TEMPLATE = "model"
"""Selects the template next to a tokenizer."""
NO_TEMPLATE = "none"
"""Takes prompts as they are, although there is a template."""

_DATE = "strftime_now"


def chosen_chat(
    template: str | None, *, tokenizer: str, system: str | None, has_texts: bool = True
) -> ChatRecord | None:
    """Returns how prompts become chats; None if they stay as they are.

    A chat model answers prompts without its template badly, and its outputs do not show that. So if there is a
    template, the user must say whether to use it.

    Args:
      template: `OWN_TEMPLATE`, the path of a file with a Jinja template, or `NO_TEMPLATE`; None if the user said none.
      tokenizer: The vocabulary.
      system: System text at the beginning of the chat; None for none.
      has_texts: Whether any prompt is text; token ids never become chats.

    Raises:
      UsageError: If there is a template and the user chose nothing, or if there is a system text but no template.
      VocabularyError: If the chosen template is missing, or cannot be rendered.
      MissingExtraError: If the package that renders it is not installed.
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
      tokenizer: The `tokenizer.json`; files next to it name its special tokens.
      system: System text at the beginning of the chat, before the user's text; None for none.

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
            f"vocabulary {tokenizer}: there is no chat template next to it, in tokenizer_config.json or "
            "chat_template.jinja. Name a file that holds one."
        )
    chat = ChatRecord(template=text, system=system, tokens=files.special_tokens)
    whole = rendered(chat, "probe")
    if "probe" not in whole or (system is not None and system.strip() not in whole):
        raise VocabularyError(f"the chat template leaves out the user's text or the system's: it made {whole[:200]!r}.")
    return chat


def check_turns(chat: ChatRecord) -> None:
    """Refuses a template that leaves out earlier turns of a chat, so that answers would be to other questions.

    Raises:
      VocabularyError: If it does, or cannot be rendered.
    """
    earlier = ("first probe", "second probe")
    whole = rendered(chat, "third probe", earlier=earlier)
    if missing := [text for text in earlier if text not in whole]:
        whose = "the assistant's" if missing == ["second probe"] else "earlier"
        raise VocabularyError(
            f"the chat template leaves out {whose} turns, and the data have chats of several: it made {whole[:200]!r}. "
            "Pass a template that has all of them."
        )


def rendered(chat: ChatRecord, text: str, *, earlier: Sequence[str] = ()) -> str:
    """Returns the prompt that a chat's template renders from a user's text, up to the start of the answer.

    Args:
      chat: The template, and the system text.
      text: The text.
      earlier: Texts of the turns before it, by user and assistant in turn.

    Raises:
      VocabularyError: If the template cannot be rendered within the limits of time, memory and length; says why.
      MissingExtraError: If the package that renders it is not installed.
    """
    imported("jinja2", extra="tokenizers", needed_for="a chat template")
    system = [] if chat.system is None else [chat.system]
    texts = [*system, *earlier, text]
    messages = [{"role": "system", "content": each} for each in system]
    variables = {
        "messages": [*messages, *messages_of(text, earlier)],
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
        **chat.tokens,
    }
    try:
        made = render(chat.template, variables, texts=sum(map(len, texts)))
    except VocabularyError as error:
        if _DATE in str(error):
            raise VocabularyError(
                f"the chat template calls {_DATE}, today's date: tomorrow's prompts would be others than those that "
                "were calibrated. Pass a template that has a date in it, or none."
            ) from error
        raise
    for name, is_there in (("NUL characters", _has_nul), ("lone surrogates, which are no text", _has_surrogate)):
        if is_there(made) and not any(map(is_there, texts)):
            raise VocabularyError(f"the chat template makes {name}: no tokenizer knows what they mean.")
    return made


def _has_nul(text: str) -> bool:
    return "\0" in text


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)
