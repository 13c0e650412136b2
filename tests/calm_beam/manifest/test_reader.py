"""The reader returns what was written, and refuses untrustworthy manifests with clear messages."""

import dataclasses
import json
import pathlib
import pickle
import re
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from calm_beam.manifest import (
    GUARANTEE,
    Calibration,
    DataRecord,
    Manifest,
    ManifestError,
    PathEntry,
    VocabularyRecord,
    manifest_text,
    parse_manifest,
    read_manifest,
    write_manifest,
)
from tests.calm_beam.manifest.builders import (
    REMOVED,
    build_calibration,
    build_manifest,
    build_never_exit,
    build_path_entry,
    changed,
    unsealed,
)

_CALIBRATION = ("calibrations", 0)
_PATH = ("calibrations", 0, "path")
_FEW = hypothesis.settings(max_examples=60, deadline=None)


def _refused(message: str) -> Any:
    """Expects a ManifestError with exactly this text."""
    return pytest.raises(ManifestError, match=f"^{re.escape(message)}$")


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Draws manifests whose numbers use all bits of a float and whose strings use all of Unicode."""
    unit = st.floats(0, 1)
    name = st.text(min_size=1, max_size=8)
    thresholds = sorted(draw(st.lists(unit, min_size=1, max_size=5, unique=True)), reverse=True)
    epsilon = draw(st.floats(0.01, 0.5))
    failing = draw(st.booleans())
    path = tuple(
        build_path_entry(
            threshold=threshold,
            risk=draw(st.floats(0.005, 1)),
            p_value=draw(st.floats(epsilon, 1, exclude_min=True)) if last else draw(st.floats(0, epsilon)),
            rejected=not last,
            layers=draw(st.floats(1, 6)),
        )
        for threshold, last in zip(thresholds, [False] * (len(thresholds) - 1) + [failing], strict=True)
    )
    accepted = [entry for entry in path if entry.rejected]
    calibration = build_calibration(
        metric=draw(name),
        delta=draw(st.floats(0, 1, exclude_min=True, exclude_max=True)),
        epsilon=epsilon,
        threshold=accepted[-1].threshold if accepted else None,
        risk=accepted[-1].risk if accepted else 0.0,
        layers=accepted[-1].layers if accepted else 6,
        path=path,
    )
    return build_manifest(
        vocabulary=draw(st.none() | st.builds(VocabularyRecord, fingerprint=name, extra_ids=st.integers(0, 2**31 - 1))),
        calibrations=(calibration,),
        software=draw(st.dictionaries(name, name, max_size=3)),
    )


@_FEW
@hypothesis.given(manifest=manifests())
def test_parsing_returns_what_was_written(manifest: Manifest) -> None:
    """A manifest survives writing and reading, floats to the last bit, with its digest."""
    read = parse_manifest(manifest_text(manifest))
    assert read == manifest
    assert read.digest == manifest.digest
    assert manifest_text(read) == manifest_text(manifest)


@_FEW
@hypothesis.given(data=st.data())
def test_no_character_that_says_something_can_be_changed(data: st.DataObject) -> None:
    """Any one replaced character is refused, unless the JSON has the same meaning."""
    text = manifest_text(build_manifest())
    position = data.draw(st.integers(0, len(text) - 1))
    edited = text[:position] + data.draw(st.characters(exclude_categories=["Cs"])) + text[position + 1 :]
    try:
        says_the_same = json.loads(edited) == json.loads(text)
    except json.JSONDecodeError:
        says_the_same = False
    hypothesis.assume(not says_the_same)
    with pytest.raises(ManifestError):
        parse_manifest(edited)


@_FEW
@hypothesis.given(manifest=manifests(), data=st.data())
def test_no_digit_can_be_changed(manifest: Manifest, data: st.DataObject) -> None:
    """Any one changed digit is refused, unless its 64-bit number stays the same."""
    text = manifest_text(manifest)
    position = data.draw(st.sampled_from([found.start() for found in re.finditer("[0-9]", text)]))
    digit = data.draw(st.sampled_from("0123456789".replace(text[position], "")))
    edited = text[:position] + digit + text[position + 1 :]
    try:
        # The 17th digit of a float can name the same float as its neighbour.
        says_the_same = json.loads(edited) == json.loads(text)
    except json.JSONDecodeError:
        says_the_same = False
    hypothesis.assume(not says_the_same)
    with pytest.raises(ManifestError):
        parse_manifest(edited)


def test_read_takes_strings_and_paths(tmp_path: pathlib.Path) -> None:
    """A manifest is read from a string path as from a path object."""
    path = tmp_path / "manifest.json"
    write_manifest(build_manifest(), path)
    assert read_manifest(path) == read_manifest(str(path)) == build_manifest()


def test_parse_takes_text_and_bytes() -> None:
    """Bytes from a storage client need no decoding."""
    text = manifest_text(build_manifest())
    assert parse_manifest(text.encode()) == parse_manifest(text) == build_manifest()


def test_indentation_and_order_of_keys_do_not_matter() -> None:
    """The same JSON in another layout is the same manifest."""
    content = build_manifest().to_dict()
    assert parse_manifest(json.dumps(dict(reversed(content.items())))) == build_manifest()


def test_integers_stand_for_numbers() -> None:
    """1 is read in place of 1.0, and stays 1, which keeps the digest."""
    content = changed(("decode", "tau"), 4)
    manifest = Manifest.from_dict(content)
    assert manifest.to_dict() == content
    assert type(manifest.decode.tau) is int


def test_manifests_are_hashable_and_picklable() -> None:
    """Equal manifests hash alike, and a copy sent to another process is equal."""
    assert hash(build_manifest()) == hash(build_manifest())
    assert pickle.loads(pickle.dumps(build_manifest())) == build_manifest()


def test_software_is_copied() -> None:
    """The manifest does not change with the dict it was made from."""
    software = {"jax": "0.8.1"}
    manifest = build_manifest(software=software)
    software["jax"] = "0.9.0"
    assert manifest.software == {"jax": "0.8.1"}


def test_guarantee_says_what_holds() -> None:
    """The default sentence names the probability, what it is over, and that entries hold alone."""
    assert build_manifest().guarantee == GUARANTEE
    for phrase in ("holds alone", "probability at least 1 - epsilon", "draw of the calibration set", "delta"):
        assert phrase in GUARANTEE


def test_a_missing_file_is_an_os_error(tmp_path: pathlib.Path) -> None:
    """A missing file is an OSError, unlike an untrustworthy one, and its message says what to name."""
    with pytest.raises(FileNotFoundError, match=r"^manifest .*absent\.json: no such file\. Name the manifest\.json of"):
        read_manifest(tmp_path / "absent.json")


def test_the_folder_of_a_calibration_will_do(tmp_path: pathlib.Path) -> None:
    """A folder stands for the manifest in it, as for commands; one without a manifest is refused."""
    with pytest.raises(ManifestError, match=f"{re.escape(str(tmp_path))}: is a folder, and has no manifest.json"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text(manifest_text(build_manifest()))
    assert read_manifest(tmp_path) == build_manifest()


def test_errors_name_the_file(tmp_path: pathlib.Path) -> None:
    """Errors about a file have its path."""
    path = tmp_path / "m.json"
    path.write_text(json.dumps(unsealed(("schema",), "calm-beam/manifest/v3")))
    with _refused(
        f'manifest {path}: schema is "calm-beam/manifest/v3", this reader knows v1 and v2. Upgrade calm-beam where you '
        "serve."
    ):
        read_manifest(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON: Expecting value: line 1 column 1 (char 0)"),
        ('{"schema": ', "not JSON: Expecting value: line 1 column 12 (char 11)"),
        (b"\xff{}", "not UTF-8 text: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        ('{"a": NaN}', "not JSON: NaN is not a number that JSON allows"),
        ('{"a": -Infinity}', "not JSON: -Infinity is not a number that JSON allows"),
        ('{"a": 1e400}', "the number 1e400 is too large for a 64-bit float"),
        ('{"a": {"b": 1, "b": 1}}', 'key "b" occurs twice in the same object'),
        ("[1]", "a manifest must be a JSON object, got [1]"),
        ("{}", 'schema is missing, so this is not a manifest; expected "calm-beam/manifest/v2"'),
        ('{"schema": 1}', 'schema is 1, so this is not a calm-beam manifest; expected "calm-beam/manifest/v2"'),
        (
            '{"schema": "calm-beam/manifest/v2"}',
            "digest is missing, so nothing shows that the manifest is as it was written",
        ),
    ],
)
def test_what_is_no_manifest_is_refused(text: str | bytes, message: str) -> None:
    """Text that is not JSON, and JSON that is no manifest, are refused by their first error."""
    with _refused(f"model.json: {message}"):
        parse_manifest(text, source="model.json")


@pytest.mark.parametrize("depth", [*range(500, 1000, 20), 100_000])
@pytest.mark.parametrize("form", ["{}", '{{"schema": "calm-beam/manifest/v2", "digest": {}}}'])
def test_deep_nesting_is_refused(form: str, depth: int) -> None:
    """Nesting that would exhaust the stack is refused like any other error."""
    with pytest.raises(ManifestError, match=r"^manifest: (not JSON|a manifest must be|digest)"):
        parse_manifest(form.format("[" * depth + "]" * depth))


def test_half_a_surrogate_pair_is_refused() -> None:
    """Half a surrogate pair has no digest, since UTF-8 cannot hold it, and is refused."""
    text = json.dumps(unsealed(("guarantee",), "\ud800"))
    with pytest.raises(ManifestError, match=r"^manifest: digest cannot be checked, as the content has no form in JSON"):
        parse_manifest(text)


def test_a_changed_manifest_is_refused() -> None:
    """A value changed by hand is refused with both digests, before contradictions are looked for."""
    content = unsealed((*_CALIBRATION, "threshold"), 0.7)
    written, found = build_manifest().digest, changed((*_CALIBRATION, "threshold"), 0.7)["digest"]
    with _refused(
        f'manifest: digest is "{written}", but that of the content is "{found}": the manifest was changed after it was '
        "written. Take the original, or calibrate again."
    ):
        parse_manifest(json.dumps(content))


def test_from_dict_checks_the_digest_too() -> None:
    """A plain form with a wrong digest is refused, though the rest is valid."""
    with pytest.raises(ManifestError, match=r"^digest is .* changed after it was written"):
        Manifest.from_dict(unsealed(("guarantee",), "Trust me."))


def test_the_schema_comes_before_the_digest() -> None:
    """A manifest of another version is not called damaged."""
    with pytest.raises(ManifestError, match=r"^manifest: schema is .*v3"):
        parse_manifest(json.dumps(unsealed(("schema",), "calm-beam/manifest/v3")))


def test_another_model_is_refused() -> None:
    """A manifest of another model is refused with both fingerprints, its own model is taken."""
    text = manifest_text(build_manifest())
    assert parse_manifest(text, model_fingerprint="sha256:6d6f64656c") == build_manifest()
    with _refused(
        'manifest: model.fingerprint is "sha256:6d6f64656c" (from gs://models/t5-small), but the model to serve has '
        '"sha256:00". Its thresholds hold for no other model: serve that one, or calibrate this one.'
    ):
        parse_manifest(text, model_fingerprint="sha256:00")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("created",), "2026-02-30T12:00:00Z", 'created must be a UTC time such as "2026-01-31T12:00:00Z", got {}'),
        (("created",), 5, 'created must be a UTC time such as "2026-01-31T12:00:00Z", got {}'),
        (("model",), [1], "model must be a JSON object, got {}"),
        (("model", "layers"), True, "model.layers must be an integer of at least 1, got {}"),
        (("model", "layers"), 2**31, "model.layers must be at most 2147483647, got {}"),
        (("model", "layers"), 6.0, "model.layers must be an integer of at least 1, got {}"),
        (("model", "uri"), "", "model.uri must be a non-empty string, got {}"),
        (("model", "heads"), 8, "model.heads is not a key of a manifest; expected uri, fingerprint, layers"),
        (("model", "uri"), REMOVED, "model.uri is missing"),
        (("guarantee",), REMOVED, "guarantee is missing"),
        (("vocabulary", "extra_ids"), -1, "vocabulary.extra_ids must be an integer of at least 0, got {}"),
        (("decode", "confidence"), "surprise", "decode.confidence must be one of softmax, softmax_max, state, "
         "classifier, entropy, patience, oracle, static, got {}"),
        (("decode", "tau"), -0.5, "decode.tau must be a finite number of at least 0, got {}"),
        (("decode", "tau"), 10**400, "decode.tau must be a finite number of at least 0, got 1" + 98 * "0" + "…"),
        (("decode", "tau"), None, 'decode.tau must be a number when schedule is "decay", got {}'),
        (("decode", "task_prefix"), None, "decode.task_prefix must be a string, got {}"),
        (("decode", "min_exit_layer"), 7, "decode.min_exit_layer must be at most model.layers, which is 6, got {}"),
        (("data", "patterns"), "*.jsonl", "data.patterns must be a list, got {}"),
        (("data", "patterns"), ["a", 1], "data.patterns[1] must be a non-empty string, got 1"),
        (("data", "truncated"), 201, "data.truncated must be at most examples, which is 200, got {}"),
        (("data", "failed_ids"), ["b", "a"], "data.failed_ids must ascend, each id once, got {}"),
        (("data", "failed_ids"), ["a", "b"], "data.failed_ids must have 1 ids, since failed is 1 (left out where that "
         "is 0), got 2"),
        (("data", "failed_ids"), "row-7", "data.failed_ids must be a list, got {}"),
        (
            ("data", "unseen"),
            [{"metric": "b", "no_token": 1, "few_letters": 0}, {"metric": "a", "no_token": 1, "few_letters": 0}],
            'data.unseen must have one or more metrics, ascending, each once, got ["b", "a"]',
        ),
        (
            ("data", "unseen"),
            [{"metric": "a", "no_token": 201, "few_letters": 0}],
            "data.unseen[0].no_token must be at most examples, which is 200, got 201",
        ),
        (
            ("data", "unseen"),
            [{"metric": "a", "no_token": 0, "few_letters": 0}],
            "data.unseen[0].no_token or few_letters must be above 0, got 0 and 0: leave the metric out",
        ),
        (("calibrations",), [], "calibrations must have at least one entry, got {}"),
        (("calibrations",), {"a": 1}, "calibrations must be a list, got {}"),
        (("software",), ["jax"], "software must be a JSON object, got {}"),
        (("software", "jax"), 8, 'software["jax"] must be a non-empty string, got {}'),
        ((*_CALIBRATION, "delta"), "x", "calibrations[0].delta must be a number in (0, 1), got {}"),
        ((*_CALIBRATION, "delta"), 5, "calibrations[0].delta must be a number in (0, 1), got {}"),
        ((*_CALIBRATION, "risk"), True, "calibrations[0].risk must be a number in [0, 1], got {}"),
        ((*_PATH, 1), 7, "calibrations[0].path[1] must be a JSON object, got {}"),
        ((*_PATH, 1, "rejected"), 1, "calibrations[0].path[1].rejected must be true or false, got {}"),
        ((*_PATH, 2, "p_value"), None, "calibrations[0].path[2].p_value must be a number in [0, 1], got {}"),
        ((*_PATH, 2, "lambda"), 1, "calibrations[0].path[2].lambda is not a key of a manifest; expected "
         "threshold, n, risk, p_value, rejected, layers, variant, near_ties"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_its_key_path(path: tuple[str | int, ...], value: object, message: str) -> None:
    """A wrong type, range or key is refused with its path in the manifest and the value."""
    with _refused(message.replace("{}", json.dumps(value) if value is not REMOVED else "")):
        Manifest.from_dict(changed(path, value))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((*_CALIBRATION, "threshold"), 0.7, "threshold must be 0.8, as the last one rejected in path says, "
         "got 0.7"),
        ((*_CALIBRATION, "threshold"), None, "threshold must be 0.8, as the last one rejected in path says, "
         "got null"),
        ((*_CALIBRATION, "risk"), 0.02, "risk must be 0.03, as the last one rejected in path says, got 0.02"),
        ((*_CALIBRATION, "layers"), 4.5, "layers must be 4.25, as the last one rejected in path says, got 4.5"),
        ((*_CALIBRATION, "epsilon"), 0.04, "path[1].rejected must be false, got true: p_value is 0.05 and epsilon "
         "0.04"),
        ((*_CALIBRATION, "path"), [], "path must have an entry for everything that was tested, got []"),
        ((*_PATH, 2, "p_value"), 0.05, "path[2].rejected must be true, got false: p_value is 0.05 and epsilon 0.05"),
        ((*_PATH, 1, "threshold"), 0.9, "path[1].threshold must be below the one tested before it, 0.9, got 0.9"),
        ((*_PATH, 0, "rejected"), False, "path[0].rejected is false, so the test stops there, but path[1] follows"),
        ((*_PATH, 1, "n"), 199, "path[1].n must be data.examples, which is 200 (failed examples count, with loss 1), "
         "got 199"),
        ((*_PATH, 0, "layers"), 6.5, "path[0].layers must be at most model.layers, which is 6, got 6.5"),
        ((*_PATH, 0, "risk"), 0.004, "path[0].risk must be at least 0.005, since 1 of 200 examples failed and count "
         "with loss 1, got 0.004"),
    ],
)  # fmt: skip
def test_a_contradiction_is_refused(path: tuple[str | int, ...], value: object, message: str) -> None:
    """A calibration that contradicts itself, the data or the model is refused, though its digest is right."""
    with _refused(f"manifest: calibrations[0].{message}"):
        parse_manifest(json.dumps(changed(path, value)))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("threshold", 0.9, "threshold must be null, since none in path was rejected, got 0.9"),
        ("risk", 0.5, "risk must be 0, since none in path was rejected, got 0.5"),
        ("layers", 5, "layers must be model.layers, which is 6, when threshold is null, got 5"),
    ],
)
def test_never_exit_has_no_risk_and_all_layers(key: str, value: object, message: str) -> None:
    """Without a safe threshold, the calibration has the full model's values."""
    with _refused(f"calibrations[1].{message}"):
        Manifest.from_dict(changed(("calibrations", 1, key), value))


def test_records_check_themselves() -> None:
    """A record made in code is checked like one that is read; its errors start at its own keys."""
    with _refused("delta must be a number in (0, 1), got NaN"):
        build_calibration(delta=float("nan"))
    with _refused("threshold must be a number in [0, 1], got 1.5"):
        PathEntry.from_dict({**build_path_entry().to_dict(), "threshold": 1.5})
    with _refused("PathEntry must be a JSON object, got null"):
        PathEntry.from_dict(None)
    with _refused("patterns must be a tuple, got []"):
        DataRecord(patterns=[], examples=1, duplicates=0, failed=0, truncated=0, fingerprint="a")  # type: ignore[arg-type]
    with _refused('path[0] must be a PathEntry, got "a"'):
        build_calibration(path=("a",))
    with _refused("model must be a ModelRecord, got null"):
        build_manifest(model=None)
    with _refused("vocabulary must be a VocabularyRecord, got 32128"):
        build_manifest(vocabulary=32128)
    with _refused(r"data must be text that UTF-8 can hold, got 'caf\udce9.jsonl'".replace("data", "patterns[0]")):
        dataclasses.replace(build_manifest().data, patterns=("caf\udce9.jsonl",))
    with _refused('a name in software must be a non-empty string, got ""'):
        build_manifest(software={"": "1"})


@pytest.mark.parametrize("record", [build_path_entry(), build_calibration(), build_never_exit()])
def test_every_record_returns_from_its_plain_form(record: PathEntry | Calibration) -> None:
    """Each record is what its plain form describes."""
    assert type(record).from_dict(record.to_dict()) == record


def test_calibration_finds_the_one_entry() -> None:
    """An entry is found by its settings; epsilon may be left out where it decides nothing."""
    manifest = build_manifest()
    assert manifest.calibration(consistency="textual", metric="rouge_l", delta=0.1) == build_calibration()
    found = manifest.calibration(consistency="textual", metric="rouge_l", delta=0.01, epsilon=0.05)
    assert found.threshold is None


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"consistency": "risk", "metric": "rouge_l", "delta": 0.1},
            "no calibration has consistency=risk, metric=rouge_l, delta=0.1. The manifest has: {first}; {second}.",
        ),
        (
            {"consistency": "textual", "metric": "rouge_l", "delta": 0.1, "epsilon": 0.2},
            "no calibration has consistency=textual, metric=rouge_l, delta=0.1, epsilon=0.2. The manifest has: "
            "{first}; {second}.",
        ),
    ],
)
def test_calibration_lists_what_there_is(asked: dict[str, Any], message: str) -> None:
    """If no entry matches, the error lists the existing ones."""
    first = (
        "consistency=textual, metric=rouge_l, loss=dissimilarity, delta=0.1, epsilon=0.05, p_value=hoeffding_bentkus"
    )
    second = first.replace("delta=0.1", "delta=0.01")
    with _refused(message.format(first=first, second=second)):
        build_manifest().calibration(**asked)


def test_calibration_does_not_guess() -> None:
    """If several entries match, the error lists them and says how to choose."""
    other = build_calibration(epsilon=0.1)
    manifest = build_manifest(calibrations=(build_calibration(), other))
    assert manifest.calibration(consistency="textual", metric="rouge_l", delta=0.1, epsilon=0.1) == other
    first = (
        "consistency=textual, metric=rouge_l, loss=dissimilarity, delta=0.1, epsilon=0.05, p_value=hoeffding_bentkus"
    )
    second = first.replace("0.05", "0.1")
    with _refused(
        f"2 calibrations have consistency=textual, metric=rouge_l, delta=0.1. Say which epsilon: {first}; {second}."
    ):
        manifest.calibration(consistency="textual", metric="rouge_l", delta=0.1)
    twice = build_manifest(calibrations=(build_calibration(), build_calibration(p_value="hoeffding")))
    with _refused(
        "2 calibrations have consistency=textual, metric=rouge_l, delta=0.1, epsilon=0.05. Choose one from "
        f"`calibrations`: {first}; {first.removesuffix('_bentkus')}."
    ):
        twice.calibration(consistency="textual", metric="rouge_l", delta=0.1, epsilon=0.05)
    tail = build_calibration(loss="dissimilarity>0.3", p_value="exact_binomial")
    both = build_manifest(calibrations=(build_calibration(), tail))
    assert both.calibration(loss="dissimilarity>0.3") == tail
    with pytest.raises(ManifestError, match="Say which loss: "):
        both.calibration(delta=0.1)


@pytest.mark.parametrize("loss", ["relu>1.5", "relu>.3", "signed>0.3", "dissimilarity>", "fear"])
def test_losses_that_are_none_are_refused(loss: str) -> None:
    """A tail has one spelling, and needs a loss that has tails."""
    with pytest.raises(ManifestError, match="loss"):
        build_calibration(loss=loss)
