"""The fused decision kernel, interpreted, against float64; its lowering; and what happens where it does not work.

No test runs the kernel on a GPU or TPU; `make accelerators` compiles it for both.
"""

import functools
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from calm_beam.arithmetic import DTYPES, FLOAT32, MATMUL_PRECISIONS, Arithmetic
from calm_beam.exits import decision, decision_kernel
from calm_beam.exits.decision import decide
from calm_beam.exits.decision_kernel import summarise
from calm_beam.exits.logit_summary import Summary
from calm_beam.exits.measures import measure_named
from calm_beam.exits.measures.softmax import SOFTMAX
from calm_beam.model import EarlyExitT5
from calm_beam.model.numerics import precision_of
from tests.builders import build_checkpoint, build_config
from tests.sampling import sampled

_PLATFORMS = ("tpu", "gpu")
# Each kernel, and weights stored either way.
_KERNELS = sampled(itertools.product(_PLATFORMS, (0, 1)), keep=(0, 3))
_HIGHEST = jax.lax.Precision.HIGHEST
# Compiled once a shape: Pallas takes long to interpret what is called step by step.
_interpreted: Any = functools.partial(
    jax.jit(summarise, static_argnames=("vocab_axis", "precision", "platform", "interpret")),
    precision=_HIGHEST,
    interpret=True,
)


def _draw(
    rows: int, width: int, vocab_size: int, vocab_axis: int, *, seed: int = 0, dtype: str = "float32"
) -> tuple[jax.Array, jax.Array]:
    generator = np.random.default_rng(seed)
    states = generator.standard_normal((rows, width))
    weights = generator.standard_normal((width, vocab_size)) * 3 / np.sqrt(width)
    return jnp.asarray(states, dtype), jnp.asarray(weights if vocab_axis else weights.T, dtype)


def _of_logits(logits: np.ndarray, platform: str) -> Summary:
    """Returns the kernel's summary of given finite logits, (rows, vocabulary)."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        return _interpreted(np.eye(len(logits), dtype=np.float32), logits, vocab_axis=1, platform=platform)


@pytest.fixture
def _unknown() -> Iterator[None]:
    """Nothing is known of the kernel, before and after."""
    decision._kernel_agrees.cache_clear()
    yield
    decision._kernel_agrees.cache_clear()


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch, _unknown: None) -> pytest.MonkeyPatch:
    """`decide` takes this machine for a GPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    # Still more than a block of each, and quick to interpret.
    monkeypatch.setattr(decision, "_PROBE_ROWS", (70, 130))
    monkeypatch.setattr(decision, "_PROBE_ENTRIES", 300)
    return monkeypatch


@pytest.mark.parametrize(("platform", "vocab_axis"), _KERNELS)
@pytest.mark.parametrize(
    ("rows", "width", "vocab_size"),
    [(1, 16, 64), (70, 48, 1300), (300, 33, 129), (16, 8, 2048), (5, 2, 1), (3, 8, 40000)],
)
@pytest.mark.parametrize("dtype", sampled(DTYPES, keep=(0,)))
def test_the_summary_is_that_of_sorted_float64_logits(
    platform: str, vocab_axis: int, rows: int, width: int, vocab_size: int, dtype: str
) -> None:
    """For sizes that fill blocks and that do not, weights stored either way, of either type, all numbers are right."""
    states, weights = _draw(rows, width, vocab_size, vocab_axis, dtype=dtype)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        made = _interpreted(states, weights, vocab_axis=vocab_axis, platform=platform)
    logits = np.asarray(states, np.float64) @ np.asarray(weights if vocab_axis else weights.T, np.float64)
    ordered = np.sort(logits)
    np.testing.assert_array_equal(made.token, logits.argmax(axis=1))
    np.testing.assert_allclose(made.largest, ordered[:, -1], atol=1e-5)
    np.testing.assert_allclose(made.second, ordered[:, -2] if vocab_size > 1 else np.full(rows, -np.inf), atol=1e-5)
    np.testing.assert_allclose(made.total, np.exp(scipy.special.logsumexp(logits, axis=1) - ordered[:, -1]), rtol=2e-5)
    below = logits - ordered[:, -1:]
    np.testing.assert_allclose(made.weighted, (np.exp(below) * below).sum(axis=1), rtol=2e-5, atol=1e-5)
    assert [values.dtype for values in made] == [np.float32, np.int32, np.float32, np.float32, np.float32]


@pytest.mark.parametrize("platform", _PLATFORMS)
def test_of_a_tie_the_first_is_taken_and_the_second_is_equal(platform: str) -> None:
    """Two largest logits, in a block or across blocks: the token is the first, the gap 0, and the sum counts both."""
    # None, and every pair of places at the ends of blocks.
    tied = [(), *itertools.combinations([0, 127, 128, 1024, 2499], 2), ()]
    logits = np.full((len(tied), 2500), -100, np.float32)
    for row, places in enumerate(tied):
        logits[row, list(places)] = 7.25
    made = _of_logits(logits, platform)
    assert made.token.tolist() == [places[0] if places else 0 for places in tied]
    assert made.largest.tolist() == made.second.tolist() == [7.25 if places else -100 for places in tied]
    assert made.total.tolist() == [2 if places else 2500 for places in tied]


@pytest.mark.parametrize("platform", _PLATFORMS)
def test_the_runner_up_is_found_wherever_it_stands(platform: str) -> None:
    """The second largest is right before and after the largest, near and far."""
    ordered = [*itertools.permutations([3, 200, 1400], 2)]
    logits = np.zeros((len(ordered), 2500), np.float32)
    for row, places in enumerate(ordered):
        logits[row, list(places)] = [9, 8]
    made = _of_logits(logits, platform)
    assert made.token.tolist() == [places[0] for places in ordered]
    assert set(made.largest.tolist()) == {9}
    assert set(made.second.tolist()) == {8}


@pytest.mark.parametrize(("platform", "vocab_axis"), _KERNELS)
@pytest.mark.parametrize("measure", sampled(["softmax", "softmax_max", "entropy", "state"], keep=(0, 2)))
def test_broken_logits_are_judged_as_by_the_plain_code(
    accelerator: pytest.MonkeyPatch, platform: str, measure: str, vocab_axis: int
) -> None:
    """NaN, inf and -inf, alone and together, in any block: token, confidence and finiteness are the plain code's."""
    accelerator.setattr(decision_kernel, "summarise", _interpreted)
    # Of width 1: the weights are the logits of the first row.
    columns = np.random.default_rng(0).standard_normal(2500).astype(np.float32)
    for broken in (
        {7: np.nan},
        {2400: np.nan},
        {7: np.inf},
        {2400: np.inf, 9: np.inf},
        {3: np.inf, 2400: np.nan},
        {2400: np.inf, 3: np.nan},
        {4: -np.inf, 2400: -np.inf},
        dict.fromkeys(range(2500), -np.inf),
        dict.fromkeys(range(1, 2500), -np.inf),
    ):
        values = columns.copy()
        values[list(broken)] = list(broken.values())
        weights = jnp.asarray(values[None] if vocab_axis else values[:, None])
        states = jnp.array([[1], [2]], jnp.float32)
        asked = states, weights, vocab_axis, measure_named(measure), FLOAT32
        made = decision._decide_fused(platform, *asked)
        expected = decision._decide_in_blocks(*asked)
        for got, wanted in zip(made, expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6, err_msg=str(broken)[:60])
        assert bool(made[2].all()) == (np.isfinite(values.max()))


@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize("rows", [16, 320])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tpu_kernel_lowers_without_a_tpu(vocab_axis: int, rows: int, dtype: str) -> None:
    """Mosaic accepts the kernel at the sizes of T5-large."""
    module = _exported("tpu", "tpu", vocab_axis, rows, dtype)
    assert "tpu_custom_call" in module


@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize("rows", [16, 320])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gpu_kernel_lowers_without_a_gpu(vocab_axis: int, rows: int, dtype: str) -> None:
    """Pallas makes Triton's language of the kernel at the sizes of T5-large; XLA compiles that on a GPU only."""
    module = _exported("gpu", "cuda", vocab_axis, rows, dtype)
    assert "__gpu$xla.gpu.triton" in module


@pytest.mark.parametrize("platform", _PLATFORMS)
@pytest.mark.parametrize("name", MATMUL_PRECISIONS)
def test_the_kernel_multiplies_in_the_precision_of_the_model(platform: str, name: str) -> None:
    """Of its only products: the highest excludes TF32 and bfloat16. Their sums are float32."""
    precision = precision_of(Arithmetic(matmul_precision=name))
    traced = jax.make_jaxpr(functools.partial(summarise, vocab_axis=1, precision=precision, platform=platform))(
        np.zeros((16, 64), np.float32), np.zeros((64, 500), np.float32)
    )
    assert str(traced).count("dot_general[") == 1
    assert str(traced).count("precision=(Precision.{0}, Precision.{0})".format(name.upper())) == 1
    assert str(traced).count("preferred_element_type=float32") == 1


@pytest.mark.parametrize("platform", _PLATFORMS)
def test_no_array_holds_the_logits(platform: str) -> None:
    """Outside the kernel, no array is of the size of rows times vocabulary."""
    rows, vocab_size = 512, 32128
    traced = jax.make_jaxpr(functools.partial(summarise, vocab_axis=1, precision=_HIGHEST, platform=platform))(
        np.zeros((rows, 16), np.float32), np.zeros((16, vocab_size), np.float32)
    )
    sizes = [variable.aval.size for equation in traced.jaxpr.eqns for variable in equation.outvars]
    assert max(sizes) < rows * vocab_size / 100


def _exported(platform: str, target: str, vocab_axis: int, rows: int, dtype: str) -> str:
    shape = (1024, 32128) if vocab_axis else (32128, 1024)
    exported = jax.export.export(
        jax.jit(functools.partial(summarise, vocab_axis=vocab_axis, precision=_HIGHEST, platform=platform)),
        platforms=[target],
        # The custom call may change between versions of XLA: nothing is kept here.
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")],
    )(jax.ShapeDtypeStruct((rows, 1024), dtype), jax.ShapeDtypeStruct(shape, dtype))
    return exported.mlir_module()


@pytest.mark.parametrize("tied_head", [True, False])
def test_decisions_of_a_model_are_the_same_with_the_kernel(
    accelerator: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tied_head: bool
) -> None:
    """Inside a jitted step, for tied and free heads: `decide` tries the kernel, uses it, and decides as before."""
    used = []

    def counted(*args: Any, **settings: Any) -> Summary:
        used.append(args[0].shape)
        return _interpreted(*args, **settings)

    accelerator.setattr(decision_kernel, "summarise", counted)
    config = build_config(tied_head=tied_head)
    parameters = {"params": build_checkpoint(config).parameters()}
    model = EarlyExitT5(config)
    states = np.random.default_rng(0).standard_normal((24, config.emb_dim)).astype(np.float32)

    @jax.jit
    def step(parameters: object, states: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        weights, vocab_axis = model.apply(parameters, 1, method="head_weights")
        inputs = model.apply(parameters, states, 1, method="head_inputs")
        return decide(inputs, weights, vocab_axis=vocab_axis, measure=SOFTMAX, arithmetic=FLOAT32)

    tokens, confidences, is_finite = step(parameters, states)
    probabilities = scipy.special.softmax(
        np.asarray(model.apply(parameters, states, 1, method="head"), np.float64), axis=1
    )
    ordered = np.sort(probabilities)
    assert used[-1] == (24, config.emb_dim)
    assert not caplog.records
    np.testing.assert_array_equal(tokens, probabilities.argmax(axis=1))
    np.testing.assert_allclose(confidences, ordered[:, -1] - ordered[:, -2], atol=1e-5)
    assert is_finite.all()


@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_a_kernel_that_does_not_compile_is_replaced_with_a_warning(
    accelerator: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, vocab_axis: int
) -> None:
    """Here, where Triton has no device: one warning that names the cause, and the plain code's decisions to the bit."""
    states, weights = _draw(8, 16, 64, vocab_axis)

    def decided(measure: str) -> tuple[jax.Array, ...]:
        settings: Any = {"vocab_axis": vocab_axis, "measure": measure_named(measure), "arithmetic": FLOAT32}
        return tuple(jax.jit(functools.partial(decide, **settings))(states, weights))

    with caplog.at_level(logging.WARNING):
        made = [decided(measure) for measure in ("softmax", "softmax_max")]
    (record,) = caplog.records
    assert "The decision kernel is not used on this gpu, for a head of width 16" in record.getMessage()
    assert "Only interpret mode is supported on CPU backend" in record.getMessage()
    accelerator.undo()
    for measure, values in zip(("softmax", "softmax_max"), made, strict=True):
        for got, expected in zip(values, decided(measure), strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("field", ["largest", "token", "second", "total", "weighted"])
def test_a_kernel_with_other_numbers_is_replaced_with_a_warning(
    accelerator: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    """An error of 1e-3 in any number, or of one token, is noticed, and the plain code decides."""

    def off(*args: Any, **settings: Any) -> Summary:
        made = _interpreted(*args, **settings)
        values = getattr(made, field)
        return made._replace(**{field: values + (1 if field == "token" else jnp.float32(1e-3))})

    accelerator.setattr(decision_kernel, "summarise", off)
    states, weights = _draw(8, 16, 64, 1)
    tokens, *_ = decide(states, weights, vocab_axis=1, measure=SOFTMAX, arithmetic=FLOAT32)
    assert "gives other numbers than the plain code" in " ".join(caplog.messages)
    assert "Not equal to tolerance" in " ".join(caplog.messages)
    np.testing.assert_array_equal(tokens, (states @ weights).argmax(axis=1))


@pytest.mark.usefixtures("_unknown")
def test_on_cpu_the_kernel_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocked code decides there without a look at the kernel."""
    monkeypatch.setattr(decision_kernel, "summarise", None)
    states, weights = _draw(8, 16, 64, 1)
    tokens, *_ = decide(states, weights, vocab_axis=1, measure=SOFTMAX, arithmetic=FLOAT32)
    np.testing.assert_array_equal(tokens, (states @ weights).argmax(axis=1))
    assert decision._kernel_agrees.cache_info().currsize == 0


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of rows and of the vocabulary change nothing, for weights stored either way."""
    states, weights = _draw(64, 16, 100, 1)
    whole = decide(states, weights, vocab_axis=1, measure=SOFTMAX, arithmetic=FLOAT32)
    monkeypatch.setattr(decision, "_ROWS", 8)
    monkeypatch.setattr(decision, "_ENTRIES", 40)
    for values, axis in ((weights, 1), (weights.T, 0)):
        parts = decide(states, values, vocab_axis=axis, measure=SOFTMAX, arithmetic=FLOAT32)
        np.testing.assert_array_equal(parts[0], whole[0])
        np.testing.assert_allclose(parts[1], whole[1], atol=1e-6)
        assert parts[2].all()
