"""Packed outputs read back."""

import json

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calm_beam.report.examples import Dictionary, pack_outputs
from tests.calm_beam.report.builders import build_output, random_generations
from tests.calm_beam.report.unpacking import unpack_outputs

# Busy machines draw slowly.
_FEW = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
_TOKENS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3), st.sampled_from([0.0, 0.25, 0.5, 1.0])), max_size=8)


@_FEW
@given(st.lists(_TOKENS, min_size=1, max_size=6))
def test_what_is_packed_comes_back(outputs: list[list[tuple[int, int, float]]]) -> None:
    """Tokens, layers and confidences of any outputs read back from JSON, in order."""
    dictionary = Dictionary()
    built = [build_output(*zip(*output, strict=True)) if output else build_output((), ()) for output in outputs]
    packed = json.loads(json.dumps(pack_outputs(built, dictionary)))
    assert unpack_outputs(packed, dictionary.tokens()) == [
        (list(output.tokens), list(output.exit_layers), list(output.confidences)) for output in built
    ]


@_FEW
@given(st.floats(-1, 1, width=32))
def test_confidences_are_rounded_down(confidence: float) -> None:
    """A shown confidence is less than a thousandth below the real one, and above it by float32 rounding at most."""
    packed = pack_outputs([build_output((5,), (1,), (confidence,))], Dictionary())
    ((_, _, (shown,)),) = unpack_outputs(packed, (5,))
    assert shown - 1e-6 <= confidence + 1e-6
    assert confidence < shown + 0.001


def test_thresholds_are_shown_as_they_are() -> None:
    """A confidence equal to a threshold's float32 is shown as the threshold, though it may be just below it."""
    thresholds = [index / 100 for index in range(101)]
    output = build_output(range(2, 103), [1] * 101, [float(np.float32(threshold)) for threshold in thresholds])
    dictionary = Dictionary()
    ((_, _, shown),) = unpack_outputs(pack_outputs([output], dictionary), dictionary.tokens())
    assert shown == thresholds


def test_confidences_beyond_the_ends() -> None:
    """A cosine that rounding took out of [-1, 1] is shown as 1 or -1."""
    output = build_output((2, 3), (1, 1), (1.0000001, -1.0000001))
    ((_, _, shown),) = unpack_outputs(pack_outputs([output], Dictionary()), (2, 3))
    assert shown == [1.0, -1.0]


def test_deep_models() -> None:
    """Layers beyond the 64 digits have a character too."""
    layers = [1, 63, 64, 65, 200]
    packed = json.loads(json.dumps(pack_outputs([build_output(range(5), layers)], Dictionary())))
    assert unpack_outputs(packed, range(5))[0][1] == layers


def test_equal_outputs_cost_one_character() -> None:
    """An output that equals its neighbour is a 0; one changed token costs its own length, wherever it is."""
    one = build_output([*range(2, 40)], [4] * 38)
    other = build_output([*range(2, 20), 99, *range(21, 40)], [4] * 18 + [2] + [4] * 19)
    packed = pack_outputs([one, one, other], Dictionary())
    assert packed[1:] == [0, [[18, 19, [38]], [18, 19, "2NS"]]]
    assert unpack_outputs(packed, range(2, 99))[2][2] == [0.5] * 38


def test_the_dictionary_is_shared() -> None:
    """Examples packed later use the dictionary entries of earlier ones."""
    dictionary = Dictionary()
    generations = random_generations(20)
    packed = [pack_outputs(item.outputs, dictionary) for item in generations]
    tokens = dictionary.tokens()
    assert len(set(tokens)) == len(tokens)
    for item, values in zip(generations, packed, strict=True):
        found = unpack_outputs(values, tokens)
        assert [output[0] for output in found] == [list(output.tokens) for output in item.outputs]
