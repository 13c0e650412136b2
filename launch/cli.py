"""`calm-beam COMMAND [flags]`.

Calibrate a model on this machine:

    calm-beam calibrate --checkpoint=model/ --data='data/*.jsonl.gz' --consistency=textual --metric=rouge_l_unicode \
        --delta=0.05,0.1 --epsilon=0.05 --output=calibration

The same on worker processes of one machine, with Beam's own flags:

    calm-beam calibrate --checkpoint=model/ --data='data/*.jsonl.gz' --output=calibration \
        --direct_num_workers=2 --direct_running_mode=multi_processing

Going on with a run that failed, was interrupted or killed: the same command with `--resume`. Other metrics, tolerances
or tests of what was decoded, without the model:

    calm-beam calibrate --generations=calibration --metric=token_f1 --delta=0.02 --output=calibration-2

Commands with a result print it as JSON with `--json`.

Exit status: 0 when done (also when no threshold is safe), 1 on failure, 2 on bad usage, 3 when `monitor` or `verify`
finds a bound broken, 4 when nothing was proved and `--require_threshold` was given (or `monitor` finds a bound broken
or losses missing), 130 when interrupted, 141 when nobody reads the output any more.
"""

import difflib
import logging
import sys
import textwrap
from collections.abc import Sequence

from calm_beam import __version__
from calm_beam.errors import CalmBeamError, os_error_in_words
from calm_beam.text import printable_line

from .commands import COMMANDS, command_module, is_installed, left_out
from .flags import HelpShown, UsageError
from .flags.requests import JSON, LOG_TO, REQUIRED, UNPROVED, without_result_flags
from .terminal import say
from .terminal.interrupts import INTERRUPTED, StreamError, prepare_streams, run_interruptible
from .terminal.lines import outcome_of_command
from .trackers import tracked

_LONGEST_SHOWN = 200


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    Args:
      argv: Command and flags; those of the process if None.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "--help-all", "help"):
        print(_usage(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(__version__)
        return 0
    command, flags = arguments[0], arguments[1:]
    if command not in COMMANDS:
        nearest = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f" Did you mean {nearest[0]}?" if nearest else ""
        say(f"calm-beam: unknown command {command!r}.{hint}\n\n{_usage()}")
        return 2
    try:
        _check_texts(flags)
        return _run(command, flags)
    except ModuleNotFoundError as error:
        missing = left_out(error)
        if missing is None:
            raise
        say(
            f"calm-beam {command}: there is no {missing} here. calm-beam-serving does without what calibrating and "
            "training need: pip install calm-beam."
        )
        return 1
    except SystemExit as ended:
        if isinstance(ended, HelpShown):
            raise
        # User code, such as a runner, or a library ended the process. Its status may be 0 although nothing is done.
        say(f"calm-beam {command}: some code tried to end the process (SystemExit: {ended.code}).")
        return 1
    except KeyboardInterrupt as interrupt:
        # A command that keeps what it has done says so.
        say(f"calm-beam {command}: interrupted; {str(interrupt) or 'nothing was written.'}")
        return INTERRUPTED
    # The errors that a command may end with. Defects in calm-beam keep their traceback.
    except (CalmBeamError, OSError, MemoryError, RecursionError) as error:
        say(f"calm-beam {command}: {_in_words(error)}")
        return 2 if isinstance(error, UsageError) else 1


def _run(command: str, flags: Sequence[str]) -> int:
    """Runs a command, and returns its exit status."""
    module, given, asked = command_module(command), dict[str, str](), flags
    if {JSON, LOG_TO, REQUIRED} & {flag.partition("=")[0] for flag in flags}:
        parsers = module.flag_parsers()
        flags, given = without_result_flags(flags, parsers)
        asked = parsers[0].whole(flags) if LOG_TO in given else flags
    with (
        outcome_of_command(as_json=JSON in given) as outcome,
        tracked(given.get(LOG_TO), command, flags=asked, outcome=outcome),
    ):
        outcome.status = module.main(flags)
    return UNPROVED if outcome.status == 0 and REQUIRED in given and outcome.is_proved is False else outcome.status


def _check_texts(arguments: Sequence[str]) -> None:
    """Refuses arguments that UTF-8 cannot encode, since all results are UTF-8; Python holds such bytes as surrogates.

    Raises:
      UsageError: If there is any, or a NUL character.
    """
    for argument in arguments:
        is_text = not any("\ud800" <= character <= "\udfff" for character in argument)
        if not is_text or "\0" in argument:
            raise UsageError(
                f"{printable_line(argument)[:_LONGEST_SHOWN]} is not UTF-8 text, or holds a NUL character. Flags, and "
                "names of files, have to be text."
            )


def _in_words(error: Exception) -> str:
    """Returns an error's message, or an explanation of Python's own errors that say little or nothing."""
    if isinstance(error, MemoryError):
        return f"memory ran out. Lower --batch_size, --max_cache_tokens or the number of workers. {error}".rstrip()
    if isinstance(error, RecursionError):
        return f"something that was read is nested too deeply ({error})."
    return os_error_in_words(error) if isinstance(error, OSError) else str(error)


def entry_point() -> None:
    """Runs the process's command line, with Beam's own logging kept off the terminal.

    Beam warns of extras that are not installed, and logs each failure a second time with its traceback.
    """
    prepare_streams()
    logging.basicConfig(level=logging.ERROR)
    logging.getLogger("apache_beam").setLevel(logging.CRITICAL)
    sys.exit(run_interruptible(_status))


def _status() -> int:
    """Returns the exit status of the process's command line, including errors when output is flushed."""
    try:
        status = main()
        sys.stdout.flush()
    except StreamError as error:
        if not error.is_reader_gone:
            print(f"calm-beam: {error}", file=sys.stderr)
        status = error.status
    return status


def _usage() -> str:
    here = {name: text for name, text in COMMANDS.items() if is_installed(name)}
    commands = "\n".join(
        textwrap.fill(f"  {name:<11} {text}", width=80, subsequent_indent=" " * 14) for name, text in here.items()
    )
    elsewhere = [name for name in COMMANDS if name not in here]
    missing = f"Not in calm-beam-serving, but in calm-beam: {', '.join(elsewhere)}."
    more = f"{textwrap.fill(missing, width=80)}\n\n" if elsewhere else ""
    return (
        f"usage: calm-beam COMMAND [flags]\n\n{commands}\n\n{more}"
        "calm-beam COMMAND --help shows the usual flags of a command, and examples;\n--help-all shows all flags."
    )


if __name__ == "__main__":
    entry_point()
