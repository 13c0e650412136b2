"""Chat templates are rendered within limits of time, memory and length, in a process of their own."""

import concurrent.futures
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from calm_beam.inputs.vocabularies import chat_templates
from calm_beam.inputs.vocabularies.chat_templates import rendered
from calm_beam.inputs.vocabularies.vocabulary import VocabularyError
from calm_beam.manifest import ChatRecord

_ECHO = "{{ messages[-1].content }}"
_TOO_LONG = "makes more than 1048592 characters"
_TOO_SLOW = "takes more than 1 s of processor time"
_TOO_LARGE = "needs too much memory"
_LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
_ENDS = "{% endfor %}{% endfor %}{% endfor %}"

_BOUNDED = {
    "loops within loops": (f"{_LOOPS}{_ENDS}", _TOO_SLOW),
    "loops that write": (f"{_LOOPS}a{_ENDS}", _TOO_LONG),
    # Which bound these reach first depends on how fast the machine provides memory.
    "a doubling string": (
        "{% set ns = namespace(x='ab') %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
        f"{_TOO_SLOW}|{_TOO_LARGE}",
    ),
    "a doubling list": (
        "{% set ns = namespace(x=[1]) %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        f"{_TOO_SLOW}|{_TOO_LARGE}",
    ),
    "repetition": ("{{ 'a' * 1000000000 }}", _TOO_LARGE),
    "repetition of a little less": ("{{ messages[0].content * 20000000 }}", _TOO_LONG),
    "center": ("{{ 'a' | center(1000000000) }}", _TOO_LARGE),
    "indent": ("{{ 'a\nb' | indent(1000000000) }}", _TOO_LARGE),
    "a method": ("{{ 'a'.ljust(1000000000) }}", _TOO_LARGE),
    "another method": ("{{ 'a'.zfill(1000000000) }}", _TOO_LARGE),
    "replacement": ("{{ ('a' * 100000).replace('a', 'b' * 100000) }}", _TOO_LARGE),
    "format": ("{{ '%1000000000d' % 1 }}", _TOO_LARGE),
    "format, the newer": ("{{ '{:1000000000}'.format(1) }}", _TOO_LARGE),
    "JSON": ("{{ [[[1]]] | tojson(indent=1000000000) }}", _TOO_LARGE),
    "joined": ("{{ (['a'] * 30000) | join('b' * 100000) }}", _TOO_LARGE),
    "a power": ("{{ 9 ** (9 ** 9) }}", f"{_TOO_SLOW}|{_TOO_LARGE}"),
    "a range": ("{{ range(1000000000) | list | length }}", "OverflowError: Range too big"),
    "macros that call themselves": ("{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}", "nested too deeply"),
    "a loop that calls itself": (
        "{% for x in [[]] recursive %}{{ loop([x]) }}{{ loop([x]) }}{% endfor %}", "nested too deeply"
    ),
    "a slow filter": ("{{ range(99999) | map('string') | sort | batch(2) | list | length }}" * 500, _TOO_SLOW),
    "many pieces": ("{{ messages }}" * 100000, "makes more than|takes more than"),
    "parentheses": ("{{ " + "(" * 50000 + "1" + ")" * 50000 + " }}", "nested too deeply|ended by SIG"),
    "nested ifs": ("{% if 1 %}" * 5000 + "{% endif %}" * 5000, "nested too deeply|ended by SIG"),
    "nested lists": ("{{ " + "[" * 5000 + "]" * 5000 + " }}", "nested too deeply|ended by SIG"),
}  # fmt: skip


@pytest.mark.parametrize(("template", "message"), _BOUNDED.values(), ids=_BOUNDED)
def test_what_has_no_bound_is_refused_in_words(template: str, message: str) -> None:
    """An unbounded template ends within seconds with a clear message, and the next one is rendered."""
    start = time.monotonic()
    with pytest.raises(VocabularyError, match=rf"^the chat template cannot be rendered: .*({message})"):
        rendered(ChatRecord(template=template, tokens={}), "text")
    assert time.monotonic() - start < 60
    assert rendered(ChatRecord(template=_ECHO, tokens={}), "text") == "text"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (_ECHO + "{{ '\\0' }}", "makes NUL characters"),
        (_ECHO + "\0", "makes NUL characters"),
        (_ECHO + "{{ '%c' % 0 }}", "makes NUL characters"),
        (_ECHO + "{{ '\\ud800' }}", "makes lone surrogates"),
    ],
)
def test_what_is_no_text_is_refused(template: str, message: str) -> None:
    """NUL characters and lone surrogates in a rendered text are an error of the template."""
    with pytest.raises(VocabularyError, match=message):
        rendered(ChatRecord(template=template, tokens={}), "text")
    assert rendered(ChatRecord(template=_ECHO, tokens={}), "a\0b") == "a\0b"


def test_long_texts_are_rendered() -> None:
    """The length limit of a template grows with the texts of the chat."""
    text = "a long text \u2028 🙂\n" * 200_000
    assert rendered(ChatRecord(template="<s>{{ messages[-1].content }}</s>", tokens={}), text) == f"<s>{text}</s>"


def test_templates_do_not_see_each_other() -> None:
    """A template's variables are gone in the next one, and a chat is rendered the same way each time."""
    setting = ChatRecord(template="{% set x = 'kept' %}{{ messages[-1].content }}{{ x }}", tokens={})
    reading = ChatRecord(template="{{ messages[-1].content }}{{ x is defined }}", tokens={})
    for _ in range(3):
        assert rendered(setting, "t") == "tkept"
        assert rendered(reading, "t") == "tFalse"


def test_threads_take_turns() -> None:
    """Each thread of a server gets the rendering of its own prompt."""
    chat = ChatRecord(template="[{{ messages[-1].content }}]", tokens={})
    texts = [f"{number} " * number for number in range(200)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: rendered(chat, text), texts)) == [f"[{text}]" for text in texts]


def test_a_process_that_was_killed_is_started_again() -> None:
    """If the process is killed, as by lack of memory, one prompt fails with a clear message, and it restarts."""
    chat = ChatRecord(template=_ECHO, tokens={})
    assert rendered(chat, "a") == "a"
    process = chat_templates._RENDERER._process
    assert process is not None
    process.send_signal(signal.SIGKILL)
    process.wait()
    with pytest.raises(VocabularyError, match="the process that rendered it was ended by SIGKILL"):
        rendered(chat, "a")
    assert rendered(chat, "a") == "a"


def test_it_holds_little_memory() -> None:
    """Memory is limited in the process that renders, not in the one that asks."""
    # In a process without other children, one of which may have held more.
    code = (
        "import resource; from calm_beam.inputs.vocabularies.vocabulary import VocabularyError\n"
        "from calm_beam.manifest import ChatRecord; from calm_beam.inputs.vocabularies import chat_templates\n"
        "template = \"{{ ('a' * 300000000) | length }}{{ 'a' * 1000000000 }}\"\n"
        "try: chat_templates.rendered(ChatRecord(template=template, tokens={}), 'a')\n"
        "except VocabularyError: pass\n"
        "process = chat_templates._RENDERER._process\n"
        "process.kill(), process.wait(), print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10)\n"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 0 < int(printed) < 2048


def test_it_ends_with_the_process_that_asked(tmp_path: pathlib.Path) -> None:
    """The process ends with the one that asked, however that ended."""
    code = (
        "import os, sys; from calm_beam.manifest import ChatRecord;"
        "from calm_beam.inputs.vocabularies import chat_templates;"
        "chat_templates.rendered(ChatRecord(template='x', tokens={}), 'x');"
        "print(chat_templates._RENDERER._process.pid, flush=True);"
        "sys.argv[1] == 'exit' or os.kill(os.getpid(), 9)"
    )
    for way in ("exit", "kill"):
        ended = subprocess.run(
            [sys.executable, "-W", "error", "-c", code, way], capture_output=True, text=True, check=False
        )
        assert ended.stderr == ""
        pid = int(ended.stdout)
        deadline = time.monotonic() + 30
        while _is_running(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _is_running(pid)


def _is_running(pid: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_a_forked_process_has_its_own() -> None:
    """A forked process has its own renderer, since it would otherwise read its parent's answers."""
    chat = ChatRecord(template=_ECHO, tokens={})
    assert rendered(chat, "parent") == "parent"
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, rendered(chat, "child").encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 100) == b"child"
    assert rendered(chat, "parent") == "parent"
    os.close(reading)
    os.close(writing)
