"""How much thinking is enough? Sweeps a reasoning model's client over budgets, and proves the smallest one that is.

The client is simulated, and answers at once: put yours in its place.

    python examples/any_decoder/thinking_budget.py
"""

import json
import pathlib
import random
import tempfile
from collections.abc import Iterable

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

import calm_beam as calm
from calm_beam import transforms

# In tokens, fixed before any loss is seen: the safest first. The losses of the others are relative to its answers.
BUDGETS = (1600, 800, 400, 200)
_TOKENS_OF_A_STEP = 100


class Client:
    """A simulated client of a reasoning model: it adds numbers, one after the other, and thinks long about each."""

    def think(self, question: str, *, budget: int) -> list[int]:
        """Returns its answer after each step that the budget allows."""
        sums, total = [], 0
        for number in question.removesuffix(" =").split(" + "):
            if _TOKENS_OF_A_STEP * (len(sums) + 1) > budget:
                break
            total += int(number)
            sums.append(total)
        return sums


class ThinkingBudget:
    """Answers under every budget. One trace of thoughts, the longest, contains the answers of all budgets."""

    def setup(self) -> None:
        """Connects, once in every process."""
        self._client = Client()

    def __call__(self, prompts: list[str], settings: tuple[int, ...]) -> dict[int, list[transforms.SettingOutput]]:
        """Returns the answers by budget, each with the tokens that it took."""
        traces = [self._client.think(prompt, budget=max(settings)) for prompt in prompts]
        return {budget: [_answer(trace, budget) for trace in traces] for budget in settings}


def _answer(trace: list[int], budget: int) -> transforms.SettingOutput:
    steps = trace[: budget // _TOKENS_OF_A_STEP]
    return transforms.SettingOutput(text=str(steps[-1]), cost=_TOKENS_OF_A_STEP * len(steps))


def questions(count: int = 1000) -> Iterable[dict[str, object]]:
    """Yields sums with their answers; most have few numbers."""
    draw = random.Random(0)
    for index in range(count):
        numbers = [draw.randint(1, 99) for _ in range(min(12, 2 + int(draw.expovariate(0.9))))]
        yield {"id": f"q{index}", "input": " + ".join(map(str, numbers)) + " =", "references": [str(sum(numbers))]}


def main() -> None:
    """Sweeps, certifies and prints which budget is enough."""
    with tempfile.TemporaryDirectory() as folder:
        data, swept = pathlib.Path(folder, "questions.jsonl"), f"{folder}/swept"
        data.write_text("".join(json.dumps(row) + "\n" for row in questions()), encoding="utf-8")
        with beam.Pipeline(options=PipelineOptions([])) as pipeline:
            _ = (
                pipeline
                | transforms.ReadExamples(str(data), needs_references=True)
                | transforms.SweepWith(
                    ThinkingBudget(),
                    settings=BUDGETS,
                    output=swept,
                    decoder_name="made-up client 1",
                    batch_size=100,
                    decode_timeout=600,
                )
            )
        manifest = calm.certify(
            outputs=swept, metric="exact_match", consistency="risk", delta=(0.02, 0.1), output=swept
        )
    for entry in [] if manifest is None else manifest.calibrations:
        print(f"delta {entry.delta:g}: budget {entry.setting}, {entry.cost:.0f} tokens, risk {entry.risk:.4f}")


if __name__ == "__main__":
    main()
