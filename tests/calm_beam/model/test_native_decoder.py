"""Decoder layers and whole steps in native code, against XLA and against one row at a time."""

import dataclasses
import functools
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_beam.decoding.xla import steps as device_steps
from calm_beam.decoding.xla.steps import LayerRows
from calm_beam.decoding.xla.tiles import grouped, source_positions
from calm_beam.exits.measures import MEASURES, Need
from calm_beam.model import T5Config, architecture_of, native_decoder, network_of, parameter_shapes
from calm_beam.model.interface import of_layer
from calm_beam.model.llama import LlamaConfig, RopeScaling
from calm_beam.model.native import library
from calm_beam.model.native_decoder import NativeDecoder
from calm_beam.precision import FLOAT32, Precision
from tests.builders import build_arrays, build_config, checkpoint_of
from tests.calm_beam.model.llama.builders import build_llama_arrays, build_llama_config

pytestmark = pytest.mark.usefixtures("instruction_set")

_OF_LOGITS = [name for name in library.MEASURES if MEASURES[name].needs is Need.LOGITS]
_ROWS, _RANKS, _SOURCE, _STEPS, _LAYER = 96, 8, 9, 24, 2
_NODES = 3 * _ROWS
_KINDS: dict[str, T5Config | LlamaConfig] = {
    "t5": build_config(),
    "original t5": build_config(gated_mlp=False, activation="relu", tied_head=True, relative_bias_per_layer=True),
    "odd t5": build_config(emb_dim=20, num_heads=3, head_dim=5, mlp_dim=70, activation="silu", vocab_size=77),
    # Large enough for threads to share its weights by columns.
    "wide t5": build_config(emb_dim=256, num_heads=4, head_dim=64, mlp_dim=512),
    "llama": build_llama_config(),
    "mistral": build_llama_config(sliding_window=7, windowed_layers=(0, 1)),
    "qwen2": build_llama_config(attention_bias=True),
    "qwen3": build_llama_config(query_key_norms=True),
    "gemma": build_llama_config(unit_offset_norms=True, scaled_embedding=True, activation="gelu", tied_head=True),
    "granite": build_llama_config(embedding_factor=3.0, query_factor=0.3, logits_divisor=2.0, tied_head=True),
    "phi3": build_llama_config(
        rope_scaling=RopeScaling(
            kind="longrope", original_max_positions=64, pair_factors=(1.0, 1.5, 3.0), attention_factor=1.3
        )
    ),
    "wide llama": build_llama_config(emb_dim=256, num_heads=8, num_kv_heads=2, head_dim=32, mlp_dim=512),
}


@dataclasses.dataclass(frozen=True)
class _Case:
    """A layer of a model, and rows of it."""

    model: Any
    tree: Any
    decoder: NativeDecoder
    states: np.ndarray
    stores: tuple[np.ndarray, ...]
    source: tuple[np.ndarray, ...]
    mask: np.ndarray
    terms: Any
    by_row: dict[str, np.ndarray]
    paths: np.ndarray
    lengths: np.ndarray

    def changed(self, **arrays: Any) -> "_Case":
        return dataclasses.replace(self, **arrays)


def _case(kind: str, *, scale_of_queries: float = 1.0) -> _Case:
    config, generator = _KINDS[kind], np.random.default_rng(4)
    arrays = build_arrays(config, 0) if isinstance(config, T5Config) else build_llama_arrays(config, 0)
    for name in arrays:
        if name.endswith("/query/kernel"):
            arrays[name] = arrays[name] * np.float32(scale_of_queries)
    model = network_of(config)
    tree = checkpoint_of(config, arrays).parameters()
    terms = model.apply({"params": tree}, _STEPS, method="path_terms")
    inner, places = config.num_kv_heads * config.head_dim, _ROWS // _RANKS

    def normal(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape).astype(np.float32)

    stores = normal(_NODES, inner), normal(_NODES, inner)
    steps = generator.integers(0, _STEPS, _ROWS)
    paths = generator.integers(0, _ROWS - 1, (_ROWS, _STEPS))
    nodes = _ROWS + generator.permutation(_NODES - _ROWS)[:_ROWS]
    branches, below = (generator.permutation(_ROWS) for _ in range(2))
    paths[branches, steps] = nodes
    # Entries later in a path, before what is seen of it, or behind a source, may be anything.
    paths[branches[:, None], np.arange(_STEPS)] = np.where(
        np.arange(_STEPS) <= steps[:, None], paths[branches], np.int64(_ROWS - 1)
    )
    source = tuple(normal(places, _SOURCE, config.num_kv_heads, config.head_dim) for _ in range(2))
    lengths = generator.integers(1, _SOURCE + 1, places)
    mask = np.arange(_SOURCE) < lengths[:, None]
    for values in stores:
        values[_ROWS - 1] = np.nan
    for values in source:
        values[~mask] = np.nan
    prompts = np.repeat(np.arange(places), _RANKS)
    return _Case(
        model,
        tree,
        architecture_of(config).native_decoder(config, tree, terms=terms),
        normal(config.num_decoder_layers + 1, _ROWS, config.emb_dim),
        stores,
        source,
        mask,
        of_layer(terms, _LAYER),
        {
            "below": below,
            "branches": branches,
            "nodes": nodes,
            "steps": steps,
            "prompts": prompts,
            "positions": lengths[prompts] - 1 + steps,
            "places": prompts,
        },
        paths.astype(np.int32),
        lengths,
    )


def _turns(case: _Case) -> np.ndarray | None:
    """Returns those of every entry's position: each is a prompt of its own to native code."""
    return case.decoder.turns(case.by_row["positions"][np.argsort(case.by_row["branches"])])


def _stack(case: _Case, states: np.ndarray, stores: Sequence[Any], *, layers: Sequence[int]) -> library.Stack:
    """Returns layers that read and write states, (layers + 1, entries, width), and a store each."""
    source_keys, source_values = case.source
    source = library.Sources(source_keys.ctypes.data, source_values.ctypes.data, case.mask.ctypes.data, _SOURCE)
    # By prompt, which is by entry here.
    entries = np.argsort(case.by_row["branches"])
    by_prompt: dict[str, Any] = {
        name: case.by_row[name][entries].astype(np.int32) for name in ("steps", "positions", "places")
    }
    by_prompt["source_of"] = np.zeros(_ROWS, np.int32)
    stack = library.Stack(
        [case.decoder.layers[layer - 1] for layer in layers],
        [
            library.entries_of(
                inputs=states[index],
                outputs=states[index + 1],
                store=store,
                paths=case.paths,
                prompt_branches=1,
                **by_prompt,
            )
            for index, store in enumerate(stores)
        ],
    )
    stack.set_sources([(library.Sources * 1)(source)] * len(layers))
    if (turns := _turns(case)) is not None:
        stack.set_turns(turns)
    return stack


def _by_native_code(case: _Case, rows: Any = slice(None)) -> list[np.ndarray]:
    """Returns the outputs of rows of a layer, and their keys and values."""
    states, (keys, values) = case.states.copy(), [store.copy() for store in case.stores]
    by_row = {name: of_all[rows] for name, of_all in case.by_row.items()}
    stack = _stack(case, states[_LAYER - 1 :], [(keys, values)], layers=[_LAYER])
    stack.run(range(1), **{name: by_row[name] for name in ("below", "branches", "nodes")})
    return [states[_LAYER, by_row["branches"]], keys[by_row["nodes"]], values[by_row["nodes"]]]


def _by_xla(case: _Case) -> list[np.ndarray]:
    """Returns the same for all rows."""
    by_row = {name: values.astype(np.int32) for name, values in case.by_row.items()}
    behind = source_positions(_SOURCE) - _SOURCE
    mask = np.pad(case.mask, ((0, 0), (0, behind)))
    # [places, positions, heads, size] -> [places, heads, positions, size]
    source = (np.swapaxes(np.where(case.mask[:, :, None, None], values, np.float32(0)), 1, 2) for values in case.source)
    states, cache, _ = device_steps.run_layer(
        case.model,
        (),
        parameters={"layer": case.tree["decoder"][f"layers_{_LAYER - 1}"]},
        states=jnp.array(case.states),
        cache=tuple(map(jnp.array, case.stores)),
        keys_values=tuple(jnp.pad(values, ((0, 0), (0, 0), (0, behind), (0, 0))) for values in source),
        source_mask=jnp.array(mask),
        terms=case.terms,
        layer=np.int32(_LAYER),
        rows=LayerRows(
            below=by_row["below"],
            branches=by_row["branches"],
            nodes=by_row["nodes"],
            paths=case.paths[by_row["branches"]],
            steps=by_row["steps"],
            prompt_lengths=case.lengths[by_row["prompts"]].astype(np.int32),
            **grouped(by_row["places"], _ROWS),
        ).joined(),
    )
    return [np.asarray(states)[_LAYER, by_row["branches"]], *(np.asarray(each)[by_row["nodes"]] for each in cache)]


@pytest.mark.parametrize("kind", _KINDS)
def test_a_layer_is_xlas(kind: str) -> None:
    """For every architecture a layer gives XLA's results; values that no row attends to may be anything."""
    case = _case(kind)
    for found, expected in zip(_by_native_code(case), _by_xla(case), strict=True):
        assert np.isfinite(expected).all()
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("rows", [0, 1, 7, _ROWS])
def test_layers_one_after_the_other_are_those_layers_in_one_call(kind: str, rows: int) -> None:
    """Several layers in one call give the bits of single calls, whether threads share rows or columns."""
    case = _case(kind)
    layers = range(case.model.config.num_decoder_layers)
    found = []
    for calls_of in ([layers], [range(layer, layer + 1) for layer in layers]):
        states = case.states.copy()
        stores = [[store.copy() for store in case.stores] for _ in layers]
        stack = _stack(case, states, stores, layers=[layer + 1 for layer in layers])
        below, branches, nodes = (case.by_row[name][:rows] for name in ("below", "branches", "nodes"))
        for each in calls_of:
            stack.run(each, below=below if not each.start else branches, branches=branches, nodes=nodes)
        found.append([states, *itertools.chain.from_iterable(stores)])
    for together, apart, before in zip(*found, [case.states, *case.stores * len(layers)], strict=True):
        np.testing.assert_array_equal(together, apart)
        assert np.array_equal(together, before, equal_nan=True) == (rows == 0)


class _Made(NamedTuple):
    """The results of a step for rows, each of shape (rows,)."""

    tokens: np.ndarray
    exit_layers: np.ndarray
    confidences: np.ndarray
    max_rejected_confidence: np.ndarray
    is_finite: np.ndarray

    @classmethod
    def none(cls) -> "_Made":
        numbers, confidences = (np.zeros(_ROWS, dtype) for dtype in (np.int32, np.float32))
        return cls(numbers, numbers.copy(), confidences, np.full(_ROWS, -np.inf, np.float32), np.zeros(_ROWS, bool))


class _Step(NamedTuple):
    """The input of a step: rows, and the heads that it calls."""

    heads: list[library.Head | None]
    measure: library.Measure
    thresholds: np.ndarray
    known_exits: np.ndarray | None


def _measure(case: _Case, name: str, *, vocab_size: int) -> library.Measure:
    generator, config = np.random.default_rng(2), case.model.config
    made = library.measure_of(
        name,
        vocab_size=vocab_size,
        classifier=(generator.standard_normal((config.emb_dim, 2)), generator.standard_normal(2)),
        by_layer=np.linspace(0.1, 0.4, config.num_decoder_layers).tolist(),
    )
    assert made is not None
    return made


def _step_of(case: _Case, measure: str, *, has_known: bool) -> _Step:
    """Returns a step without an exit at layer 2; a row in four is of the full model, and some exit anywhere."""
    generator, depth = np.random.default_rng(1), case.model.config.num_decoder_layers
    width, vocab_size = case.model.config.emb_dim, 500
    heads = [
        None if layer == 2 else case.decoder.head(layer, (generator.standard_normal((width, vocab_size)), 1))
        for layer in range(1, depth + 1)
    ]
    thresholds = generator.uniform(0, 0.5, _ROWS).astype(np.float32)
    thresholds[::4] = np.inf
    thresholds[1::8] = 0
    known = np.where(np.arange(_ROWS) % 3, 0, generator.choice([1, depth], _ROWS)).astype(np.int32)
    made_by = _measure(case, measure, vocab_size=vocab_size)
    return _Step(heads, made_by, thresholds, known if has_known else None)


def _row_by_row(
    case: _Case, step: _Step, stack: library.Stack, states: np.ndarray, rows: int, *, is_of_logits: bool
) -> tuple[_Made, int]:
    """Returns the results of a step with each row run alone through single layers, and its number of head calls."""
    made, asked, depth = _Made.none(), 0, len(step.heads)
    for branch, node in zip(*(case.by_row[name][:rows] for name in ("branches", "nodes")), strict=True):
        branches, nodes = np.array([branch]), np.array([node])
        known, threshold = 0 if step.known_exits is None else step.known_exits[branch], step.thresholds[branch]
        for layer, head in enumerate(step.heads, start=1):
            stack.run(range(layer - 1, layer), below=branches, branches=branches, nodes=nodes)
            if head is None:
                continue
            ask = functools.partial(library.summarise, head, states=states[layer], entries=branches)
            token, largest, confidence = 0, np.float32(np.nan), np.float32(-np.inf)
            if not is_of_logits:
                found = library.measure_states(
                    step.measure, range(layer, layer + 1), states=states, below=branches, branches=branches
                )
                confidence = found[0, 0]
            elif not known and (layer == depth or np.isfinite(threshold)):
                tokens, facts = ask(measure=step.measure)
                token, largest, confidence, asked = tokens[0], facts[0, 0], facts[4, 0], asked + 1
            if not (known == layer if known else layer == depth or confidence >= threshold):
                made.max_rejected_confidence[branch] = np.fmax(made.max_rejected_confidence[branch], confidence)
                continue
            if not is_of_logits and not known:
                tokens, facts = ask()
                token, largest, asked = tokens[0], facts[0, 0], asked + 1
            made.tokens[branch], made.exit_layers[branch], made.confidences[branch] = token, layer, confidence
            made.is_finite[branch] = np.isfinite([largest, confidence]).all()
            break
    return made, asked


@pytest.mark.parametrize("kind", ["t5", "odd t5", "wide t5", "llama"])
@pytest.mark.parametrize("measure", library.MEASURES)
@pytest.mark.parametrize("rows", [0, 1, 7, _ROWS])
@pytest.mark.parametrize("has_known", [False, True])
def test_a_whole_step_is_its_layers_and_heads(
    kind: str, measure: str, rows: int, has_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole step gives the bits of its layers and heads, and neither calls nor writes more."""
    monkeypatch.setattr(library, "threads", lambda: 3)
    case = _case(kind)
    step = _step_of(case, measure, has_known=has_known)
    case.states[0, case.by_row["branches"][2]] = np.nan
    found = []
    for is_whole in (True, False):
        states = case.states.copy()
        stores = [[store.copy() for store in case.stores] for _ in step.heads]
        stack = _stack(case, states, stores, layers=range(1, len(step.heads) + 1))
        if is_whole:
            made = _Made.none()
            branches, nodes = (case.by_row[name][:rows] for name in ("branches", "nodes"))
            asked = stack.run_step(**step._asdict(), branches=branches, nodes=nodes, new=made._asdict())
        else:
            made, asked = _row_by_row(case, step, stack, states, rows, is_of_logits=measure in _OF_LOGITS)
        found.append([np.array(asked), *made, states, *itertools.chain.from_iterable(stores)])
    for together, apart in zip(*found, strict=True):
        np.testing.assert_array_equal(together, apart)
    exits = found[0][2][case.by_row["branches"][:rows]]
    assert exits.all()
    if rows == _ROWS:
        assert set(exits.tolist()) >= {1, len(step.heads)}
        assert not found[0][5].all()


@pytest.mark.parametrize("kind", ["t5", "llama"])
@pytest.mark.parametrize("scale", [100.0, 1e6])
def test_large_logits(kind: str, scale: float) -> None:
    """For any logits, exponentials are taken of differences to the largest."""
    case = _case(kind, scale_of_queries=scale)
    for found, expected in zip(_by_native_code(case), _by_xla(case), strict=True):
        assert np.isfinite(expected).all()
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-3)


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_enormous_logits(kind: str) -> None:
    """Among logits beyond those that XLA's masks hide, the largest still gets all the weight."""
    for found in _by_native_code(_case(kind, scale_of_queries=1e20)):
        assert np.isfinite(found).all()


@pytest.mark.parametrize("kind", ["t5", "odd t5", "wide t5", "llama", "wide llama"])
def test_a_row_has_its_bits_in_any_company(kind: str) -> None:
    """A row gives the same bits in any batch, whether threads share rows or columns."""
    case = _case(kind)
    many = _by_native_code(case)
    for rows in (slice(0, 1), slice(5, 9), slice(20, 33), slice(10, 77)):
        for one, other in zip(_by_native_code(case, rows), many, strict=True):
            np.testing.assert_array_equal(one, other[rows])


@pytest.mark.parametrize("kind", ["t5", "llama"])
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_what_is_no_number_is_not_hidden(kind: str, broken: float) -> None:
    """A state that is not finite gives such an output, and changes no other row."""
    case = _case(kind)
    states = case.states.copy()
    states[_LAYER - 1, case.by_row["below"][7], 3] = broken
    found = _by_native_code(case.changed(states=states))
    is_finite = np.isfinite(found[0]).all(axis=1)
    assert np.flatnonzero(~is_finite).tolist() == [7]
    expected = _by_native_code(case)
    np.testing.assert_array_equal(found[0][is_finite], expected[0][is_finite])
    # In a key or value that a row attends to, too.
    seen = case.stores[1].copy()
    node = case.paths[case.by_row["branches"][7], max(0, case.by_row["steps"][7] - 1)]
    assert node < _ROWS, "of another token than the row's own"
    seen[node] = broken
    found = _by_native_code(case.changed(stores=(case.stores[0], seen)))
    assert not np.isfinite(found[0][7]).all()


@pytest.mark.parametrize("kind", _KINDS)
def test_skipped_layers_keep_what_they_would_make(kind: str) -> None:
    """Keys and values of propagated states have the bits that the layer itself gives its inputs."""
    case = _case(kind)
    by_row = case.by_row
    _, *expected = _by_native_code(case)
    stores = [store.copy() for store in case.stores]
    other = [store.copy() for store in case.stores]
    is_skipped = np.arange(_ROWS) % 3 > 0
    nodes = np.stack([np.where(is_skipped, by_row["nodes"], _NODES), np.full(_ROWS, _NODES)])
    stack = _stack(case, np.zeros_like(case.states), [stores, other], layers=[_LAYER] * 2)
    stack.keep_skipped(
        range(2),
        capacity=_NODES,
        states=case.states,
        which=(_LAYER - 1) * _ROWS + by_row["below"],
        nodes=nodes,
        branches=by_row["branches"],
    )
    for found, before, made, untouched in zip(stores, case.stores, expected, other, strict=True):
        np.testing.assert_array_equal(found[by_row["nodes"][is_skipped]], made[is_skipped])
        found[by_row["nodes"][is_skipped]] = before[by_row["nodes"][is_skipped]]
        np.testing.assert_array_equal(found, before)
        np.testing.assert_array_equal(untouched, before)


def _several_at_once(run: Callable[[], Sequence[np.ndarray]], expected: Sequence[np.ndarray]) -> None:
    wrong: list[str] = []

    def repeat() -> None:
        for _ in range(50):
            for one, other in zip(run(), expected, strict=True):
                if not np.array_equal(one, other):
                    wrong.append("differs")

    threads = [threading.Thread(target=repeat) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("kind", ["t5", "wide t5"])
def test_calls_at_the_same_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads may call at once, each with as many helpers as cores, or more."""
    monkeypatch.setattr(library, "threads", lambda: 4)
    case = _case(kind)
    for rows in (slice(0, 10), slice(None)):
        run = functools.partial(_by_native_code, case, rows)
        _several_at_once(run, run())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_process_has_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked process starts its own helper threads, since those of its parent do not exist there."""
    monkeypatch.setattr(library, "threads", lambda: 2)
    case = _case("t5")
    expected = _by_native_code(case)
    child = os.fork()
    if not child:
        same = all(np.array_equal(*pair) for pair in zip(_by_native_code(case), expected, strict=True))
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_it_is_for() -> None:
    """Native code takes float32 on one device; else it gives the reason."""
    config = build_config()
    assert native_decoder.why_not_for(config, FLOAT32, devices=1) is None
    reason = native_decoder.why_not_for(config, Precision(dtype="bfloat16"), devices=1)
    assert reason == "it computes in float32, and the model is to compute in bfloat16"
    reason = native_decoder.why_not_for(config, FLOAT32, devices=2)
    assert reason == "it is for a model on one device, and 2 devices are to share one"


def test_what_packed_weights_take() -> None:
    """Packed weights have the bytes of the layers' kernels, and of an exact head."""
    config = build_config()
    shapes = parameter_shapes(config)
    layers = native_decoder.packed_bytes(config, shapes, has_exact_heads=False)
    head = 4 * config.vocab_size * config.emb_dim
    assert native_decoder.packed_bytes(config, shapes, has_exact_heads=True) == layers + head
    assert layers % (4 * config.num_decoder_layers) == 0


def test_embeddings_and_turns() -> None:
    """Embeddings and rotations are XLA's, up to a rounding."""
    for kind in ("t5", "llama", "gemma", "granite"):
        case = _case(kind)
        tokens = np.array([3, 1, 7], np.int32)
        expected = case.model.apply({"params": case.tree}, jnp.array(tokens), method="embed")
        np.testing.assert_array_equal(case.decoder.embedded(tokens), expected)
        assert (case.decoder.turns(tokens) is None) == (kind == "t5")
    jax.clear_caches()
