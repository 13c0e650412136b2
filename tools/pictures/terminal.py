"""The output of commands, drawn as a terminal, without references to other files."""

import html
import io
import os
import subprocess
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

_COLUMNS = 80
# rich's own format loads a font from a server; the placeholders are rich's.
_FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img" \
aria-label="LABEL">
<style>
.{unique_id}-matrix {{ font: {char_height}px/{line_height}px ui-monospace, "SF Mono", Menlo, Consolas, \
"DejaVu Sans Mono", monospace; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>\
</clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


def printed(argv: Sequence[str], *, cwd: str) -> str:
    """Returns the output of a command on a terminal with colours, given its arguments after the program's name.

    Raises:
      RuntimeError: If it fails.
    """
    colours = {"COLUMNS": str(_COLUMNS), "FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color"}
    done = subprocess.run(
        [sys.executable, "-m", "calm_beam.launch.cli", *argv],
        cwd=cwd,
        env={**os.environ, **colours},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"calm-beam {' '.join(argv)} failed: {done.stderr}")
    return done.stdout


def drawn(session: Sequence[tuple[str, str]]) -> str:
    """Returns an SVG of some commands, each as typed, with its output."""
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for typed, output in session:
        console.print(Text(f"$ {typed}", style="bold green"), soft_wrap=True)
        console.print(Text.from_ansi(output.rstrip("\n") + "\n"))
    label = html.escape("A terminal: " + "; ".join(typed.replace("\\\n", " ") for typed, _ in session))
    return console.export_svg(
        title="calm-beam", theme=MONOKAI, code_format=_FORMAT.replace("LABEL", label), unique_id="terminal"
    )
