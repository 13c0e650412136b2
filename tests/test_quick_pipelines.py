"""Pipelines that are quick to build in tests: Beam returns what it returns elsewhere."""

import functools
import inspect
import types
from typing import Any

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.coders import VarIntCoder
from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions, StandardOptions
from apache_beam.runners.worker import statecache
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import BagStateSpec, TimerSpec, get_dofn_specs, on_timer
from apache_beam.typehints.decorators import get_signature

from tests.quick_pipelines import keeping_signatures, keeping_specs, keeping_views

_READ_SPECS = inspect.unwrap(get_dofn_specs)


class _Adds(beam.DoFn):
    def __init__(self, number: int) -> None:
        self.number = number

    def process(self, element: int, more: int = 1) -> list[int]:
        """Adds."""
        return [element + self.number + more]


class _AddsTwice(_Adds):
    def process(self, element: int, more: int = 2) -> list[int]:
        """Adds twice."""
        return super().process(element, more)


_BAG = beam.DoFn.StateParam(BagStateSpec("bag", VarIntCoder()))
_TIMER = TimerSpec("timer", TimeDomain.WATERMARK)
_EXPIRING = beam.DoFn.TimerParam(_TIMER)


class _Remembers(beam.DoFn):
    def process(self, element: tuple[str, int], bag: Any = _BAG) -> None:
        """Remembers."""
        bag.add(element[1])

    @on_timer(_TIMER)
    def expire(self, timer: Any = _EXPIRING) -> None:
        """Forgets."""


def test_signatures_are_those_that_beam_reads() -> None:
    """Methods of any object and class, functions and classes have their own signatures, the second time too."""
    kept = keeping_signatures(get_signature)
    functions = (_Adds(1).process, _Adds(2).process, _AddsTwice(1).process, _Adds.process, _Adds, str.upper, len)
    for _ in range(2):
        for function in functions:
            assert kept(function) == get_signature(function)
    assert inspect.signature(_Adds(1).process) != inspect.signature(_AddsTwice(1).process)


def test_specs_are_those_that_beam_reads() -> None:
    """Each class has its own states and timers; an object that has methods of its own is read by itself."""
    kept = keeping_specs(_READ_SPECS)
    otherwise = _Adds(1)
    otherwise.process = types.MethodType(_Remembers.process, otherwise)  # type: ignore[method-assign]
    for _ in range(2):
        for dofn in (_Adds(1), _Remembers(), _AddsTwice(1), otherwise):
            assert kept(dofn) == _READ_SPECS(dofn)
    assert [len(specs) for specs in kept(_Remembers())] == [1, 1]
    assert [len(specs) for specs in kept(otherwise)] == [1, 0]
    # Beam may change what it was given.
    kept(_Remembers())[0].clear()
    assert len(kept(_Remembers())[0]) == 1


def test_sizes_are_those_of_beam(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value in the cache of Beam is as large without the variables of modules as with them."""
    values = [np.zeros(100), {"a": [1, 2.5, "text"]}, _Adds(1), _Remembers(), [np.sum, inspect], b"0" * 1000]
    sizes, size = [], statecache.objsize.get_deep_size
    for excludes in (True, False):
        sized = functools.partial(size, exclude_modules_globals=excludes)
        monkeypatch.setattr(statecache.objsize, "get_deep_size", sized)
        sizes.append([statecache.get_deep_size(value) for value in values])
    assert sizes[0] == sizes[1]


def test_views_share_the_values_of_their_options() -> None:
    """Each options object has views of its own, in which flags and later values are those of the object."""
    view_as = keeping_views(PipelineOptions.view_as)
    one, other = PipelineOptions(["--direct_num_workers=2"]), PipelineOptions([])
    assert view_as(one, DirectOptions) is view_as(one, DirectOptions)
    assert (view_as(one, DirectOptions).direct_num_workers, view_as(other, DirectOptions).direct_num_workers) == (2, 1)
    view_as(view_as(one, StandardOptions), DirectOptions).direct_num_workers = 3
    assert view_as(one, DirectOptions).direct_num_workers == 3
    assert one.get_all_options()["direct_num_workers"] == 3
    assert view_as(other, DirectOptions).direct_num_workers == 1
    one._all_options = {"direct_num_workers": 4}
    assert view_as(one, DirectOptions).direct_num_workers == 4
