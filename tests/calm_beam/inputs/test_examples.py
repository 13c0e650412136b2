"""Calibration examples in JSONL."""

import dataclasses
import gzip
import io
import json
from typing import Any

import pytest

from calm_beam.inputs.examples import DataError, Example, RowKeys, parse_example, parse_examples


def _parse(line: bytes | str | dict[str, Any], **changes: Any) -> Example:
    text = json.dumps(line) if isinstance(line, dict) else line
    return parse_example(text, **{"path": "data/a.jsonl", "line_number": 17, **changes})


def test_a_whole_row() -> None:
    """Every field is read, with the row's place; other keys are ignored."""
    row = {"id": "x", "input": "häst ", "references": ["a", ""], "note": 3}
    example = _parse(row, file_index=2)
    assert example == Example(
        id="x", has_own_id=True, input="häst ", input_ids=None, references=("a", ""), file_index=2, line=17
    )


def test_bytes_and_text_read_alike() -> None:
    """A line may be UTF-8 bytes, as files give it, or text."""
    line = '{"input": "häst"}'
    assert _parse(line) == _parse(line.encode()) == _parse(line + "\n")


def test_ids_instead_of_text() -> None:
    """Token ids are kept as they are, in order, with eos or without."""
    example = _parse({"input_ids": [5, 0, 7, 1]})
    assert example.input is None
    assert example.input_ids == (5, 0, 7, 1)
    assert example.references == ()


_ASKED = {"role": "user", "content": "Why?"}


def test_messages_instead_of_text() -> None:
    """The user's text is the input, in any form, and an assistant's answer the reference."""
    plain, answered = _parse({"input": "Why?"}), _parse({"input": "Why?", "references": ["So."]})
    assert _parse({"messages": [_ASKED]}) == plain
    parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]
    assert _parse({"messages": [{"role": "user", "content": parts}]}) == plain
    assert _parse({"messages": [_ASKED, {"role": "assistant", "content": "So."}]}) == answered
    assert _parse({"messages": [_ASKED], "references": ["So."]}) == answered
    keys = RowKeys(inputs="question", targets="answer")
    assert _parse({"messages": [_ASKED, {"role": "assistant", "content": "So."}]}, keys=keys) == answered


def test_a_chat_of_several_turns() -> None:
    """The last text of the user is the input, and turns before it are a part of the prompt, its digests and its id."""
    said = {"role": "assistant", "content": "So."}
    plain, chat = _parse({"input": "Why?"}), _parse({"messages": [_ASKED, said, _ASKED]})
    assert (chat.input, chat.earlier, chat.references) == ("Why?", ("Why?", "So."), ())
    assert (plain.earlier, plain.prompt, _parse({"input_ids": [5]}).prompt) == (None, "Why?", (5,))
    assert chat.prompt == [_ASKED, said, _ASKED]
    answered = _parse({"messages": [_ASKED, said, _ASKED, {"role": "assistant", "content": "No."}]})
    assert (answered.prompt, answered.references) == (chat.prompt, ("No.",))
    assert answered.input_digest() == chat.input_digest() != plain.input_digest()
    assert chat.content_digest() != dataclasses.replace(chat, earlier=("Why?", "No.")).content_digest()
    assert len({plain.id, chat.id, answered.id}) == 3


def test_messages_beside_a_prompt_are_ignored() -> None:
    """Messages next to a prompt are ignored, as other keys are."""
    assert _parse({"input": "a", "messages": 3}) == _parse({"input": "a"})


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Why?", "messages is no list; expected [{"),
        ([], "messages are of nobody; expected [{"),
        ([3], "each of messages must be an object with role and content."),
        ([{"role": "user"}], "the content of a message must be a text, or parts of type text."),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "must be a text, or parts of type text."),
        ([{"role": "user", "content": "  "}], "input is empty."),
        ([{"role": "system", "content": "Be brief."}, _ASKED], "messages has a system message. Leave it out: "),
        ([_ASKED, _ASKED], "messages are of user, user; expected [{"),
        ([_ASKED, {"role": "tool", "content": "3"}, _ASKED], "messages are of user, tool, user; expected [{"),
        ([_ASKED, {"role": "assistant", "content": "\0"}, _ASKED], "holds a NUL character"),
        ([{"role": "assistant", "content": "So."}], "messages are of assistant; expected"),
    ],
)
def test_other_messages_are_refused(messages: Any, message: str) -> None:
    """Other messages are refused with the file, the line and what was expected."""
    with pytest.raises(DataError) as error:
        _parse({"messages": messages})
    assert str(error.value).startswith("data/a.jsonl, line 17: ")
    assert message in str(error.value)


def test_an_answer_in_two_places_is_refused() -> None:
    """An answer in two places is refused, since either could be meant."""
    row = {"messages": [_ASKED, {"role": "assistant", "content": "So."}], "references": ["No."]}
    with pytest.raises(DataError, match=r"has both references and an assistant's message\. Leave one of them out"):
        _parse(row)


def test_padding_at_the_end_is_dropped() -> None:
    """Zeros at the end are padding; those before another id are not. With or without them, it is the same prompt."""
    padded, bare = _parse({"input_ids": [5, 0, 7, 0, 0]}), _parse({"input_ids": [5, 0, 7]})
    assert padded.input_ids == (5, 0, 7)
    assert padded.id == bare.id
    assert padded.input_digest() == bare.input_digest()


_ONE_KEY = "expected exactly one of the keys input and input_ids, got keys"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON: Expecting property name"),
        ("", "is blank"),
        (b'{"input": "\xff"}', "not UTF-8 text: "),
        ('{"input": "a"} {"input": "b"}', "not JSON: Extra data"),
        ("[1, 2]", "expected a JSON object, got list."),
        ("null", "expected a JSON object, got NoneType."),
        ("{}", f"{_ONE_KEY} []."),
        ({"inputs": "a"}, f"{_ONE_KEY} ['inputs']."),
        ({"input": "a", "input_ids": [1]}, f"{_ONE_KEY} ['input', 'input_ids']."),
        ({"input": None}, "input must be a text, got NoneType."),
        ({"input": 5}, "input must be a text, got int."),
        ({"input": ""}, "input is empty."),
        ({"input": " \n\t"}, "input is empty."),
        ({"input_ids": "5 6"}, "input_ids must be a list of integers of at least 0, got '5 6'."),
        ({"input_ids": [5, -1]}, "input_ids must be a list of integers of at least 0, got [5, -1]."),
        ({"input_ids": [5, 1.0]}, "input_ids must be a list of integers of at least 0, got [5, 1.0]."),
        ({"input_ids": [5, True]}, "input_ids must be a list of integers of at least 0, got [5, True]."),
        ({"input_ids": None}, "input_ids must be a list of integers of at least 0, got None."),
        ({"input_ids": []}, "input_ids is empty or holds padding (0) only."),
        ({"input_ids": [0, 0]}, "input_ids is empty or holds padding (0) only."),
        ({"input": "a", "references": "b"}, "references must be a list of texts, got 'b'."),
        ({"input": "a", "references": ["b", None]}, "references must be a list of texts, got ['b', None]."),
        ({"input": "a", "references": None}, "references must be a list of texts, got None."),
        (
            {"input": "a", "references": [[5, 7]]},
            "references must be a list of texts, got [[5, 7]]. Token ids go under ref",
        ),
        (
            {"input": "a", "reference_ids": [5, 7]},
            "each of reference_ids must be a list of integers of at least 0, got 5.",
        ),
        ({"input": "a", "reference_ids": [[5, -7]]}, "each of reference_ids must be a list of integers of at least 0"),
        (
            {"input": "a", "reference_ids": [[2**31]]},
            "each of reference_ids must be at most 2147483647, got 2147483648.",
        ),
        ({"input": "a", "reference_ids": None}, "reference_ids must be a list of lists of token ids, got None."),
        ({"input": "a", "references": [], "reference_ids": []}, "has both references and reference_ids. Leave one of"),
        ('{"input": "a", "id": "x", "input": "b"}', 'key "input" occurs twice in the same object. Every line must be'),
        ('{"input": "a", "meta": {"b": [{"c": 1, "c": 1}]}}', 'key "c" occurs twice in the same object.'),
        ({"input": "a", "id": ""}, "id must be a text that is not empty, got ''."),
        ({"input": "a", "id": 5}, "id must be a text that is not empty, got 5."),
        ({"input": "a", "id": ["x"]}, "id must be a text that is not empty, got ['x']."),
    ],
    ids=str,
)
def test_malformed_rows_are_named(line: bytes | str | dict[str, Any], message: str) -> None:
    """Every malformed row is refused with its file, its line and what is wrong with it."""
    with pytest.raises(DataError) as caught:
        _parse(line)
    assert str(caught.value).startswith(f"data/a.jsonl, line 17: {message}")


@pytest.mark.parametrize("key", ["input", "id", "references"])
def test_text_that_is_no_unicode_is_refused(key: str) -> None:
    r"""Half a surrogate pair, which JSON can spell as \ud800, cannot be stored and is refused when it is read."""
    row = {"input": "a", key: ["\ud800"] if key == "references" else "\ud800"}
    with pytest.raises(DataError, match=r"data/a\.jsonl, line 17: "):
        _parse(row)


@pytest.mark.parametrize("key", ["input", "id", "references", "page"])
def test_nul_characters_are_refused(key: str) -> None:
    """A NUL character, which a vocabulary reads as unknown and no output can have, is refused everywhere."""
    row = {"input": "a", "page": "b", key: ["c", "x\0y"] if key == "references" else "x\0y"}
    with pytest.raises(DataError, match=r"^data/a\.jsonl, line 17: 'x\\x00y' holds a NUL character, which vocab"):
        _parse(row, keys=RowKeys(cluster="page"))


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400", "[NaN]", '{"a": -Infinity}'])
def test_what_is_passed_over_is_json_too(value: str) -> None:
    """Invalid JSON is refused under an unused key too; large integers are valid."""
    with pytest.raises(DataError, match=r"^data/a\.jsonl, line 17: .*(not a number that JSON allows|too large)"):
        _parse(f'{{"input": "a", "score": {value}}}')
    assert _parse(f'{{"input": "a", "score": {10**400}}}').input == "a"


def test_references_may_be_token_ids() -> None:
    """Ids come without padding at their end; equal rows have equal digests, other references others."""
    example = _parse({"input_ids": [5, 1], "reference_ids": [[7, 0, 9, 1, 0, 0], []]})
    assert (example.references, example.reference_ids) == ((), ((7, 0, 9, 1), ()))
    assert example.has_references
    same = _parse({"input_ids": [5, 1], "reference_ids": [[7, 0, 9, 1], []]})
    as_texts = dataclasses.replace(example, references=("seven", ""))
    assert example.id == same.id
    assert example.content_digest() == same.content_digest() == as_texts.content_digest()
    for other in ([[7, 0, 9], []], [[7, 0, 9, 1]], []):
        changed = _parse({"input_ids": [5, 1], "reference_ids": other})
        assert changed.id != example.id
        assert dataclasses.replace(changed, id=example.id).content_digest() != example.content_digest()
    with pytest.raises(DataError, match="line 17: risk consistency needs references"):
        _parse({"input_ids": [5, 1], "reference_ids": []}, keys=RowKeys(needs_references=True))
    assert _parse({"input_ids": [5], "reference_ids": [[]]}, keys=RowKeys(needs_references=True)).has_references


def test_text_references_need_a_vocabulary() -> None:
    """If outputs stay token ids, references that are texts are refused with their row; ids and none at all pass."""
    keys = RowKeys(has_vocabulary=False)
    with pytest.raises(
        DataError, match=r"^data/a\.jsonl, line 17: its references are texts, but outputs are token ids"
    ):
        _parse({"input_ids": [5, 1], "references": ["a"]}, keys=keys)
    assert _parse({"input_ids": [5, 1], "references": []}, keys=keys).references == ()
    assert _parse({"input_ids": [5, 1], "reference_ids": [[5]]}, keys=keys).reference_ids == ((5,),)


@pytest.mark.parametrize(
    ("row", "is_empty"),
    [
        ({}, False),
        ({"references": ["a", "b"]}, False),
        ({"references": ["a", ""]}, True),
        ({"references": [" \n"]}, True),
        ({"reference_ids": [[5], [0]]}, True),
        ({"reference_ids": [[1, 5]]}, True),
        ({"reference_ids": [[5]]}, False),
    ],
    ids=str,
)
def test_empty_references_are_noticed(row: dict[str, Any], is_empty: bool) -> None:
    """Empty references are valid and counted: only an empty output has a score with one."""
    assert _parse({"input": "a", **row}).has_empty_reference == is_empty


def test_ids_too_large_to_store_are_refused() -> None:
    """A token id beyond 32 bits is refused when it is read, not when it is decoded or stored."""
    with pytest.raises(DataError, match=r"data/a\.jsonl, line 17: "):
        _parse({"input_ids": [5, 2**31]})


def test_an_id_is_derived_from_the_content() -> None:
    """Without an id, equal content has equal ids in any place; other content has others."""
    one = _parse({"input": "a", "references": ["b"]})
    assert not one.has_own_id
    assert one.id.startswith("content-")
    assert len(one.id) == len("content-") + 24
    assert _parse({"references": ["b"], "input": "a"}, line_number=99, file_index=4).id == one.id
    assert _parse({"input": "a", "references": ["b"], "id": None}).id == one.id
    others: list[dict[str, Any]] = [
        {"input": "a "},
        {"input": "a"},
        {"input": "a", "references": ["b", "b"]},
        {"input": "b", "references": ["a"]},
        {"input_ids": [5]},
        {"input_ids": [5, 6]},
        {"input": "[5, 6]"},
    ]
    assert len({one.id, *(_parse(other).id for other in others)}) == 1 + len(others)


def test_digests_tell_prompt_from_content() -> None:
    """The prompt's digest depends on the prompt alone; the content's digest also on id and references, but no place."""
    one = _parse({"id": "x", "input": "a", "references": ["b"]})
    other_answer = _parse({"id": "x", "input": "a", "references": ["c"]})
    other_id = _parse({"id": "y", "input": "a", "references": ["b"]})
    elsewhere = _parse({"id": "x", "input": "a", "references": ["b"]}, line_number=3, file_index=1)
    assert one.input_digest() == other_answer.input_digest() == other_id.input_digest()
    assert one.input_digest() != _parse({"input": "b"}).input_digest()
    assert one.content_digest() == elsewhere.content_digest()
    assert len({one.content_digest(), other_answer.content_digest(), other_id.content_digest()}) == 3
    assert len(one.content_digest()) == 32


def test_a_cluster_is_read_where_it_is_asked_for() -> None:
    """The named key gives the cluster, a text or an integer; without a name no cluster is read."""
    row = {"id": "x", "input": "a", "paragraph": "p 1"}
    assert _parse(row).cluster is None
    clustered = _parse(row, keys=RowKeys(cluster="paragraph"))
    assert clustered.cluster == "p 1"
    assert _parse({**row, "paragraph": 17}, keys=RowKeys(cluster="paragraph")).cluster == "17"
    assert clustered.content_digest() != _parse(row).content_digest()
    assert clustered.input_digest() == _parse(row).input_digest()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "has no 'paragraph', by which examples were to be clustered. Every line must name its cluster."),
        ({"paragraph": ""}, "paragraph must be a text that is not empty or an integer, got ''."),
        ({"paragraph": None}, "paragraph must be a text that is not empty or an integer, got None."),
        ({"paragraph": True}, "paragraph must be a text that is not empty or an integer, got True."),
        ({"paragraph": 1.5}, "paragraph must be a text that is not empty or an integer, got 1.5."),
        ({"paragraph": ["p"]}, "paragraph must be a text that is not empty or an integer, got ['p']."),
        ({"paragraph": "\ud800"}, "'\\ud800' is not Unicode text"),
    ],
)
def test_a_row_without_a_cluster_is_named(row: dict[str, Any], message: str) -> None:
    """A row without its cluster is refused with file and line, since a default would feign independence."""
    with pytest.raises(DataError) as caught:
        _parse({"input": "a", **row}, keys=RowKeys(cluster="paragraph"))
    assert str(caught.value).startswith(f"data/a.jsonl, line 17: {message}")


def test_a_row_nested_too_deeply_is_refused() -> None:
    """JSON that is nested too deeply is a malformed row, not a crash."""
    with pytest.raises(DataError, match=r"data/a\.jsonl, line 17: not JSON that we read: nested deeper than"):
        _parse("[" * 200_000)


def _read(content: bytes, *, path: str = "a.jsonl", **options: Any) -> list[Example]:
    return list(parse_examples(io.BytesIO(content), path=path, **options))


_LINES = b'{"input": "a", "references": ["x"]}\n{"input": "b"}\n{"input": "c"}'


@pytest.mark.parametrize("is_compressed", [False, True])
def test_a_file_is_read_line_by_line(is_compressed: bool) -> None:
    """Every line is one example with its line number, the last also without a line break; .gz is read as is."""
    content, path = (gzip.compress(_LINES), "a.jsonl.gz") if is_compressed else (_LINES, "a.jsonl")
    examples = _read(content, path=path, file_index=3)
    assert [(each.input, each.line, each.file_index) for each in examples] == [("a", 1, 3), ("b", 2, 3), ("c", 3, 3)]


def test_an_empty_file_has_no_examples() -> None:
    """A file without lines gives nothing; a blank line is no example."""
    assert _read(b"") == []
    with pytest.raises(DataError, match=r"^a\.jsonl, line 2: is blank"):
        _read(b'{"input": "a"}\n\n{"input": "b"}\n')


@pytest.mark.parametrize("kept", [5, 30, -9])
def test_damaged_gzip_is_refused(kept: int) -> None:
    """A compressed file that was cut is refused by name, after whatever lines could be read."""
    with pytest.raises(DataError, match=r"^a\.jsonl\.gz: damaged gzip data after line \d"):
        _read(gzip.compress(_LINES)[:kept], path="a.jsonl.gz")
    with pytest.raises(DataError, match=r"^a\.jsonl\.gz: damaged gzip data after line 0"):
        _read(_LINES, path="a.jsonl.gz")


def test_clusters_are_read_from_files() -> None:
    """The cluster key is read from every line."""
    lines = b'{"input": "a", "page": 3}\n{"input": "b", "page": "3"}\n'
    assert [example.cluster for example in _read(lines, keys=RowKeys(cluster="page"))] == ["3", "3"]
    with pytest.raises(DataError, match=r"^a\.jsonl, line 1: has no 'page', by which"):
        _read(_LINES, keys=RowKeys(cluster="page"))


def test_references_can_be_required() -> None:
    """If the loss needs references, the first example without any is named with its line."""
    with pytest.raises(
        DataError, match=r"^a\.jsonl, line 2: risk consistency needs references, example content-\w+ has"
    ):
        _read(_LINES, keys=RowKeys(needs_references=True))
