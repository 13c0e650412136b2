"""The width at which a batch prefills prompts, which is finer than the width of their KV cache."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding import batch, decoder
from calm_beam.decoding.branches import Request, sweep_branches
from calm_beam.decoding.compilation import encoded_width, encoded_widths, widths_up_to
from calm_beam.decoding.decoder import Decoder
from calm_beam.exits.rule import ExitRule
from tests.builders import build_checkpoint, build_config, build_prompts, checkpoint_of
from tests.calm_beam.decoding.decoders import PREFILLS, STEPS, assert_all_same, in_order
from tests.calm_beam.model.llama.builders import build_llama_arrays, build_llama_config

pytestmark = pytest.mark.usefixtures("strict_promotion")

_LENGTHS = (9, 16, 17, 32, 33, 48, 49, 64, 1, 12, 30, 4, 40, 5)
_PROMPTS = build_prompts(*_LENGTHS)
_LLAMA_CONFIG = build_llama_config(vocab_size=64, num_decoder_layers=3, max_positions=128, end_ids=(1, 7))


@functools.cache
def _model(kind: str) -> Checkpoint:
    if kind == "llama":
        return checkpoint_of(_LLAMA_CONFIG, build_llama_arrays(_LLAMA_CONFIG, 1))
    return build_checkpoint(build_config(num_encoder_layers=1, num_decoder_layers=3))


def _decoder(
    kind: str, *, thresholds: tuple[float, ...] = (0.7, 0.3), slots: int = 6, tokens: int = 100_000
) -> Decoder:
    branches = sweep_branches(ExitRule(), (0.93, *thresholds), max_decode_length=STEPS, with_full_model=False)
    return Decoder(_model(kind), branches, max_input_length=64, batch_size=slots, max_cache_tokens=tokens)


def _decode(kind: str, prompts: Sequence[Sequence[int]] = _PROMPTS, **options: Any) -> list[Any]:
    return in_order(_decoder(kind, **options).decode(prompts), len(prompts))


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], set[int]]:
    """The widths at which each prompt, without its padding, was prefilled."""
    seen: dict[tuple[int, ...], set[int]] = {}

    def watched(prefill: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, source_tokens: np.ndarray, lengths: np.ndarray, **others: Any) -> Any:
            for tokens, length in zip(source_tokens, lengths.tolist(), strict=True):
                if length:
                    seen.setdefault(tuple(tokens[:length].tolist()), set()).add(len(tokens))
            return prefill(*arguments, source_tokens=source_tokens, lengths=lengths, **others)

        return run

    for module, name in PREFILLS:
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    return seen


def test_it_is_fine_enough_and_the_same_for_every_room() -> None:
    """It holds the prompt, and does not depend on the width of the KV cache, unless that is narrower."""
    for length in range(1, 201):
        fine = encoded_width(length, 512)
        assert length <= fine <= max(16, 2 * length)
        assert {encoded_width(length, width) for width in range(length, 512)} == set(range(length, fine)) | {fine}


def test_all_of_them_are_known() -> None:
    """All widths are known, of a bucket above another one, and of a single bucket."""
    narrower = 0
    found: list[int] = []
    for width in widths_up_to(512):
        found += encoded_widths(width, above=narrower)
        narrower = width
    assert found == [16, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert encoded_widths(512) == tuple(found)


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_it_depends_on_the_prompt_alone(kind: str, widths: dict[tuple[int, ...], set[int]]) -> None:
    """The width does not depend on order, batch, number of slots, or the room for widths."""
    expected = {tuple(prompt): {encoded_width(len(prompt), 64)} for prompt in _PROMPTS}
    # With so few tokens, all prompts are kept at one width.
    for slots, tokens in ((2, 100_000), (14, 100_000), (6, 250)):
        widths.clear()
        _decode(kind, slots=slots, tokens=tokens)
        assert widths == expected
    for prompts in (_PROMPTS[::-1], _PROMPTS[3:5], _PROMPTS[:1]):
        widths.clear()
        _decode(kind, prompts)
        assert widths == {tuple(prompt): expected[tuple(prompt)] for prompt in prompts}


def test_an_open_batch_takes_prompts_in_their_order(widths: dict[tuple[int, ...], set[int]]) -> None:
    """Prompts of one bucket that arrive together start together, whatever their prefill widths."""
    opened = _decoder("t5", thresholds=(), slots=10).open_batch()
    requests = [Request(prompt) for prompt in _PROMPTS]
    queues = opened.queues()
    for request in requests:
        queues[opened.width_for(request)].append(request)
    opened.admit(queues)
    assert sum(map(len, queues.values())) == 4
    for width, queue in queues.items():
        of_width = [request for request in requests if opened.width_for(request) == width]
        assert of_width[len(of_width) - len(queue) :] == list(queue)
    waiting = [request for queue in queues.values() for request in queue]
    admitted = [request.ids for request in requests if request not in waiting]
    assert widths == {tuple(ids): {encoded_width(len(ids), 64)} for ids in admitted}


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_it_changes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are those of prompts prefilled at the width of their KV cache."""
    fine = _decode(kind)
    monkeypatch.setattr(batch, "encoded_width", lambda length, width: width)
    assert_all_same(fine, _decode(kind))
    assert len({tuple(result.tokens[0].tolist()) for result in fine}) > 5


def test_it_changes_nothing_after_what_all_begin_with(
    widths: dict[tuple[int, ...], set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts after a common prefix may end at either width of their bucket with the same outputs."""
    generator = np.random.default_rng(3)
    begun = generator.integers(2, 63, size=34).tolist()
    prompts = [[*begun, *generator.integers(2, 63, size=3 * index).tolist()] for index in range(10)]
    fine = _decode("llama", prompts)
    assert set.union(*widths.values()) == {48, 64}
    monkeypatch.setattr(batch, "encoded_width", lambda length, width: width)
    monkeypatch.setattr(decoder, "common_prefix", lambda prompts, *, width: ())
    assert_all_same(fine, _decode("llama", prompts))
