"""The generator serves what was calibrated."""

import concurrent.futures
import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.process import CompileTime
from calm_beam.checkpoints import Checkpoint, load_checkpoint
from calm_beam.decoding import branches
from calm_beam.decoding.branches import sweep_branches
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs.examples import DataError, parse_example
from calm_beam.inputs.prompts import encode_prompt
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary
from calm_beam.manifest import EntryChoice, ManifestError, PlannedTest, write_manifest
from calm_beam.serving import Answer, Generator, OutputError, PromptError
from tests.builders import build_checkpoint
from tests.calm_beam.manifest.builders import build_plan_record
from tests.calm_beam.serving.builders import STEPS, build_entry, build_served_manifest
from tests.pipelines import BROKEN_ID, CONFIG, write_model, write_vocabulary

_CHECKPOINT = build_checkpoint(CONFIG)
_PROMPTS = [(5, 9, 12, 1), (7, 3, 1), (20, 21, 22, 23, 24, 1), (63,), (7, 3, 1), (40, 2, 1)]


def _generator(checkpoint: Checkpoint = _CHECKPOINT, *, batch_size: int = 1, **options: Any) -> Generator:
    return Generator.from_manifest(build_served_manifest(checkpoint, **options), checkpoint, batch_size=batch_size)


def _assert_same(found: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """Fails unless answers are equal, but for the last bits of confidences."""
    for answer, other in zip(found, expected, strict=True):
        assert answer.confidences == pytest.approx(other.confidences, rel=0, abs=1e-5)
        assert dataclasses.replace(answer, confidences=other.confidences) == other


@pytest.fixture(scope="module")
def generator() -> Generator:
    """A generator of the tiny model at threshold 0.5."""
    return _generator()


@pytest.fixture(scope="module")
def vocabulary_path(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The file of a small vocabulary."""
    return write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "v.model")


@pytest.fixture(scope="module")
def of_text(vocabulary_path: pathlib.Path) -> Generator:
    """A generator for texts, with two sentinels and a task prefix."""
    manifest = build_served_manifest(
        _CHECKPOINT, vocabulary=Vocabulary(vocabulary_path, extra_ids=2), decode={"task_prefix": "the "}
    )
    return Generator.from_manifest(manifest, _CHECKPOINT, vocabulary=vocabulary_path)


@pytest.mark.parametrize(
    ("rule", "threshold"),
    [
        (ExitRule(), 0.5),
        (ExitRule(), None),
        (ExitRule(confidence="state", schedule="decay", tau=4.0, min_exit_layer=2), 0.7),
    ],
)
def test_answers_are_the_lanes_of_the_sweep(rule: ExitRule, threshold: float | None) -> None:
    """Tokens and exit layers are the sweep's at the entry's threshold, or those of its full-model branch."""
    grid = (threshold or 0.5,)
    sweep = Decoder(_CHECKPOINT, sweep_branches(rule, grid, max_decode_length=STEPS), max_input_length=32)
    expected = dict(sweep.decode(_PROMPTS))
    lane = 0 if threshold is None else 1
    served = _generator(entries=(build_entry(threshold, rule=rule),), rule=rule)
    for index, answer in enumerate(served.generate_batch(_PROMPTS)):
        length = expected[index].lengths[lane]
        assert answer.tokens == tuple(expected[index].tokens[lane, :length])
        assert answer.exit_layers == tuple(expected[index].exit_layers[lane, :length])
        assert answer.confidences == pytest.approx(expected[index].confidences[lane, :length], abs=1e-5)
        assert answer.text == " ".join(str(token) for token in answer.tokens if token != 1)


def test_the_manifests_thresholds_are_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule's thresholds in the manifest are served, whatever this machine would compute."""
    rule = ExitRule(schedule="decay", tau=4.0)
    options: dict[str, Any] = {"entries": (build_entry(0.6, rule=rule),), "rule": rule}
    expected = _generator(**options).generate_batch(_PROMPTS)
    monkeypatch.setattr(branches, "scheduled_thresholds", lambda *_: np.zeros((STEPS, 1), np.float32))
    _assert_same(_generator(**options).generate_batch(_PROMPTS), expected)
    assert max(layer for answer in expected for layer in answer.exit_layers) > 1


def test_layers_are_counted(generator: Generator) -> None:
    """Used and saved layers add up to the full model's, and some are saved."""
    answers = generator.generate_batch(_PROMPTS)
    for answer in answers:
        assert answer.layers_used == sum(answer.exit_layers)
        assert answer.layers_used + answer.layers_saved == 4 * len(answer.tokens)
        assert not answer.truncated
    assert sum(answer.layers_saved for answer in answers) > 0


def test_never_exit_is_the_full_model(generator: Generator) -> None:
    """Without a safe threshold every token uses all layers, as in the generator that never exits."""
    never = _generator(entries=(build_entry(None),))
    answers = never.generate_batch(_PROMPTS)
    assert {layer for answer in answers for layer in answer.exit_layers} == {4}
    assert sum(answer.layers_saved for answer in answers) == 0
    # No entry of the manifest applied there.
    expected = [dataclasses.replace(answer, entry=None) for answer in answers]
    _assert_same(generator.full_model().generate_batch(_PROMPTS), expected)


def test_answers_do_not_depend_on_what_was_asked_beside(generator: Generator) -> None:
    """Answers in a batch of several rows are those of prompts alone, and those of a single row."""
    together = _generator(batch_size=4)
    _assert_same(together.generate_batch(_PROMPTS), [together.generate(prompt) for prompt in _PROMPTS])
    _assert_same(generator.generate_batch(_PROMPTS), together.generate_batch(_PROMPTS))
    assert generator.generate_batch([]) == []


def test_text_is_encoded_as_in_calibration(of_text: Generator, vocabulary_path: pathlib.Path) -> None:
    """A text is encoded as in calibration, with prefix and eos, and its answer is decoded."""
    vocabulary = Vocabulary(vocabulary_path, extra_ids=2)
    decode = DecodeSettings(
        rule=ExitRule(), thresholds=(0.5,), max_input_length=32, max_decode_length=STEPS, task_prefix="the "
    )
    for text in ("cat sees", "  owl  hears <extra_id_1> 3 "):
        example = parse_example(json.dumps({"input": text}), path="x", line_number=1)
        ids = encode_prompt(example, vocabulary, settings=decode, vocab_size=64, on_long="truncate").ids
        answer, of_ids = of_text.generate_batch([text, ids])
        assert (answer.tokens, answer.exit_layers) == (of_ids.tokens, of_ids.exit_layers)
        assert answer.text == vocabulary.decode(answer.tokens)


_JSON = st.one_of(
    st.text(max_size=5),
    st.lists(st.integers(-1, 66), max_size=5),
    st.just("\ud800"),
    st.just([True]),
    st.just([2.5]),
    st.just(7),
    st.just({"a": 1}),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(prompt=_JSON)
def test_prompts_are_refused_that_calibration_refuses(of_text: Generator, prompt: Any) -> None:
    """Each prompt that a JSONL row can hold is served exactly if it can be calibrated on."""
    key = "input" if isinstance(prompt, str) else "input_ids"
    decode = DecodeSettings(rule=ExitRule(), thresholds=(0.5,), max_input_length=32, max_decode_length=STEPS)
    try:
        example = parse_example(json.dumps({key: prompt}), path="x", line_number=1)
        encode_prompt(example, of_text.vocabulary, settings=decode, vocab_size=64, on_long="truncate")
        is_refused = False
    except DataError:
        is_refused = True
    if is_refused:
        with pytest.raises(PromptError, match=r"^prompt 0(:| is empty)"):
            of_text.check([prompt])
    else:
        of_text.check([prompt])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (" \n", "the prompt is empty."),
        ("a\0b", "the prompt: holds a NUL character, which vocabularies read as an unknown piece"),
        ([0, 0], r"the prompt is empty, or holds padding \(0\) only."),
        (
            ["a", "b"],
            "the prompt: expected a text or token ids, got a list of texts. For several, call generate_batch.",
        ),
        ([5, 64], "the prompt: token ids must be integers from 0 to 63, got 64."),
        ([5, -1], "the prompt: token ids must be integers from 0 to 63, got -1."),
        ([True], "the prompt: token ids must be integers from 0 to 63, got True."),
        ("\ud800", "the prompt: is not Unicode text"),
        (b"abc", "the prompt: expected a text or a list of token ids, got bytes."),
        (None, "the prompt: expected a text or a list of token ids, got NoneType."),
    ],
)
def test_bad_prompts_are_refused_in_words(of_text: Generator, prompt: Any, message: str) -> None:
    """A bad prompt is refused with a clear message."""
    with pytest.raises(PromptError, match=message):
        of_text.generate(prompt)


def test_a_batch_with_a_bad_prompt_is_refused_as_a_whole(generator: Generator) -> None:
    """A batch with a bad prompt is refused, with the prompt's place or name; a text instead of a list is an error."""
    with pytest.raises(PromptError, match="prompt 1: is text, but the manifest is about prompts of token ids"):
        generator.generate_batch([[5, 1], "text"])
    with pytest.raises(PromptError, match=r"^row-7: is text"):
        generator.generate_batch(["text"], names=["row-7"])
    with pytest.raises(TypeError, match="expected a list of prompts, got a single text"):
        generator.generate_batch("text")


def test_long_prompts_are_cut_and_reported(generator: Generator, of_text: Generator) -> None:
    """Unless the plan says otherwise, a long prompt is cut, and the answer says so."""
    long = generator.generate([7, 9] * 20)
    assert long.truncated
    _assert_same([long], [dataclasses.replace(generator.generate([7, 9] * 16), truncated=True)])
    assert of_text.generate("the cat sees " * 20).truncated


def test_long_prompts_are_refused_where_calibration_refused_them() -> None:
    """If the plan does not cut prompts, a long prompt is refused."""
    manifest = build_served_manifest(_CHECKPOINT)
    entry = manifest.calibrations[0]
    planned = {name: getattr(entry, name) for name in ("consistency", "metric", "loss", "delta", "epsilon", "p_value")}
    plan = build_plan_record(
        thresholds=(0.5,),
        tests=(PlannedTest(**planned, procedure=entry.procedure),),
        on_long="error",
        model=_CHECKPOINT.fingerprint(),
    )
    served = Generator.from_manifest(dataclasses.replace(manifest, plan=plan), _CHECKPOINT)
    assert not served.generate([7] * 32).truncated
    with pytest.raises(PromptError, match=r"the prompt: is too long. The manifest allows 32 tokens"):
        served.generate([7] * 33)


def test_logits_that_are_not_finite_are_an_error_that_names_the_prompt(tmp_path: pathlib.Path) -> None:
    """A prompt whose logits are not finite is an error that names it; others have answers."""
    checkpoint = load_checkpoint(write_model(tmp_path, is_broken=True))
    served = _generator(checkpoint)
    assert served.generate([5, 1]).tokens
    with pytest.raises(OutputError, match=r"prompt 1 \(\[5, 63, 1\]\): the model gave logits that are not finite"):
        served.generate_batch([[5, 1], [5, BROKEN_ID, 1]])


def test_threads_share_a_generator() -> None:
    """Many threads at once, also before anything is compiled, get the answers of one thread."""
    served = _generator(decode={"max_input_length": 36})
    prompts = [*_PROMPTS, [9] * 35] * 6
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        found = list(pool.map(served.generate, prompts))
    _assert_same(found, [served.generate(prompt) for prompt in prompts])


def test_warming_up_compiles_every_width() -> None:
    """With XLA, after the warm-up no width needs compilation; before it, some does; each shape is reported."""
    manifest = build_served_manifest(_CHECKPOINT, decode={"max_input_length": 40})
    served = Generator.from_manifest(manifest, _CHECKPOINT, engine="xla")
    told: list[tuple[int, int]] = []
    with CompileTime() as compiling:
        served.warm_up(on_shape=lambda *shapes: told.append(shapes))
    assert compiling.seconds() > 0
    shapes = len(told) - 1
    assert told == [(done, shapes) for done in range(shapes + 1)]
    assert shapes > 1
    with CompileTime() as compiling:
        for length in (1, 32, 33, 40):
            served.generate([9] * length)
    assert compiling.seconds() == 0


def test_everything_may_be_named_by_path(tmp_path: pathlib.Path, vocabulary_path: pathlib.Path) -> None:
    """Manifest and model are read from files, and the vocabulary next to the model is found and given its sentinels."""
    model = write_model(tmp_path / "model", vocabulary=vocabulary_path)
    checkpoint = load_checkpoint(model)
    vocabulary = Vocabulary(vocabulary_path, extra_ids=3)
    write_manifest(build_served_manifest(checkpoint, vocabulary=vocabulary), tmp_path / "manifest.json")
    served = Generator.from_manifest(tmp_path / "manifest.json", model)
    assert served.vocabulary is not None
    assert (served.vocabulary.extra_ids, served.max_input_length, served.num_layers) == (3, 32, 4)
    assert served.generate("the cat").tokens


def test_the_entry_is_chosen_and_never_guessed() -> None:
    """Fields may be left out if one entry matches; if none or several do, the error lists them."""
    entries = (build_entry(0.5), build_entry(0.7, delta=0.05), build_entry(0.9, delta=0.05, metric="exact_match"))
    manifest = build_served_manifest(_CHECKPOINT, entries)
    assert Generator.from_manifest(manifest, _CHECKPOINT, delta=0.1).entry == entries[0]
    assert Generator.from_manifest(manifest, _CHECKPOINT, delta=0.05, metric="token_f1").entry == entries[1]
    listed = "consistency=textual, metric={}, loss=dissimilarity, delta={}, epsilon=0.05, p_value=hoeffding_bentkus"
    second, third = listed.format("token_f1", 0.05), listed.format("exact_match", 0.05)
    with pytest.raises(ManifestError, match=f"2 calibrations have delta=0.05. Say which metric: {second}; {third}."):
        Generator.from_manifest(manifest, _CHECKPOINT, delta=0.05)
    with pytest.raises(ManifestError, match=r"there are 3 calibrations. Say which metric and delta: "):
        Generator.from_manifest(manifest, _CHECKPOINT)
    with pytest.raises(ManifestError, match=r"no calibration has delta=0.2. The manifest has: "):
        Generator.from_manifest(manifest, _CHECKPOINT, delta=0.2)


def test_a_choice_is_taken_whole() -> None:
    """A choice as one value selects the entry that its keywords select; keywords override it, and none is ignored."""
    entries = (build_entry(0.5), build_entry(0.7, delta=0.05), build_entry(0.9, delta=0.05, metric="exact_match"))
    manifest = build_served_manifest(_CHECKPOINT, entries)
    choice = EntryChoice(delta=0.05, metric="token_f1")
    assert Generator.from_manifest(manifest, _CHECKPOINT, choice=choice).entry == entries[1]
    assert Generator.from_manifest(manifest, _CHECKPOINT, choice=choice, metric="exact_match").entry == entries[2]
    with pytest.raises(ManifestError, match="tail is for manifests of kind settings"):
        Generator.from_manifest(manifest, _CHECKPOINT, delta=0.1, tail=0.3)
    with pytest.raises(TypeError, match=r"^from_manifest\(\) has no argument 'tails'\. Did you mean tail\?$"):
        Generator.from_manifest(manifest, _CHECKPOINT, tails=0.3)  # type: ignore[call-arg]


def test_an_output_that_was_cut_says_so(generator: Generator) -> None:
    """The reason is `stop` only where the output ends with an end token; else it has the greatest length."""
    answers = [generator.generate([token, 9, 1]) for token in range(3, 30)]
    reasons = {answer.finish_reason for answer in answers}
    for answer in answers:
        is_cut = answer.tokens[-1] not in generator.end_ids
        assert answer.finish_reason == ("length" if is_cut else "stop")
        assert not is_cut or len(answer.tokens) == STEPS
    assert reasons == {"stop", "length"}


def test_answers_are_plain_values(generator: Generator) -> None:
    """An answer holds Python's own numbers, so that it can be written as JSON."""
    answer = generator.generate([5, 9, 1])
    assert json.loads(json.dumps(dataclasses.asdict(answer)))["tokens"] == list(answer.tokens)
