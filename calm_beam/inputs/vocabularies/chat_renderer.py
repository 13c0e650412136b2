"""A process that renders chat templates: it reads requests from standard input, and writes the rendered prompts.

Templates come with models, so they are untrusted code. They run in Jinja's sandbox, which lets them change nothing and
see nothing but the chat, and in a process of their own with limited memory and processor time: no sandbox bounds loops
within loops, or a width of 1e9 in a filter. A template that exceeds a limit ends this process.
Source: transformers `utils/chat_template_utils.py` (`render_jinja_template`).
"""

import functools
import json
import resource
import signal
import sys
from typing import Any

_PAGE_BYTES = resource.getpagesize()


def main() -> None:
    """Answers requests, each one line of JSON, until the input ends.

    The first line has the limits: `seconds` of processor time for each request, and `memory_bytes` that the process may
    take in addition to its memory at the start. A request has `template`, `variables` and `most`, the most characters
    of an answer. An answer has the `text`, or the `error` as text.
    """
    limits = json.loads(sys.stdin.readline())
    # Jinja is loaded before memory is limited.
    _environment()
    _limit(memory_bytes=limits["memory_bytes"])
    for line in sys.stdin:
        request = json.loads(line)
        # The signal's default action ends the process, whatever it is doing.
        signal.setitimer(signal.ITIMER_PROF, limits["seconds"])
        answer = _answer(request["template"], request["variables"], most=request["most"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(f"{json.dumps(answer)}\n")
        sys.stdout.flush()


def _limit(*, memory_bytes: int) -> None:
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(kind, (0, 0))
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            taken = int(file.read().split()[0]) * _PAGE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (taken + memory_bytes, taken + memory_bytes))
    except (OSError, ValueError):
        # Systems without such files do not enforce the limit either.
        return


def _answer(template: str, variables: dict[str, Any], *, most: int) -> dict[str, str]:
    try:
        pieces, length = [], 0
        for piece in _compiled(template).generate(**variables):
            pieces.append(piece)
            length += len(piece)
            if length > most:
                return {"error": f"it makes more than {most} characters"}
        return {"text": "".join(pieces)}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except RecursionError:
        return {"error": "it is nested too deeply"}
    # Any exception is the template's error.
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


@functools.cache
def _environment() -> Any:
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    base: Any = jinja2.ext.Extension

    class Generation(base):  # type: ignore[misc]
        """The tag that marks an answer for training; it does not change prompts."""

        tags = frozenset(("generation",))

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    # Random output would give other prompts each time.
    del environment.filters["random"], environment.globals["lipsum"]
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment


def _to_json(value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, **more: Any) -> str:
    # Jinja's own filter escapes HTML characters; templates may pass these arguments by position.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **more)


def _raise(message: object) -> None:
    import jinja2

    raise jinja2.TemplateError(str(message))
