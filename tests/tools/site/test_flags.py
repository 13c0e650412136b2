"""The reference of flags."""

import argparse
import subprocess
import sys

import pytest

from calm_beam.launch.commands import COMMANDS, flag_parsers
from calm_beam.launch.flags.parser import is_listed
from tools.site.flags import _page, pages, table


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_is_on_its_page(command: str) -> None:
    """Each flag of each form is named once, as a term, on its command's page; hidden flags are not there."""
    found = [page for name, page in pages().items() if name.partition("-")[0] == command]
    for parser, page in zip(flag_parsers(command), found, strict=True):
        terms = [line for line in page.splitlines() if line.startswith("`") and not line.startswith("```")]
        actions = list(filter(is_listed, parser._actions))
        named = [name for action in actions for name in action.option_strings]
        shown = [name for name in named if any(line.startswith((f"`{name}`", f"`{name}=")) for line in terms)]
        assert set(named) - set(shown) == {"-h", "--help", "--help-all"}
        assert len(terms) == len(actions) - 2


def test_forms_have_pages_of_their_own() -> None:
    """An experiment's flags are on a page of their own, and the table links to every page."""
    assert "`--max_examples=N`" in pages()["evaluate-tradeoff"]
    assert "`--max_examples=N`" not in pages()["evaluate"]
    assert all(table().count(f"](flags/{page}.md)") == 1 for page in pages())


def test_examples_come_first() -> None:
    """A command's page begins with commands that can be pasted."""
    page = pages()["monitor"]
    assert page.index("```sh\ncalm-beam monitor ") < page.index("## ")


def test_help_is_no_markup() -> None:
    """Markdown and HTML characters in help and defaults are shown unchanged; flags become code."""
    parser = argparse.ArgumentParser(prog="calm-beam none", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    group = parser.add_argument_group("part (all of it)")
    group.add_argument("--some_flag", default=3, help="a_b <step> *x* [y], with --other_flag=1; not --other")
    page = _page(parser)
    assert "## Part\n\nAll of it.\n" in page
    assert "`--some_flag=FLAG`\n:   a\\_b &lt;step&gt; \\*x\\* \\[y\\], with `--other_flag=1`; not `--other`" in page
    assert "(default: 3)" in page


def test_neither_beam_nor_jax_is_loaded() -> None:
    """The reference is written in a second or two from the parsers, without Beam or JAX."""
    code = "import sys; from tools.site.flags import pages; pages(); print({'jax', 'apache_beam'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "set()"
