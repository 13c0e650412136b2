"""A user's measure is one file, without changes elsewhere."""

import dataclasses
import hashlib
import itertools
import json
import pathlib
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from calm_beam.decoding.branches import Branch, sweep_branches
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.early_exit import EarlyExitDecoder
from calm_beam.evaluation.flops import DecoderSizes, flops_appendix_b
from calm_beam.exits.measures import (
    MeasureError,
    check_may_run,
    check_named,
    check_traces,
    is_own,
    measure_named,
    source_digest,
)
from calm_beam.exits.rule import ExitRule
from tests.builders import build_checkpoint, build_config, build_prompts
from tests.calm_beam.exits.measures import own_measures
from tests.sampling import sampled

_MODULE = own_measures.__name__
_CONFIG = build_config(num_encoder_layers=1, num_decoder_layers=3, exit_classifier=2)
_PROMPTS = build_prompts(4, 9, 1, 6)
_THRESHOLDS = (0.9, 0.7, 0.5, 0.3)
_STEPS = 6


@pytest.mark.parametrize(
    "name", sampled(["largest_logit", "small_change", "MARGIN", "CHANGE", "SCORE"], keep=(0, 2, 3, 4))
)
def test_swept_and_served_alike(name: str) -> None:
    """A user's measure gives the same outputs in the sweep, the batch and the decoder of one prompt."""
    rule = ExitRule(confidence=f"{_MODULE}:{name}")
    checkpoint = build_checkpoint(_CONFIG)
    sweep = Decoder(checkpoint, sweep_branches(rule, _THRESHOLDS, max_decode_length=_STEPS), max_input_length=16)
    swept = dict(sweep.decode(_PROMPTS))
    assert len({layer for result in swept.values() for layer in result.exit_layers.ravel().tolist()}) > 2
    for lane, threshold in enumerate((None, *_THRESHOLDS)):
        served = EarlyExitDecoder(checkpoint, Branch.at(rule, threshold, max_decode_length=_STEPS), max_input_length=16)
        branch = Branch.at(rule, threshold, max_decode_length=_STEPS)
        batch = Decoder(checkpoint, [branch], max_input_length=16, batch_size=3)
        batched = ((index, result.branch(0)) for index, result in batch.decode(_PROMPTS))
        for index, answer in itertools.chain(served.decode(_PROMPTS), batched):
            np.testing.assert_array_equal(answer.tokens, swept[index].tokens[lane])
            np.testing.assert_array_equal(answer.exit_layers, swept[index].exit_layers[lane])
            np.testing.assert_allclose(answer.confidences, swept[index].confidences[lane], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", r'confidence "no_such_module:f": cannot import module "no_such_module" \(ModuleNotFound'),
        ("no_such_module:f", r"\)\. It has to be installed or on the PYTHONPATH, here and on every worker\.$"),
        (f"{_MODULE}:none", 'has no "none"'),
        (f"{_MODULE}:of_nothing", r"expected a function of \(logits\), of \(state, below\).*\('anything',\)"),
        (f"{_MODULE}:NUMBER", "found int"),
        (f"{_MODULE}:CHEAT", "may not need LAST_TOKEN"),
        ("softmx", "confidence must be one of softmax, .*, or module:function; got 'softmx'"),
    ],
)
def test_what_is_no_measure(name: str, message: str) -> None:
    """An invalid measure is refused with a clear message and what a valid one needs."""
    with pytest.raises(MeasureError, match=message):
        measure_named(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("of_one_number", r"returned shape \(\) for \(1, 8\), expected \(1,\): one number for each row"),
        ("breaks", "failed with KeyError: 'missing'"),
    ],
)
def test_functions_that_fail(name: str, message: str) -> None:
    """Errors of a function are reported with its name."""
    with pytest.raises(MeasureError, match=message):
        measure_named(f"{_MODULE}:{name}").confidence(jnp.zeros((2, 8)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("of_one_number", r"returned shape \(\) for \(1, 32\), expected \(1,\): one number for each row\.$"),
        ("breaks", r"failed with KeyError: 'missing'\.$"),
        ("in_numpy", r"failed with TracerArrayConversionError: .*\. JAX traces the function: compute with jax\.numpy"),
        ("BAD_CHANGE", r"returned shape \(2, 16\) for \(2, 16\), expected \(2,\)"),
    ],
)
def test_a_measure_is_tried_before_anything_is_decoded(name: str, message: str) -> None:
    """A function that fails on made-up rows is refused with its name, its file and the reason in one line."""
    named = f"{_MODULE}:{name}"
    beginning = re.escape(f'confidence "{named}" in {own_measures.__file__}: ')
    with pytest.raises(MeasureError) as caught:
        check_traces(named, measure_named(named), width=16, vocab_size=32)
    # Without JAX's notes.
    said = str(caught.value)
    assert re.match(beginning + message, said), said
    assert "\n" not in said


@pytest.mark.parametrize("name", ["largest_logit", "small_change", "MARGIN", "CHANGE", "SCORE"])
def test_a_good_measure_passes_the_trial(name: str) -> None:
    """Measures of logits, states and scores pass."""
    check_traces(f"{_MODULE}:{name}", measure_named(f"{_MODULE}:{name}"), width=16, vocab_size=32)


def test_other_rows_decide_nothing() -> None:
    """A function that compares rows sees one at a time: in any batch, a row has the confidence that it has alone."""
    measure = measure_named(f"{_MODULE}:beside_others")
    logits = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)
    together = np.asarray(measure.confidence(logits))
    assert together.shape == (2, 3)
    alone = [[measure.confidence(row[None])[0] for row in of_prompt] for of_prompt in logits]
    np.testing.assert_array_equal(together, np.asarray(alone))
    change = measure_named(f"{_MODULE}:small_change").confidence(logits, logits[::-1], 2)
    np.testing.assert_array_equal(change[1, 2], own_measures.small_change(logits[1, 2], logits[0, 2]))


def test_another_source_is_refused() -> None:
    """A rule records the file of its measure, and accepts no other under the same name."""
    name = f"{_MODULE}:largest_logit"
    file = own_measures.__file__
    assert file is not None
    assert source_digest(name) == f"sha256:{hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest()}"
    rule = ExitRule(confidence=name).with_source()
    assert rule == ExitRule(confidence=name, confidence_source=source_digest(name))
    assert rule.measure() is measure_named(name)
    other = dataclasses.replace(rule, confidence_source="sha256:0")
    assert other.with_source() == other
    assert ExitRule().with_source() == ExitRule()
    with pytest.raises(MeasureError, match="calibrate again"):
        other.measure()


def test_a_rule_imports_nothing() -> None:
    """A name read from a file runs no code until it is used for decoding."""
    script = (
        "import sys; from calm_beam.exits.rule import ExitRule; "
        "rule = ExitRule(confidence='antigravity:f'); assert not rule.needs_full_model(); "
        "assert 'antigravity' not in sys.modules and 'numpy' not in sys.modules and 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_names() -> None:
    """A user's measure is named `module:name`, and no other is."""
    assert is_own("a.b:c")
    assert [name for name in ("softmax", "a:", ":b", "a:b:c", "a b:c", "../a:b", "a:b\n") if is_own(name)] == []


def test_its_tests_are_counted() -> None:
    """An exit test of logits costs a projection, one of states nothing."""
    sizes = DecoderSizes.of(_CONFIG)

    def cost(confidence: str) -> int:
        rule = ExitRule(confidence=confidence)
        return int(flops_appendix_b([2], sizes, source_length=3, rule=rule).sum())

    assert cost(f"{_MODULE}:largest_logit") == cost("softmax")
    assert cost(f"{_MODULE}:small_change") == cost("state")


def test_a_fingerprint_made_before_stands() -> None:
    """Settings without a measure's own settings keep their old fingerprints."""
    from calm_beam.decoding.settings import DecodeSettings

    settings = DecodeSettings(rule=ExitRule(), thresholds=(0.5,), max_input_length=8, max_decode_length=4)
    assert json.loads(json.dumps(settings.to_dict()["rule"])).keys() == {
        *("confidence", "schedule", "tau", "state_propagation", "token_from", "min_exit_layer", "exit_interval")
    }


def test_a_file_alone_runs_no_code() -> None:
    """A manifest's user measure is imported only if the caller names it too; built-in measures need no code."""
    check_may_run("softmax", named=())
    check_may_run("module:f", named=("softmax", "module:f"))
    with pytest.raises(MeasureError, match="--confidence=module:f"):
        check_may_run("module:f", named=("module:g", None))


def test_another_measure_than_the_manifests_is_refused() -> None:
    """A caller's measure must be the manifest's; a built-in one need not be named."""
    check_named("softmax", None)
    check_named("softmax", "softmax")
    check_named("module:f", "module:f")
    with pytest.raises(MeasureError, match="the manifest is of confidence 'softmax', not 'entropy'"):
        check_named("softmax", "entropy")
    with pytest.raises(MeasureError, match="--confidence=module:f"):
        check_named("module:f", None)
