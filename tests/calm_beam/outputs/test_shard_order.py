"""Names of examples without ids."""

from calm_beam.inputs.examples import Example, RowKeys, example_of_row
from calm_beam.outputs.sharding import with_unique_ids


def _example(line: int, **row: object) -> Example:
    return example_of_row({"input": "a", **row}, where="here", position=line)


def test_a_number_is_no_name_of_another() -> None:
    """Rows of an earlier run's files have numbered ids, which equal rows without ids do not get."""
    derived = _example(1).id
    own = {f"{derived}-2": 3, f"{derived}-4": 4}
    examples = [
        *(_example(line) for line in (1, 2, 5)),
        *(_example(line, id=name, input="b") for name, line in own.items()),
    ]
    named = {example.id: example.line for example in with_unique_ids(examples)}
    assert named == {derived: 1, f"{derived}-3": 2, f"{derived}-5": 5, **own}
    assert {example.id: example.line for example in with_unique_ids(examples[::-1])} == named


def test_prompts_of_two_groups_keep_their_names() -> None:
    """A pipeline's prompts have no place in a file and come in any order, which does not change their names."""
    keys = RowKeys(group="lang")
    rows = [
        example_of_row({"input": "a", "lang": name}, where="here", position=1, keys=keys) for name in ("en", "fr", "it")
    ]
    assert with_unique_ids(rows) == with_unique_ids(rows[::-1])
