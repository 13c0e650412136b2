"""A sample of prompts that a command decodes in one process."""

from collections.abc import Sequence

from calm_beam.decoding.prompts import Prompt, encode_prompt
from calm_beam.inputs import Reading, place_of, read_examples
from calm_beam.inputs.examples import DataError, Example, mixed_prompts
from calm_beam.outputs.prepared import PreparedSweep
from calm_beam.text import counted


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


def encoded_prompts(run: PreparedSweep, examples: Sequence[Example]) -> list[Prompt]:
    """Returns the examples as the model sees them.

    Raises:
      ValueError: If one cannot be encoded, or is too long where that is an error.
    """
    vocab_size = run.checkpoint.config.vocab_size
    return [
        encode_prompt(
            example, run.vocabulary, settings=run.settings, vocab_size=vocab_size, on_long=run.request.on_long
        )
        for example in examples
    ]


def sample_in_words(prompts: Sequence[Prompt], total: int) -> str:
    """Returns which examples, of how many, a sample has."""
    used = len(prompts)
    which = (
        "all examples" if used == total else f"of {counted(total, 'example')}, those whose ids have the smallest hashes"
    )
    cut = sum(prompt.truncated for prompt in prompts)
    return f"{counted(used, 'prompt')}: {which}; {cut} cut."
