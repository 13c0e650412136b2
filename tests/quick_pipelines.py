"""Builds pipelines in half the time: Beam reads each method, and each kind of flags, once.

Beam reads the signatures of all methods of a DoFn several times a step, and makes a parser of flags for every view of a
pipeline's options, of which each step takes several. For tiny data that is most of a pipeline's time.
"""

import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

_has_built_quickly: list[bool] = []


def build_quickly() -> None:
    """Has Beam keep signatures and views of options, once it is imported; what it returns is the same."""
    if _has_built_quickly or not {"apache_beam.options.pipeline_options", "apache_beam.transforms.core"} <= set(
        sys.modules
    ):
        return
    _has_built_quickly.append(True)
    core: Any = sys.modules["apache_beam.transforms.core"]
    options: Any = sys.modules["apache_beam.options.pipeline_options"].PipelineOptions
    core.get_signature = keeping_signatures(core.get_signature)
    options.view_as = keeping_views(options.view_as)


def keeping_signatures(read: Callable[[Any], inspect.Signature]) -> Callable[[Any], inspect.Signature]:
    """Returns a function that reads the signature of each method once, for all objects; others it reads every time."""
    kept: weakref.WeakKeyDictionary[types.FunctionType, inspect.Signature] = weakref.WeakKeyDictionary()

    @functools.wraps(read)
    def get_signature(function: Any) -> inspect.Signature:
        plain = getattr(function, "__func__", None)
        if not inspect.ismethod(function) or not isinstance(plain, types.FunctionType):
            return read(function)
        if plain not in kept:
            kept[plain] = read(function)
        return kept[plain]

    return get_signature


def keeping_views(view: Callable[[Any, type], Any]) -> Callable[[Any, type], Any]:
    """Returns a method of options that makes each view of them once; all share the values of the options."""
    kept: weakref.WeakKeyDictionary[Any, dict[type, Any]] = weakref.WeakKeyDictionary()

    @functools.wraps(view)
    def view_as(options: Any, kind: type) -> Any:
        views = kept.setdefault(options, {})
        found = views.get(kind)
        # Values that were replaced as a whole are no longer shared.
        if found is None or found._all_options is not options._all_options or found._flags is not options._flags:
            found = views[kind] = view(options, kind)
        return found

    return view_as
