"""`calm-beam completion SHELL`: prints what makes bash, zsh or fish complete commands, flags and their values.

For bash, from the next login on:

    calm-beam completion bash > ~/.local/share/bash-completion/completions/calm-beam

For zsh, in a folder that `fpath` of ~/.zshrc names before `compinit`:

    calm-beam completion zsh > ~/.zfunc/_calm-beam

For fish:

    calm-beam completion fish > ~/.config/fish/completions/calm-beam.fish

The script is built from the parsers of all commands. It knows the flags of the calm-beam that printed it, so print it
again after an upgrade. It does not complete Beam's own flags.
"""

import argparse
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from .commands import COMMANDS, left_out
from .commands import flag_parsers as parsers_of
from .flags import FlagParser, parse_own_flags
from .flags.parser import is_listed, whole_help

_LONGEST_HELP = 70


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completed:
    """A flag, or a positional argument, as shells complete it.

    Attributes:
      name: With its dashes; empty for a positional argument.
      help: What it does, in a few words.
      takes_value: Whether something follows.
      choices: The allowed values; empty if they cannot be listed.
      is_path: Whether a value names files.
    """

    name: str
    help: str
    takes_value: bool
    choices: tuple[str, ...] = ()
    is_path: bool = False


def flag_parsers() -> tuple[FlagParser, ...]:
    """Returns the parsers of all forms of the command."""
    parser = FlagParser(prog="calm-beam completion", doc=__doc__)
    parser.add_argument("shell", metavar="SHELL", choices=tuple(_SCRIPTS), help=", ".join(_SCRIPTS))
    return (parser,)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    flags = parse_own_flags(flag_parsers()[0], argv)
    # Scripts are printed verbatim, without wrapping to the terminal's width.
    print(script(flags.shell), end="")
    return 0


def script(shell: str) -> str:
    """Returns the script of a shell: `bash`, `zsh` or `fish`."""
    return _SCRIPTS[shell]({name: tuple(_completed(name)) for name in COMMANDS if _is_here(name)})


def _is_here(command: str) -> bool:
    """Returns whether the installed distribution includes the command."""
    try:
        parsers_of(command)
    except ModuleNotFoundError as error:
        if left_out(error) is None:
            raise
        return False
    return True


def _completed(command: str) -> Iterator[Completed]:
    """Yields the flags and arguments of all forms of a command, each flag once."""
    seen = set()
    for parser in parsers_of(command):
        for action in parser._actions:
            name = next((name for name in action.option_strings if name.startswith("--")), "")
            if name not in seen and is_listed(action):
                seen.add(name)
                yield _completion_of(action, name)


def _completion_of(action: argparse.Action, name: str) -> Completed:
    takes_value = action.nargs != 0
    return Completed(
        name=name,
        help=_short(whole_help(action)),
        takes_value=takes_value,
        choices=tuple(map(str, action.choices or ())),
        # Plain text values may name files; other kinds of names cannot be completed here.
        is_path=takes_value and not action.choices and getattr(action.type, "names_files", action.type is None),
    )


def _short(text: str) -> str:
    """Returns the beginning of a help text, cut where its first part ends, or at a word."""
    first = re.split(r"[;:(]", text)[0].strip()
    if len(first) <= _LONGEST_HELP:
        return first
    return first[:_LONGEST_HELP].rpartition(" ")[0].rstrip(",") + " ..."


def _bash(commands: Mapping[str, Sequence[Completed]]) -> str:
    flags = "\n".join(
        f"        {command}) flags='{' '.join(_typed(flag) for flag in taken if flag.name)}' ;;"
        for command, taken in commands.items()
    )
    choices = "\n".join(
        f"        {command}:{flag.name}) choices='{' '.join(flag.choices)}' ;;"
        for command, taken in commands.items()
        for flag in taken
        if flag.choices
    )
    paths = "|".join(f"{command}:{flag.name}" for command, taken in commands.items() for flag in taken if flag.is_path)
    return _BASH.format(commands=" ".join(commands), flags=flags, choices=choices, paths=paths)


def _typed(flag: Completed) -> str:
    return f"{flag.name}=" if flag.takes_value else flag.name


# Bash splits words at = if COMP_WORDBREAKS contains it, as it does by default.
_BASH = """\
# Completion of calm-beam for bash, printed by `calm-beam completion bash`.

_calm_beam() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
    local command="${{COMP_WORDS[1]}}" flag='' start='' flags='' choices='' is_path='' word
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        while IFS= read -r word; do COMPREPLY+=("$word"); done < <(
            compgen -W '{commands} --help --version' -- "$current")
        return
    fi
    case "$command" in
{flags}
    esac
    if [[ $current == = ]]; then
        flag=$previous current=''
    elif [[ $previous == = ]]; then
        flag=${{COMP_WORDS[COMP_CWORD-2]}}
    elif [[ $current == --*=* ]]; then
        flag=${{current%%=*}} start="${{current%%=*}}=" current=${{current#*=}}
    elif [[ $current != -* && " $flags " == *" $previous= "* ]]; then
        flag=$previous
    elif [[ $current == -* ]]; then
        while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen -W "$flags" -- "$current")
        [[ ${{#COMPREPLY[@]}} -eq 1 && ${{COMPREPLY[0]}} == *= ]] && compopt -o nospace 2>/dev/null
        return
    fi
    case "$command:$flag" in
{choices}
        {paths}) is_path=yes ;;
    esac
    if [[ $is_path ]]; then
        compopt -o filenames 2>/dev/null
        while IFS= read -r word; do COMPREPLY+=("$start$word"); done < <(compgen -f -- "$current")
    else
        while IFS= read -r word; do COMPREPLY+=("$start$word"); done < <(compgen -W "$choices" -- "$current")
    fi
}}

complete -F _calm_beam calm-beam
"""


def _zsh(commands: Mapping[str, Sequence[Completed]]) -> str:
    described = "\n".join(f"        {_quoted(f'{name}:{COMMANDS[name]}')}" for name in commands)
    specs = "\n".join(
        f"        {command})\n            _arguments \\\n"
        + " \\\n".join(f"                {_quoted(_zsh_spec(flag))}" for flag in taken)
        + "\n            ;;"
        for command, taken in commands.items()
    )
    return _ZSH.format(commands=described, specs=specs)


def _zsh_spec(flag: Completed) -> str:
    action = f"({' '.join(flag.choices)})" if flag.choices else "_files" if flag.is_path else " "
    if not flag.name:
        return f"1: :{action}"
    text = re.sub(r"([\[\]\\:])", r"\\\1", flag.help)
    return f"{flag.name}=[{text}]:value:{action}" if flag.takes_value else f"{flag.name}[{text}]"


_ZSH = """\
#compdef calm-beam
# Completion of calm-beam for zsh, printed by `calm-beam completion zsh`.

_calm_beam() {{
    local -a commands=(
{commands}
    )
    if ((CURRENT == 2)); then
        _describe command commands
        return
    fi
    shift words
    ((CURRENT--))
    case $words[1] in
{specs}
    esac
}}

if [[ $funcstack[1] == _calm-beam ]]; then
    _calm_beam "$@"
else
    compdef _calm_beam calm-beam
fi
"""


def _fish(commands: Mapping[str, Sequence[Completed]]) -> str:
    lines = ["# Completion of calm-beam for fish, printed by `calm-beam completion fish`.", "complete -c calm-beam -f"]
    for name in commands:
        lines.append(f"complete -c calm-beam -n __fish_use_subcommand -a {name} -d {_fish_quoted(COMMANDS[name])}")
    for command, taken in commands.items():
        for flag in taken:
            condition = f"complete -c calm-beam -n '__fish_seen_subcommand_from {command}'"
            values = f" -a '{' '.join(flag.choices)}'" if flag.choices else " -F" if flag.is_path else ""
            if not flag.name:
                lines.append(f"{condition}{values}")
                continue
            needs = (" -r" if flag.is_path else " -x") if flag.takes_value else ""
            lines.append(f"{condition} -l {flag.name[2:]}{needs}{values} -d {_fish_quoted(flag.help)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Returns a text as one word of a Bourne shell."""
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
