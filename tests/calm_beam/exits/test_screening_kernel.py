"""The kernel that bounds logits on accelerators, interpreted, against the plain code; its lowering; and doing without.

No test runs it on a GPU or TPU; `make accelerators` compiles it for both.
"""

import functools
import logging
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_beam.exits import screening, screening_kernel
from calm_beam.exits.certified_head import certify
from calm_beam.exits.measures import measure_named
from calm_beam.exits.quantised_head import CertifiedHead, quantised_head
from calm_beam.exits.quantised_states import quantised_states
from calm_beam.exits.screening import BlockBounds
from calm_beam.exits.screening_kernel import block_bounds

_PLATFORMS = ("tpu", "gpu")
# Compiled once a shape: Pallas takes long to interpret what is called step by step.
_interpreted: Any = functools.partial(jax.jit(block_bounds, static_argnames=("platform", "interpret")), interpret=True)


def _head(vocab_size: int, width: int, *, columns: int = 0, seed: int = 0) -> CertifiedHead:
    """Returns a head of which some columns stand out."""
    weights = np.random.default_rng(seed).standard_normal((vocab_size, width)) / np.sqrt(width)
    weights[:, :columns] *= 50
    return quantised_head(jnp.asarray(weights, jnp.float32), "bfloat16")


def _states(rows: int, width: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).standard_normal((rows, width)), jnp.float32)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """This machine is taken for a GPU, of whose kernel nothing is known, before and after."""
    screening._kernel_agrees.cache_clear()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    # Still more than a tile of each, and quick to interpret.
    monkeypatch.setattr(screening, "_PROBE_ROWS", (5, 40, 70))
    monkeypatch.setattr(screening, "_PROBE_ENTRIES", 16 * 70)
    yield monkeypatch
    screening._kernel_agrees.cache_clear()


@pytest.mark.parametrize("platform", _PLATFORMS)
@pytest.mark.parametrize(
    ("rows", "width", "vocab_size", "columns", "parts"),
    [(1, 16, 64, 0, 2), (70, 48, 1300, 3, 1), (300, 33, 129, 0, 1), (16, 200, 2048, 16, 2), (5, 8, 40_000, 1, 1)],
)
def test_bounds_are_the_plain_codes(
    platform: str, rows: int, width: int, vocab_size: int, columns: int, parts: int
) -> None:
    """For sizes that fill tiles and that do not, with columns that are kept in float32 and without."""
    head = _head(vocab_size, width, columns=columns)
    assert len(head.kept) == columns
    coarse = quantised_states(_states(rows, width), head, parts=parts)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        made = _interpreted(coarse, head, platform=platform)
    for values, expected in zip(made, screening._plain_bounds(coarse, head), strict=True):
        np.testing.assert_allclose(values, expected, rtol=2e-5, atol=2e-5)
    assert (np.asarray(made.upper) == -np.inf).sum() == rows * (-vocab_size % 16)


@pytest.mark.parametrize("platform", _PLATFORMS)
def test_what_is_no_number_is_bounded_by_nothing(platform: str) -> None:
    """A state that is NaN, or zeros alone, has infinite bounds; other rows keep theirs."""
    head = _head(200, 16)
    states = _states(4, 16).at[1, 3].set(jnp.nan).at[2].set(0)
    made = _interpreted(quantised_states(states, head, parts=1), head, platform=platform)
    whole = _interpreted(quantised_states(_states(4, 16), head, parts=1), head, platform=platform)
    real = np.asarray(head.errors).reshape(16, -1) > -np.inf
    assert (np.asarray(made.upper)[1:3][:, real] == np.inf).all()
    for values, expected in zip(made, whole, strict=True):
        np.testing.assert_array_equal(values[0], expected[0])
        np.testing.assert_array_equal(values[3], expected[3])


@pytest.mark.parametrize("measure", ["softmax", "softmax_max", "entropy", "state"])
def test_certificates_by_the_kernel_hold(accelerator: pytest.MonkeyPatch, measure: str) -> None:
    """Inside a compiled step the kernel is compared, taken, and proves what is so, nearly as tightly."""
    used = []

    def counted(*arguments: Any, **options: Any) -> BlockBounds:
        used.append(arguments)
        return _interpreted(*arguments, **options)

    accelerator.setattr(screening_kernel, "block_bounds", counted)
    head, states = _head(1300, 48, columns=3), 6 * _states(40, 48)
    certified = jax.jit(functools.partial(certify, measure=measure_named(measure)))
    made = certified(states, head)
    assert len(used) > len(screening._PROBE_ROWS)
    accelerator.undo()
    jax.clear_caches()
    plain = certified(states, head)
    logits = np.asarray(states, np.float64) @ np.asarray(head.weights, np.float64).T
    assert np.asarray(made.is_certain).mean() > 0.9
    is_certain = np.asarray(made.is_certain)
    np.testing.assert_array_equal(np.asarray(made.token)[is_certain], logits.argmax(axis=1)[is_certain])
    np.testing.assert_allclose(made.low, plain.low, atol=1e-4)
    np.testing.assert_allclose(made.high, plain.high, atol=1e-4)
    if measure == "state":
        return
    exact = np.asarray(measure_named(measure).confidence(jnp.asarray(logits, jnp.float32)))
    assert (np.asarray(made.low)[is_certain] <= exact[is_certain] + 1e-6).all()
    assert (exact[is_certain] <= np.asarray(made.high)[is_certain] + 1e-6).all()


@pytest.mark.parametrize("field", [None, *BlockBounds._fields])
def test_a_kernel_that_fails_or_is_wrong_is_replaced_with_a_warning(
    accelerator: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, field: str | None
) -> None:
    """One warning that names the cause, and the plain code's certificates to the bit."""

    def off(*arguments: Any, **options: Any) -> BlockBounds:
        assert field is not None, "no device"
        made = _interpreted(*arguments, **options)
        return made._replace(**{field: getattr(made, field) + jnp.float32(0.1)})

    accelerator.setattr(screening_kernel, "block_bounds", off)
    head, states = _head(1300, 48), _states(9, 48)
    certified = functools.partial(certify, measure=measure_named("softmax"))
    with caplog.at_level(logging.WARNING):
        made = [jax.jit(certified)(states, head) for _ in range(2)][-1]
    (record,) = caplog.records
    assert "The kernel of certified heads is not used on this gpu, for a head of width 48" in record.getMessage()
    assert ("no device" if field is None else "Not equal to tolerance") in record.getMessage()
    accelerator.undo()
    jax.clear_caches()
    for values, expected in zip(made, jax.jit(certified)(states, head), strict=True):
        np.testing.assert_array_equal(values, expected)


def test_on_cpu_the_kernel_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain code bounds logits there without a look at it."""
    screening._kernel_agrees.cache_clear()
    monkeypatch.setattr(screening_kernel, "block_bounds", None)
    certify(_states(3, 16), _head(200, 16), measure=measure_named("softmax"))
    assert screening._kernel_agrees.cache_info().currsize == 0


@pytest.mark.parametrize(("platform", "target", "call"), [("tpu", "tpu", "tpu_custom_call"), ("gpu", "cuda", "triton")])
@pytest.mark.parametrize(("rows", "parts", "columns"), [(8, 2, 16), (256, 1, 0)])
def test_it_lowers_without_a_device(platform: str, target: str, call: str, rows: int, parts: int, columns: int) -> None:
    """Mosaic accepts it at the sizes of T5-large, and Pallas makes Triton's language of it."""
    vocab_size, width = 32_128, 1024
    shape: Any = jax.ShapeDtypeStruct
    number = jnp.float32
    head = CertifiedHead(
        weights=shape((vocab_size, width), number),
        quantised=shape((vocab_size, width), jnp.bfloat16),
        **{name: shape((vocab_size,), number) for name in ("scales", "errors", "norms", "kept_norms")},
        kept=shape((columns,), jnp.int32),
        kept_weights=shape((columns, vocab_size), number),
    )

    def bounds(states: jax.Array, head: CertifiedHead) -> BlockBounds:
        return block_bounds(quantised_states(states, head, parts=parts), head, platform=platform)

    exported = jax.export.export(
        jax.jit(bounds),
        platforms=[target],
        # The custom call may change between versions of XLA: nothing is kept here.
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")],
    )(shape((rows, width), number), head)
    assert call in exported.mlir_module()
