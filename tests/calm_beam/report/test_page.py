"""The page as a file: its content, its size, and no way for texts to become markup."""

import base64
import dataclasses
import hashlib
import pathlib
import re
from typing import Any

import pytest

from calm_beam.evaluation.flops import (
    DecoderSizes,
    flops_appendix_b,
    flops_calm_table,
    full_model_flops,
    shares_of_operations,
)
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs.vocabularies import ChatRecord, VocabularyRecord
from calm_beam.report import LARGEST_PAGE, ReportError, StoredOutputs, build_page, read_calibrated
from calm_beam.report import page as page_module
from calm_beam.report.page import facts
from calm_beam.report.promise import operations_in_words
from tests.calm_beam.manifest.builders import build_manifest
from tests.calm_beam.report.builders import (
    GRID,
    NUM_LAYERS,
    SPECS,
    build_output,
    random_generations,
    write_calibration,
)
from tests.calm_beam.report.pages import ParsedPage, page_data
from tests.calm_beam.report.unpacking import unpack_outputs

_SIZES = DecoderSizes(
    num_layers=NUM_LAYERS, width=16, attention_width=16, mlp_width=32, encoder_width=16, vocab_size=64
)
_EVIL = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>\u2028 & \"'"


def _page(folder: pathlib.Path, **changes: Any) -> str:
    calibrated = read_calibrated(str(folder))
    (generations,) = folder.glob("generations/*")
    arguments: dict[str, Any] = {
        "stored": StoredOutputs.read(str(generations), calibrated.manifest),
        "vocabulary": None,
        "sizes": None,
        "most_examples": 500,
        "seed": 0,
        **changes,
    }
    return build_page(calibrated, arguments.pop("stored"), **arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A calibration of thirty examples."""
    return write_calibration(tmp_path_factory.mktemp("page") / "out", random_generations(30))


def test_chats_are_among_the_facts() -> None:
    """The facts of a report name the chat template and the system message, or say that there is none."""
    plain = dict(facts(build_manifest(vocabulary=None)))
    assert plain["Chat template"] == "none"
    assert "System message" not in plain
    for system, words in ((None, "none"), ("Be brief.", "'Be brief.'")):
        chat = ChatRecord(template="{{ messages }}" * 100, tokens={}, system=system)
        vocabulary = VocabularyRecord(fingerprint=f"sha256:{'1' * 64}", extra_ids=0, chat=chat)
        found = dict(facts(build_manifest(vocabulary=vocabulary)))
        assert found["Chat template"].startswith("{{ messages }}{{")
        assert len(found["Chat template"]) == 200
        assert found["System message"] == words


def test_the_page_shows_what_is_stored(folder: pathlib.Path) -> None:
    """Risks, tests, layers and every output of every example are those of manifest, table and generations."""
    data = page_data(_page(folder))
    calibrated = read_calibrated(str(folder))
    assert data["thresholds"] == list(GRID)
    for entry, shown, rows in zip(calibrated.manifest.calibrations, data["entries"], calibrated.table, strict=True):
        assert shown["chosen"] == (0 if entry.threshold is None else 1 + GRID.index(entry.threshold))
        assert data["objectives"][shown["objective"]]["risks"][1:] == [row.risk for row in rows]
        assert shown["pValues"][1:] == pytest.approx([row.p_value for row in rows], rel=1e-4)
        assert shown["tests"][1:] == [(2 - row.rejected) if row.tested else 0 for row in rows]
        assert data["objectives"][shown["objective"]]["layers"][1:] == [row.layers for row in rows]
    tokens = [int(piece[1:] or 1) for piece in data["pieces"]]
    by_id = {item.example.id: item for item in random_generations(30)}
    assert len(data["examples"]) == 30
    for example in data["examples"]:
        found = unpack_outputs(example["outputs"], tokens)
        expected = by_id[example["id"]].outputs
        assert [output[0] for output in found] == [list(output.tokens) for output in expected]
        assert [output[1] for output in found] == [list(output.exit_layers) for output in expected]


def test_a_page_is_made_again_alike(folder: pathlib.Path) -> None:
    """The same calibration gives the same bytes; another seed gives another order of examples."""
    assert _page(folder) == _page(folder)
    samples = [page_data(_page(folder, seed=seed, most_examples=5))["examples"] for seed in (0, 1)]
    assert [example["id"] for example in samples[0]] != [example["id"] for example in samples[1]]


def test_a_coarser_grid_shows_its_own_outputs(tmp_path: pathlib.Path) -> None:
    """If a part of the decoded grid was calibrated, outputs of that part alone are shown."""
    generations = random_generations(12)
    folder = write_calibration(tmp_path / "out", generations, calibrated=(0.6, 0.0))
    data = page_data(_page(folder))
    assert data["thresholds"] == [0.6, 0.0]
    tokens = [int(piece[1:] or 1) for piece in data["pieces"]]
    first = data["examples"][0]
    (item,) = (item for item in generations if item.example.id == first["id"])
    found = [output[0] for output in unpack_outputs(first["outputs"], tokens)]
    assert found == [list(item.outputs[lane].tokens) for lane in (0, 2, 4)]
    assert len(data["exits"]["tokens"]) == 3


def test_texts_cannot_break_out(tmp_path: pathlib.Path) -> None:
    """Markup in ids, prompts, references, failures and paths stays text, without elements or attributes."""
    generations = random_generations(4)
    for index, item in enumerate(generations):
        example = dataclasses.replace(item.example, id=f"{_EVIL}{index}", input=_EVIL, references=(_EVIL,))
        generations[index] = dataclasses.replace(item, example=example)
    generations[0] = dataclasses.replace(generations[0], outputs=(), failure=_EVIL)
    folder = write_calibration(tmp_path / "out", generations, model=f"/models/{_EVIL}")
    page = _page(folder, remarks=[_EVIL])
    parsed = ParsedPage(page)
    harmless = ParsedPage(_page(write_calibration(tmp_path / "harmless", random_generations(4))))
    assert parsed.tags == harmless.tags
    assert parsed.tags.count("script") == 2
    assert [name for name, _ in parsed.attributes] == [name for name, _ in harmless.attributes]
    data = page_data(page)
    shown = _EVIL.replace("\u2028", "\\u2028")
    assert {example["prompt"] for example in data["examples"]} == {shown}
    assert data["remarks"] == [shown]
    assert "<" not in parsed.texts["script"][0]


def test_nothing_may_be_loaded(folder: pathlib.Path) -> None:
    """The policy allows only the page's own style and script, by their digests; the page has no links."""
    page = _page(folder)
    parsed = ParsedPage(page)
    (policy,) = (value for name, value in parsed.attributes if name == "content" and value and "default-src" in value)
    for kind, text in (("style", parsed.texts["style"][0]), ("script", parsed.texts["script"][1])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert {name for name, _ in parsed.attributes} & {"src", "srcset", "action", "onclick", "onload"} == set()
    assert [value for name, value in parsed.attributes if name == "href"] == ["data:,"]
    assert re.findall(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)[a-z]+\.[a-z]+", page) == []


def test_promises_stand_in_the_html(folder: pathlib.Path) -> None:
    """Every promise is readable without scripts."""
    parsed = ParsedPage(_page(folder))
    promises = [text for text in parsed.texts["li"] if "in expectation" in text]
    assert len(promises) == len(SPECS)


def test_the_page_stays_below_its_limit(tmp_path: pathlib.Path) -> None:
    """Of a set that would take more than 5 MB as many examples are shown as fit, and the page has both numbers."""
    generations = random_generations(800, thresholds=1, length=4)
    for index, item in enumerate(generations):
        example = dataclasses.replace(item.example, input=f"{index}" + "é<" * 1000)
        generations[index] = dataclasses.replace(item, example=example)
    folder = write_calibration(tmp_path / "out", generations, specs=SPECS[:1], thresholds=(0.5,), max_decode_length=4)
    page = _page(folder, most_examples=800)
    data = page_data(page)
    assert 0.97 * LARGEST_PAGE < len(page.encode()) <= LARGEST_PAGE
    assert data["sample"] == {
        "shown": len(data["examples"]),
        "lookedAt": 800,
        "all": 800,
        "seed": 0,
        "hasPieces": False,
    }
    assert 500 < len(data["examples"]) < 800
    assert max(len(example["prompt"]) for example in data["examples"]) == 2000


@pytest.mark.parametrize("limit", [0, 1_000, 4_000])
def test_a_smaller_room_holds_fewer_examples(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """With any room left, the page fills it and no more, with the first examples of the sample."""
    whole = [example["id"] for example in page_data(_page(folder))["examples"]]
    bare = len(_page(folder, most_examples=0).encode())
    monkeypatch.setattr(page_module, "LARGEST_PAGE", bare + 10 + limit)
    page = _page(folder)
    shown = [example["id"] for example in page_data(page)["examples"]]
    assert len(page.encode()) <= bare + 10 + limit
    assert shown == whole[: len(shown)]
    assert (len(shown) > 0) is (limit > 0)
    assert len(shown) < 30


def test_a_page_that_cannot_be_small_is_refused(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If even a page without examples is too large, none is made, and the message says so."""
    monkeypatch.setattr(page_module, "LARGEST_PAGE", 2_000)
    with pytest.raises(ReportError, match="without a single example, and 2,000 are the most"):
        _page(folder)


def test_fine_grids_are_thinned(tmp_path: pathlib.Path) -> None:
    """Of a grid of 500 thresholds some 100 are shown, with each chosen one and each end of a test."""
    grid = tuple(place / 500 for place in reversed(range(500)))
    generations = []
    for item in random_generations(12):
        full = item.outputs[0]
        # One token is lost at every hundredth threshold.
        lengths = [max(1, len(full.tokens) - lane // 100) for lane in range(501)]
        outputs = tuple(build_output(full.tokens[:length], full.exit_layers[:length]) for length in lengths)
        generations.append(dataclasses.replace(item, outputs=outputs))
    folder = write_calibration(tmp_path / "out", generations, thresholds=grid)
    data = page_data(_page(folder))
    shown = set(data["thresholds"])
    assert 100 <= len(shown) <= 100 + 2 * len(SPECS)
    assert data["gridSize"] == 500
    assert {max(grid), min(grid)} <= shown
    for entry in read_calibrated(str(folder)).manifest.calibrations:
        assert {entry.threshold, entry.path[-1].threshold} - {None} <= shown


@pytest.mark.parametrize("interval", [1, 3])
def test_operations_are_counted_at_chosen_thresholds(interval: int, tmp_path: pathlib.Path) -> None:
    """Factors are the full model's operations divided by those with exits; never exit is 1.

    The first is that of the terminal, where that follows from the mean layers; else it is counted, as the other one is.
    """
    rule = ExitRule(min_exit_layer=2, exit_interval=interval)
    generations = random_generations(20)
    for index, item in enumerate(generations):
        ids = tuple(range(2, 4 + index))
        example = dataclasses.replace(item.example, input=None, input_ids=ids, reference_ids=((7,),))
        generations[index] = dataclasses.replace(item, example=example)
    folder = write_calibration(tmp_path / "out", generations, rule=rule)
    data = page_data(_page(folder, sizes=_SIZES))
    assert data["savings"]["examples"] == 20
    manifest = read_calibrated(str(folder)).manifest
    shares = shares_of_operations(manifest, _SIZES)
    assert data["savings"]["byMeanLayers"] == (interval == 1)
    for entry, share, shown, factors in zip(
        manifest.calibrations, shares, data["entries"], data["savings"]["flops"], strict=True
    ):
        assert (share is None) == (interval == 3 or entry.threshold is None)
        if entry.threshold is None:
            assert factors == [1, 1]
            continue
        lane = 1 + GRID.index(entry.threshold)
        if share is not None:
            assert factors[0] == pytest.approx(1 / share)
            assert shown["operations"] == operations_in_words([1 / share])
        for formula, factor in list(zip((flops_appendix_b, flops_calm_table), factors, strict=True))[
            share is not None :
        ]:
            full = early = 0
            for index, item in enumerate(generations):
                exits = item.outputs[lane].exit_layers
                full += full_model_flops(len(exits), _SIZES, source_length=2 + index).sum()
                early += formula(exits, _SIZES, source_length=2 + index, rule=rule).sum()
            assert factor == pytest.approx(full / early)
    assert any(entry.threshold is not None for entry in read_calibrated(str(folder)).manifest.calibrations)


def test_without_generations(folder: pathlib.Path) -> None:
    """Without generations the page has promises and curves only."""
    data = page_data(_page(folder, stored=None, remarks=["why"]))
    assert (data["exits"], data["sample"], data["examples"], data["remarks"]) == (None, None, [], ["why"])
    assert len(data["entries"]) == len(SPECS)


def test_failures_are_listed(tmp_path: pathlib.Path) -> None:
    """Failed examples are listed with their reasons, counted, and shown among the examples."""
    generations = random_generations(8)
    generations[2] = dataclasses.replace(generations[2], outputs=(), failure="lost in decoding")
    data = page_data(_page(write_calibration(tmp_path / "out", generations)))
    assert data["failures"] == [["row-2", "lost in decoding"]]
    assert ["failed, loss 1", "failed, loss 1", 1, True] in data["counts"]
    assert data["exits"]["outputs"] == 7
    (example,) = (example for example in data["examples"] if "failure" in example)
    assert (example["id"], example["failure"]) == ("row-2", "lost in decoding")


def test_no_path_tells_whose_machine_it_was(tmp_path: pathlib.Path) -> None:
    """Local paths are reduced to their last names everywhere; cloud addresses are complete."""
    generations = random_generations(4)
    generations[0] = dataclasses.replace(generations[0], outputs=(), failure="/home/ada/secret/code.py: broken")
    remarks = ["the model is not available: checkpoint /home/ada/secret/models/tiny: no such directory."]
    folder = write_calibration(
        tmp_path / "out",
        generations,
        model="/home/ada/secret/models/tiny",
        patterns=("/home/ada/secret/data/a*.jsonl", "gs://bucket/some/where/b.jsonl"),
    )
    page = _page(folder, remarks=remarks)
    assert "secret" not in page.replace("…/secret/code.py", "")
    assert "/home" not in page
    data = page_data(page)
    facts = dict(data["facts"])
    assert facts["Model"] == "…/models/tiny (4 decoder layers)"
    assert facts["Calibration set"] == "…/data/a*.jsonl, gs://bucket/some/where/b.jsonl"
    assert data["remarks"] == ["the model is not available: checkpoint …/models/tiny: no such directory."]
    assert data["failures"] == [["row-0", "…/secret/code.py: broken"]]
    assert [row["failure"] for row in data["examples"] if "failure" in row] == ["…/secret/code.py: broken"]


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (ExitRule(), "after every layer"),
        (ExitRule(min_exit_layer=2), "after layer 2 and every later one"),
        (ExitRule(exit_interval=2), "after layers 1, 3, or the last one"),
        (ExitRule(min_exit_layer=2, exit_interval=2), "after layer 2 or the last one"),
        (ExitRule(min_exit_layer=4), "after the last layer only"),
    ],
)
def test_layers_that_may_exit_are_named(tmp_path: pathlib.Path, rule: ExitRule, said: str) -> None:
    """The page names the layers that may exit by their numbers."""
    data = page_data(_page(write_calibration(tmp_path / "out", random_generations(4), rule=rule)))
    assert dict(data["facts"])["Exits"] == said


def test_what_cannot_be_seen_is_written_out(tmp_path: pathlib.Path) -> None:
    """Control and direction characters are shown as escapes, in names and texts; texts keep their lines."""
    turning = "a\u202eb\u2066c\x1b[31m\x85\u200fd\n"
    generations = random_generations(3)
    for index, item in enumerate(generations):
        example = dataclasses.replace(item.example, id=f"{turning}{index}", input=turning, references=(turning,))
        generations[index] = dataclasses.replace(item, example=example)
    generations[0] = dataclasses.replace(generations[0], outputs=(), failure=turning)
    page = _page(write_calibration(tmp_path / "out", generations, model=f"/models/{turning}"), remarks=[turning])
    assert not set("\u202e\u2066\x1b\x85") & set(page)
    text = "a\\u202eb\\u2066c\\x1b[31m\\x85\\u200fd\n"
    name = text.replace("\n", "\\n")
    data = page_data(page)
    assert data["model"] == name
    assert data["remarks"] == [text]
    assert data["failures"] == [[f"{name}0", text]]
    for example in data["examples"]:
        assert example["id"].startswith(name)
        assert (example["prompt"], example["references"]) == (text, [text])
    assert f"<title>calm-beam: {name}</title>" in page


def test_the_title_keeps_its_direction(tmp_path: pathlib.Path) -> None:
    """A name that is read from the right is isolated in the title, which has no elements."""
    page = _page(write_calibration(tmp_path / "out", random_generations(3), model="/models/שם"))
    assert "<title>calm-beam: \u2068שם\u2069</title>" in page
