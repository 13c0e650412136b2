"""All examples of a data set that is small enough to be held."""

from collections.abc import Sequence

from .examples import DataError, Example, mixed_prompts
from .formats import place_of, read_examples
from .reading import Reading


def read_all_examples(paths: Sequence[str], reading: Reading) -> list[Example]:
    """Returns the examples of all files, each id of its own once, and with references either all or none.

    Raises:
      DataError: If they are otherwise; names two examples.
      OSError: If a file cannot be read.
    """
    examples = [
        example for index, path in enumerate(paths) for example in read_examples(path, reading, file_index=index)
    ]
    seen: dict[str, Example] = {}
    for example in examples:
        other = seen.setdefault(example.id, example)
        if other is not example and (example.has_own_id or other.has_own_id):
            places = " and ".join(
                place_of(paths[each.file_index], each.line, reading=reading) for each in (other, example)
            )
            raise DataError(f"id {example.id!r} occurs twice ({places}). Ids must be unique.")
        if (example.input is None) != (examples[0].input is None):
            both = sorted((example, examples[0]), key=lambda each: each.input is None)
            raise DataError(
                mixed_prompts(*(place_of(paths[each.file_index], each.line, reading=reading) for each in both))
            )
        if example.has_references != examples[0].has_references:
            raise DataError(
                f"example {example.id} has {'' if example.has_references else 'no '}references, example "
                f"{examples[0].id} differs: a mean over some of them would be of another sample. Give all examples "
                "references, or none."
            )
    return examples
