"""Random chat templates: each is rendered within its limits, or refused with one of our messages.

They are made of pieces of published templates, of unbounded pieces (loops within loops, widths, strings that double),
and of damage to their text.
"""

import json
import random
import sys
import time
import traceback

from calm_beam.errors import CalmBeamError
from calm_beam.inputs.vocabularies.chat_templates import rendered
from calm_beam.manifest import ChatRecord

# On a busy machine; on an idle one, none takes ten.
MOST_SECONDS = 60.0
_CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message.role + '|>\\n' + message.content | trim }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_NUMBERS = ("0", "-1", "3", "99999", "100000000", "1000000000", "10 ** 18", "9 ** (9 ** 9)", "1.5", "none", "'x'")
_VALUES = ("messages", "messages[-1].content", "bos_token", "tools", "range(99999)", "ns.x", "loop", "namespace", "[]",
           "{'a': [1]}", "'\\0'", "'\\ud800'", "'ab'", "undefined_name", "messages[0]", "cycler(1, 2)",
           "joiner")  # fmt: skip
_FILTERS = ("center(N)", "indent(N)", "truncate(N)", "wordwrap(N)", "batch(N)", "slice(N)", "tojson(indent=N)", "list",
            "length", "join(V)", "replace(V, V)", "string", "sort", "reverse", "map('string')", "format(N)", "trim",
            "first", "int", "float", "round(N)", "sum", "unique", "groupby(0)", "pprint", "xmlattr", "urlize",
            "filesizeformat", "attr('__class__')", "selectattr('x')", "dictsort", "striptags", "random")  # fmt: skip
_METHODS = ("ljust(N)", "zfill(N)", "split(V)", "format(V)", "join(V)", "replace(V, V)", "encode()", "append(V)",
            "update(V)", "__len__()", "items()", "center(N, V)", "expandtabs(N)")  # fmt: skip
_BLOCKS = (
    "{% for x in V %}B{% endfor %}",
    "{% for x in range(N) %}{% for y in range(N) %}B{% endfor %}{% endfor %}",
    "{% for x in V recursive %}{{ loop(V) }}{{ loop([x]) }}{% endfor %}",
    "{% set ns = namespace(x=V) %}{% for a in range(N) %}{% set ns.x = ns.x + ns.x %}B{% endfor %}{{ ns.x }}",
    "{% macro m(a) %}B{{ m(a) }}{{ m(V) }}{% endmacro %}{{ m(V) }}",
    "{% if V %}B{% elif V %}B{% else %}B{% endif %}",
    "{{ V }}{# B #}",
    "{% set v = V %}{{ v is defined }}",
    "{% include V %}",
    "{% extends V %}",
    "{% generation %}B{% endgeneration %}",
    "{% filter F %}B{% endfilter %}",
    "{% call V() %}B{% endcall %}",
    "{% raw %}B{% endraw %}",
    "{{ raise_exception(V) }}",
    "{{ strftime_now(V) }}",
    "{{ V * (N) }}",
    "{{ V ~ V ~ V }}",
    "{{ '%Nd' % (N) }}",
    "{{ '{:N}'.format(V) }}",
    "{{ V.M }}",
    "{{ V | F | F }}",
    "{{ V[N] }}",
    "{{ V[N:N:N] }}",
)


def template(generator: random.Random) -> str:
    """Returns a random template."""
    blocks = generator.randrange(4)
    text = _CHAT if not blocks or generator.random() < 0.3 else ""
    for _ in range(blocks):
        text += _filled(generator.choice(_BLOCKS), generator, depth=3)
    if generator.random() < 0.3:
        place = generator.randrange(len(text))
        cut = generator.choice(["", "{%", "}}", "\0", "{{ ", "(" * 300, "[" * 3000, "\ud800", "{#"])
        text = text[:place] + cut + text[place + generator.randrange(3) :]
    return text * generator.choice([1, 1, 1, 1, 50])


def _filled(block: str, generator: random.Random, *, depth: int) -> str:
    choices = {"N": _NUMBERS, "V": _VALUES, "F": _FILTERS, "M": _METHODS}
    while any(letter in block for letter in "BFM"):
        for letter in "BFM":
            if letter == "B":
                inner = generator.choice(_BLOCKS) if depth else "text"
                filled = _filled(inner, generator, depth=depth - 1) if depth and "B" in block else "text"
            else:
                filled = generator.choice(choices[letter])
            block = block.replace(letter, filled, 1)
    for letter in "NV":
        while letter in block:
            block = block.replace(letter, generator.choice(choices[letter]), 1)
    return block


def render_made(count: int, seed: int) -> None:
    """Renders `count` templates; prints defects and counts as JSON."""
    generator = random.Random(f"templates/{seed}")
    counts = {"accepted": 0, "refused": 0, "refused without a word": 0}
    for number in range(count):
        made, start = template(generator), time.monotonic()
        try:
            text = rendered(ChatRecord(template=made, tokens={"bos_token": "<s>"}), "What is\nthis?")
            counts["refused without a word" if "\0" in text else "accepted"] += 1
        except CalmBeamError as error:
            counts["refused" if str(error).strip() else "refused without a word"] += 1
        except Exception as error:
            print(json.dumps({"defect": number, "template": made, "error": repr(error)[:500]}), flush=True)
            traceback.print_exc(file=sys.stderr)
        seconds = time.monotonic() - start
        if seconds > MOST_SECONDS:
            print(json.dumps({"defect": number, "template": made, "seconds": seconds}), flush=True)
    print(json.dumps(counts), flush=True)
