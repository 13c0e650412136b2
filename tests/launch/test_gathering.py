"""No step of a pipeline gathers the examples of all shards in one worker."""

import collections
import itertools
import pathlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from calm_beam.launch.cli import main
from tests.pipelines import SHORT_FLAGS, id_rows, write_model, write_rows

pytestmark = pytest.mark.timeout(600)

_ASKED = ("--consistency=textual,risk", "--metric=token_f1", "--delta=0.9", "--epsilon=0.1", "--overwrite")
_ROUNDS = ("--sequential", "--round_examples=1000", "--stop_at_threshold=0.9")
# Runs that do the same differ in longer numbers and hashes.
_NOTHING = 500
_EXAMPLES = 270

# Bytes gathered at each step: by every key of a grouping, by every element of a side input.
_met: dict[str, list[int]] = collections.defaultdict(list)


@pytest.fixture
def weighing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Weighs every grouping and side input of pipelines that run in this process."""
    numbers, apply = itertools.count(), beam.Pipeline.apply

    def weighed(pipeline: beam.Pipeline, transform: Any, pvalueish: Any = None, label: str | None = None) -> Any:
        if label is not None:
            # Beam gives the step its name, and applies it again.
            return apply(pipeline, transform, pvalueish, label)
        for side in getattr(transform, "side_inputs", ()):
            name = side.pvalue.producer.full_label
            _ = side.pvalue | f"WeighSide{next(numbers)}" >> beam.Map(_weigh, name=f"{name} as a side input")
        result = apply(pipeline, transform, pvalueish)
        if not isinstance(transform, (beam.GroupByKey, beam.CombinePerKey)):
            return result
        weigh = beam.Map(_weigh, name=result.producer.full_label).with_output_types(result.element_type)
        return result | f"Weigh{next(numbers)}" >> weigh

    monkeypatch.setattr(beam.Pipeline, "apply", weighed)
    _met.clear()
    yield
    _met.clear()


def _weigh(element: Any, *, name: str) -> Any:
    values = element[1] if isinstance(element, tuple) and len(element) == 2 else element
    is_group = isinstance(values, collections.abc.Iterable) and not isinstance(values, (str, bytes, list, dict, tuple))
    _met[name].append(sum(len(pickle.dumps(each)) for each in values) if is_group else len(pickle.dumps(element)))
    return element


def _largest(run: Callable[[], object]) -> dict[str, int]:
    """Returns the largest number of bytes gathered at each step."""
    _met.clear()
    run()
    return {name: sum(met) if name.endswith("as a side input") else max(met) for name, met in _met.items()}


def _calibration(folder: pathlib.Path, *flags: str) -> Callable[[], object]:
    model = write_model(folder / "model")

    def run() -> None:
        task = (f"--checkpoint={model}", f"--data={folder / 'rows.jsonl'}", f"--output={folder / 'out'}")
        assert main(["calibrate", *task, *SHORT_FLAGS, *_ASKED, *flags]) == 0

    return run


@pytest.mark.usefixtures("weighing")
@pytest.mark.parametrize(
    ("asked", "keeps"),
    [(("--p_value=hoeffding_bentkus",), 0), (("--p_value=star_bets",), 120), (_ROUNDS, 0)],
    ids=["sums", "bets", "rounds"],
)
def test_nothing_is_gathered(asked: tuple[str, ...], keeps: int, tmp_path: pathlib.Path) -> None:
    """With more examples only shards grow, and the losses of each example in a test that bets."""
    few, many = (
        _largest(_calibration(tmp_path, *asked))
        for examples in (30, 30 + _EXAMPLES)
        if write_rows(tmp_path / "rows.jsonl", id_rows(examples))
    )
    assert few.keys() == many.keys()
    assert many.pop("ReadExamples/GroupByShard") > few["ReadExamples/GroupByShard"] + _NOTHING
    grown = {name: most - few[name] for name, most in many.items() if most > few[name] + _NOTHING}
    assert all("/SumLosses/" in name for name in grown)
    assert (max(grown.values(), default=0) / _EXAMPLES > 0) == (keeps > 0)
    assert max(grown.values(), default=0) / _EXAMPLES <= keeps


@pytest.mark.usefixtures("weighing")
def test_what_gathers_is_seen() -> None:
    """A list of all elements, gathered as one element or as a side input, is distinguished from a sum."""

    def run(count: int) -> None:
        with beam.Pipeline(runner=FnApiRunner()) as pipeline:
            numbers = pipeline | beam.Create(range(count)) | "Double" >> beam.Map(_double)
            _ = numbers | "List" >> beam.combiners.ToList()
            _ = numbers | "Sum" >> beam.CombineGlobally(sum)
            _ = pipeline | "One" >> beam.Create([1]) | "Read" >> beam.Map(_first, beam.pvalue.AsIter(numbers))

    few, many = _largest(lambda: run(20)), _largest(lambda: run(400))
    grown = {name.partition("/")[0] for name in many if many[name] > few[name] + _NOTHING}
    assert grown == {"List", "Double as a side input"}


def _double(number: int) -> int:
    return 2 * number


def _first(element: int, numbers: Any) -> tuple[int, int]:
    return element, len(list(numbers))
