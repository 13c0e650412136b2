"""The devices, precisions and models for which programs are compiled: some for every change, all before a release."""

import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Self

from benchmarks.programs import LARGE_MODELS, MODELS, Program, large_programs, programs
from calm_beam.precision import DTYPES, Precision

from .described import GPUS, TPUS, devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A set of programs that one process compiles.

    Attributes:
      device: One of `TPUS` or `GPUS`.
      count: Devices that share the model.
      dtype: One of `DTYPES`.
      model: One of `MODELS` or `LARGE_MODELS`.
      only: A regular expression for the names of programs; empty for all.
    """

    device: str
    count: int
    dtype: str
    model: str
    only: str = ""

    @property
    def precision(self) -> Precision:
        """The model's precision."""
        return Precision(dtype=self.dtype)

    def programs(self) -> Iterator[Program]:
        """Yields the programs to compile."""
        found = devices(self.device, self.count)
        if self.model in LARGE_MODELS:
            every = large_programs(LARGE_MODELS[self.model], self.precision, devices=found)
        else:
            every = programs(MODELS[self.model], self.precision, devices=found)
        return (each for each in every if re.search(self.only, each.name))

    def text(self) -> str:
        """Returns the target as a command-line word."""
        return "/".join((self.device, str(self.count), self.dtype, self.model, self.only))

    @classmethod
    def of(cls, text: str) -> Self:
        """Returns the target for a word that `text` has made."""
        device, count, dtype, model, only = text.split("/", 4)
        return cls(device=device, count=int(count), dtype=dtype, model=model, only=only)


# The fewest programs that show what a change may break.
_LAYERS = r"^(admit|embeddings|decoder layer, state$|decisions, softmax|propagation|confidence)"
_OF_CHANGES = (
    ("v5e", 1, "bfloat16", "T5", rf"{_LAYERS}|^served loop, 1 x 64, (softmax$|state)"),
    (
        "v5e",
        1,
        "float32",
        "T5",
        r"^(decoder layer, state$|decisions, softmax|served loop, 1 x 64, softmax$)",
    ),
    ("v5e", 4, "bfloat16", "T5", rf"{_LAYERS}|^served loop, 1 x 64, (softmax$|state)"),
    ("H100", 1, "float32", "T5", rf"{_LAYERS}|^served loop, 1 x 64, softmax$"),
    (
        "H100",
        4,
        "bfloat16",
        "T5",
        r"^(decoder layer, state$|decisions, softmax|served loop, 1 x 64, softmax$)",
    ),
    (
        "v5e",
        1,
        "bfloat16",
        "Llama",
        r"^(shared prefix|decoder layer, state$|served loop, 1 x 64, softmax$)",
    ),
    ("v5e", 1, "float32", "T5", r"^(loss and gradients|Adafactor, update|scores of the classifier)"),
)


def of_changes() -> list[Target]:
    """Returns the targets for every change, which take four minutes on two idle cores."""
    return [
        Target(device=device, count=count, dtype=dtype, model=model, only=only)
        for device, count, dtype, model, only in _OF_CHANGES
    ]


def every_target() -> list[Target]:
    """Returns all targets: every program in both dtypes for TPU v5e and H100, on one device and four.

    Other GPUs have the steps of both models, on one device and four; other TPUs only those of T5, on one device.
    """
    main, steps = ("v5e", "H100"), rf"{_LAYERS}|^served loop, 1 x 64, softmax$"
    found = [
        Target(device=device, count=count, dtype=dtype, model=model)
        for device, count, dtype, model in itertools.product(main, (1, 4), DTYPES, MODELS)
    ]
    for others, counts, models in ((GPUS, (1, 4), ("T5", "Llama")), (TPUS, (1,), ("T5",))):
        found += [
            Target(device=device, count=count, dtype=dtype, model=model, only=steps)
            for device, count, dtype, model in itertools.product(others, counts, DTYPES, models)
            if device not in main
        ]
    return found
