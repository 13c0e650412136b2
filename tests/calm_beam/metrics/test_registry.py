"""The registry resolves every name or refuses it with a clear message, and checks every score."""

import decimal
import fractions
import math
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from calm_beam.metrics import NO_SETTINGS
from calm_beam.metrics.registry import (
    METRICS,
    MetricError,
    check_source,
    checked_score,
    full_name,
    get_metric,
    source_digests,
    take_clipped,
)

_OWN_MODULE = """
VERSION = "1"
NOTHING = None

def half(candidate, references):
    return 0.5

class Scores:
    @staticmethod
    def one(candidate, references):
        return 1.0
"""


@pytest.fixture
def _own_modules(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts importable user modules on the path, some of which fail when they run, and removes them afterwards."""
    modules = {
        "own_scores": _OWN_MODULE,
        "broken_scores": "import package_that_is_not_there\n",
        "ending_scores": "import sys\nsys.exit(0)\n",
        "closing_scores": "raise GeneratorExit\n",
        "failing_scores": "raise NameError('two\\nlines')\n",
        "made_up_scores": "import sys\ndef __getattr__(name):\n    sys.exit(0)\n",
        "listless_scores": "def __dir__():\n    raise OSError('no list')\n",
    }
    for name, content in modules.items():
        (tmp_path / f"{name}.py").write_text(content, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    # cloudpickle searches every imported module for the functions it pickles.
    for name in modules:
        sys.modules.pop(name, None)


def _returning(value: object) -> Callable[[str, Sequence[str]], float]:
    return lambda candidate, references: value  # type: ignore[return-value]


def _score(value: object) -> float:
    return checked_score(_returning(value), "chrf", candidate="candidate", references=["reference"], example_id="ex-7")


def test_named_metrics() -> None:
    """The names that a manifest may have give their functions, each 1 on a match and 0 on a miss."""
    assert list(METRICS) == [
        *("rouge_l", "rouge_l_unicode", "token_f1", "exact_match"),
        *("chrf", "sentence_bleu", "edit_distance"),
    ]
    for name in METRICS:
        metric = get_metric(name)
        assert metric is METRICS[name]
        assert full_name(name, NO_SETTINGS) == name
        assert metric("yes", ["yes"]) == 1.0
        assert metric("yes", ["no"]) == 0.0
        assert take_clipped(metric) == 0


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("rougeL", 'Did you mean "rouge_l"?'),
        ("tokenf1", 'Did you mean "token_f1"?'),
        ("bluert", 'Did you mean "bleurt"?'),
        ("zzz", "Known metrics:"),
    ],
)
def test_unknown_name_gets_the_nearest(name: str, hint: str) -> None:
    """An unknown name is refused with the nearest real one, if any is near, and with all of them."""
    known = (
        "Known metrics: rouge_l, rouge_l_unicode, token_f1, exact_match, chrf, sentence_bleu, edit_distance, bleurt; "
        "for one of your own write module:function."
    )
    with pytest.raises(ValueError, match=f'^{re.escape(f"""metric "{name}" is not known. {hint}""")}') as caught:
        get_metric(name)
    assert known in str(caught.value)


@pytest.mark.usefixtures("_own_modules")
def test_own_function_is_imported() -> None:
    """module:function gives the function, which may be in a class."""
    assert get_metric("own_scores:half")("a", ["b"]) == 0.5
    assert get_metric("own_scores:Scores.one")("a", ["b"]) == 1.0


@pytest.mark.usefixtures("_own_modules")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_scores:", 'metric "own_scores:": expected module:function'),
        (":half", 'metric ":half": expected module:function'),
        (".own_scores:half", 'metric ".own_scores:half": expected module:function'),
        ("no_such_module:f", "cannot import module \"no_such_module\" (No module named 'no_such_module')"),
        ("broken_scores:f", "cannot import module \"broken_scores\" (No module named 'package_that_is_not_there')"),
        ("own_scores:haalf", 'module "own_scores" has no "haalf". Did you mean "own_scores:half"?'),
        ("own_scores:Scores.two", 'module "own_scores" has no "Scores.two".'),
        ("own_scores:VERSION", '"VERSION" is not callable, it is of type str.'),
        ("own_scores:NOTHING", '"NOTHING" is not callable, it is of type NoneType.'),
        ("ending_scores:f", "(it raises SystemExit: 0, which would have ended the process)."),
        ("closing_scores:f", "(it raises GeneratorExit: )."),
        ("failing_scores:f", "(it raises NameError: two\\nlines)."),
        ("made_up_scores:f", '"f" cannot be loaded (it raises SystemExit: 0, which would have ended the process).'),
        ("listless_scores:f", '"f" cannot be loaded (it raises OSError: no list).'),
    ],
)
def test_own_function_that_cannot_be_had(name: str, message: str) -> None:
    """Every error of module:function is reported under the name as written."""
    with pytest.raises(MetricError, match=re.escape(message)) as caught:
        get_metric(name)
    assert f'metric "{name}"' in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [0, 1, 0.25, True, fractions.Fraction(1, 2), np.float32(0.5), np.float64(0.1), np.bool_(True), np.array(0.5)],
    ids=repr,
)
def test_numbers_inside_pass_as_floats(value: object) -> None:
    """Every kind of real scalar in [0, 1] comes back as a float of the same value."""
    score = _score(value)
    assert type(score) is float
    assert score == value


@pytest.mark.parametrize("value", [math.nan, -0.001, 1.0000001, 42, math.inf, np.float32("nan")])
def test_scores_outside_name_metric_and_example(value: float) -> None:
    """A score that is NaN or outside [0, 1] is an error with metric, example and value."""
    message = f'metric "chrf" on example "ex-7": returned {float(value)}, expected a number in [0, 1].'
    with pytest.raises(MetricError, match=re.escape(message)):
        _score(value)


class _Number:
    """A number-like object whose value is user code."""

    ndim = 0

    def __init__(self, raised: BaseException) -> None:
        self._raised = raised

    def __float__(self) -> float:
        raise self._raised


async def _coming() -> float:
    return 0.5


@pytest.mark.parametrize(
    "value",
    [
        *(None, "0.5", b"0.5", [0.5], {"f": 0.5}, 1j, decimal.Decimal("0.5"), object(), _coming, iter([0.5])),
        *(np.array([0.5]), np.array("text"), np.array("0.5"), np.str_("0.5"), np.bytes_(b"0.5"), np.complex64(0.5)),
        *(np.array(0.5, dtype=object), np.datetime64(0, "s"), np.timedelta64(0, "s"), _Number(TypeError("none"))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_number_is_refused(value: object) -> None:
    """A value that is not a single real number is an error, even if it could be converted into one."""
    message = f'metric "chrf" on example "ex-7": returned {value!r}, expected a number in [0, 1].'
    with pytest.raises(MetricError, match=re.escape(message)):
        _score(value)


def test_metric_that_raises_names_the_example() -> None:
    """A metric's exception becomes a MetricError with the example, and is its cause."""

    def fails(candidate: str, references: Sequence[str]) -> float:
        raise KeyError("no such word")

    message = 'metric "chrf" on example "ex-7": raised KeyError: \'no such word\''
    with pytest.raises(MetricError, match=re.escape(message)) as caught:
        checked_score(fails, "chrf", candidate="a", references=["b"], example_id="ex-7")
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    "raised", [SystemExit(0), SystemExit(None), GeneratorExit(), StopIteration(), BaseException("odd")], ids=repr
)
def test_a_metric_cannot_end_the_run(raised: BaseException) -> None:
    """Every exception of a metric, also from converting its value, becomes a MetricError with the example."""

    def fails(candidate: str, references: Sequence[str]) -> float:
        raise raised

    for metric in (fails, _returning(_Number(raised))):
        with pytest.raises(
            MetricError, match=f'^metric "own" on example "ex-7": raised {type(raised).__name__}: '
        ) as caught:
            checked_score(metric, "own", candidate="a", references=["b"], example_id="ex-7")
        assert caught.value.__cause__ is raised


def test_what_a_function_of_the_user_is_called_is_its_own_matter() -> None:
    """Only metrics of a class that counts clipped scores are asked for counts; a function may have any attribute."""
    metric = _returning(0.5)
    metric.take_clipped = "often"  # type: ignore[attr-defined]
    assert take_clipped(metric) == 0


def test_metric_error_is_a_value_error() -> None:
    """Callers that catch ValueError catch it."""
    assert issubclass(MetricError, ValueError)


def test_arguments_reach_the_metric() -> None:
    """The candidate and the references are passed on unchanged."""
    seen = []

    def metric(candidate: str, references: Sequence[str]) -> float:
        seen.append((candidate, references))
        return 1.0

    checked_score(metric, "own", candidate="c", references=["r", "s"], example_id="1")
    assert seen == [("c", ["r", "s"])]


def _loaded_after(code: str) -> set[str]:
    """Returns which heavy modules a fresh interpreter has loaded after running the code."""
    heavy = ("rouge_score", "nltk", "sacrebleu", "rapidfuzz", "tensorflow", "numpy", "apache_beam", "jax")
    check = f"{code}\nimport sys; print(*[name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


def test_import_is_light() -> None:
    """Importing the registry and looking up metrics loads none of their packages, nor anything numerical."""
    assert _loaded_after("import calm_beam.metrics.registry as r; [r.get_metric(name) for name in r.METRICS]") == set()


def test_the_check_sees_rouge_score() -> None:
    """The first pair of different texts does load it (the twin)."""
    code = "from calm_beam.metrics.rouge_l import rouge_l; rouge_l('a', ['b'])"
    assert {"rouge_score", "nltk"} <= _loaded_after(code)


def test_other_packages_wait_for_their_metric() -> None:
    """Other packages are loaded with the first pair of different texts, too."""
    code = (
        "import calm_beam.metrics.registry as r; [r.get_metric(name)('a', ['b']) for name in ('chrf', 'edit_distance')]"
    )
    assert {"sacrebleu", "rapidfuzz"} <= _loaded_after(code)


@pytest.mark.usefixtures("_own_modules")
def test_the_file_of_an_own_metric_is_its_version(tmp_path: pathlib.Path) -> None:
    """Another file under the same name is refused; our metrics have package versions, modules without a file none."""
    software = source_digests(["own_scores:half", "token_f1", "builtins:len"])
    assert software.keys() == {"own_scores:half"}
    check_source("own_scores:half", software)
    check_source("token_f1", {"token_f1": "1"})
    check_source("builtins:len", software)
    with (tmp_path / "own_scores.py").open("a") as file:
        file.write("# Changed.\n")
    check_source("own_scores:half", {})
    with pytest.raises(
        MetricError, match=r'"own_scores:half": its module is now sha256:\w+, calibrated was sha256:\w+\.'
    ):
        check_source("own_scores:half", software)
