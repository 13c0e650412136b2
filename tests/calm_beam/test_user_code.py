"""Exceptions of user code become one of our errors, with the code's name."""

import asyncio
import re
import threading

import pytest

from calm_beam.errors import CalmBeamError, UserCode, shown, text_of
from calm_beam.inputs.examples import DataError


class _MuteError(Exception):
    def __str__(self) -> str:
        raise SystemExit(0)


class _Mute:
    def __repr__(self) -> str:
        raise SystemExit(0)


def _named(said: str) -> CalmBeamError:
    return CalmBeamError(f"their function: {said}")


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (ValueError("no such word"), "ValueError: no such word"),
        (SystemExit(0), "SystemExit: 0, which would have ended the process"),
        (SystemExit("bye"), "SystemExit: bye, which would have ended the process"),
        (GeneratorExit(), "GeneratorExit: "),
        (StopIteration(5), "StopIteration: 5"),
        (asyncio.CancelledError(), "CancelledError: "),
        (BaseException("base"), "BaseException: base"),
        (MemoryError(), "MemoryError: "),
        (_MuteError(), "_MuteError: (its text is not available)"),
        (DataError("of ours"), "DataError: of ours"),
        (ValueError("one\nKeyError: two\x1b[31m"), "ValueError: one\\nKeyError: two\\x1b[31m"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_every_exception_is_named(raised: BaseException, said: str) -> None:
    """Every exception in the context becomes the cause of one of our errors, in one line."""
    with pytest.raises(CalmBeamError, match=f"^{re.escape(f'their function: {said}')}$") as caught, UserCode(_named):
        raise raised
    assert caught.value.__cause__ is raised


def test_nothing_raised_changes_nothing() -> None:
    """A context without an exception does nothing."""
    with UserCode(_named):
        value = 1
    assert value == 1


def test_errors_of_ours_may_pass() -> None:
    """Our own errors pass unchanged if the caller names them."""
    with pytest.raises(DataError, match=r"^of ours$"), UserCode(_named, passing=DataError):
        raise DataError("of ours")


def test_ctrl_c_stays_what_it_is() -> None:
    """In the main thread a KeyboardInterrupt is the user's Ctrl-C, and passes."""
    with pytest.raises(KeyboardInterrupt), UserCode(_named):
        raise KeyboardInterrupt


def test_ctrl_c_comes_to_no_other_thread() -> None:
    """In another thread, where Python raises none, a KeyboardInterrupt was raised by the code itself."""
    found: list[str] = []

    def work() -> None:
        try:
            with UserCode(_named):
                raise KeyboardInterrupt
        except CalmBeamError as error:
            found.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == ["their function: KeyboardInterrupt: "]


def test_long_texts_are_cut() -> None:
    """Long returned or raised texts are cut in messages."""
    assert shown("a" * 10_000) == "'" + "a" * 499 + "…"
    assert text_of(ValueError("b" * 10_000)) == "b" * 500 + "…"
    assert shown(_Mute()) == "(its text is not available)"
