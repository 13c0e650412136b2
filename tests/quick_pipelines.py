"""Builds pipelines in half the time: Beam reads each method, each DoFn, and each kind of flags, once.

Beam reads the signatures of all methods of a DoFn several times a step, and makes a parser of flags for every view of a
pipeline's options, of which each step takes several. For the size of every side input that it caches it looks at each
module that is loaded. For tiny data that is most of a pipeline's time.
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
    """Has Beam keep signatures, specs and views of options, once it is imported; what it returns is the same."""
    beam = ("apache_beam.options.pipeline_options", "apache_beam.transforms.core", "apache_beam.transforms.userstate")
    if _has_built_quickly or not {*beam, "objsize"} <= set(sys.modules):
        return
    _has_built_quickly.append(True)
    core: Any = sys.modules["apache_beam.transforms.core"]
    options: Any = sys.modules["apache_beam.options.pipeline_options"].PipelineOptions
    states: Any = sys.modules["apache_beam.transforms.userstate"]
    core.get_signature = keeping_signatures(core.get_signature)
    options.view_as = keeping_views(options.view_as)
    states.get_dofn_specs = keeping_specs(states.get_dofn_specs)
    # Without the variables of all modules, to which no cached value leads but through functions, which Beam leaves out.
    objects: Any = sys.modules["objsize"]
    objects.get_deep_size = functools.partial(objects.get_deep_size, exclude_modules_globals=False)


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


def keeping_specs(read: Callable[[Any], tuple[set[Any], set[Any]]]) -> Callable[[Any], tuple[set[Any], set[Any]]]:
    """Returns a function that reads the states and timers of each class of DoFns once, unless an object has methods."""
    kept: weakref.WeakKeyDictionary[type, tuple[set[Any], set[Any]]] = weakref.WeakKeyDictionary()

    @functools.wraps(read)
    def get_dofn_specs(dofn: Any) -> tuple[set[Any], set[Any]]:
        if any(isinstance(value, types.MethodType) for value in vars(dofn).values()):
            return read(dofn)
        kind = type(dofn)
        if kind not in kept:
            kept[kind] = read(dofn)
        states, timers = kept[kind]
        return set(states), set(timers)

    return get_dofn_specs


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
