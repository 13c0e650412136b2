"""Pipelines that are quick to build in tests: Beam returns what it returns elsewhere."""

import inspect

import apache_beam as beam
from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions, StandardOptions
from apache_beam.typehints.decorators import get_signature

from tests.quick_pipelines import keeping_signatures, keeping_views


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


def test_signatures_are_those_that_beam_reads() -> None:
    """Methods of any object and class, functions and classes have their own signatures, the second time too."""
    kept = keeping_signatures(get_signature)
    functions = (_Adds(1).process, _Adds(2).process, _AddsTwice(1).process, _Adds.process, _Adds, str.upper, len)
    for _ in range(2):
        for function in functions:
            assert kept(function) == get_signature(function)
    assert inspect.signature(_Adds(1).process) != inspect.signature(_AddsTwice(1).process)


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
