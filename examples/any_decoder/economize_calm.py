"""CALM decoding by economize, for the 46 kinds of Hugging Face models that it supports, with our tests.

    decoder = EconomizeCalm("SmolLM2-135M-Instruct", min_layer=20)
    pipeline | transforms.ReadExamples("data.jsonl") | transforms.SweepWith(
        decoder, settings=(1.0, 0.9, 0.7, 0.5), output="swept", decoder_name="SmolLM2-135M-Instruct, economize 0.3.2"
    )

Settings are thresholds of its confidence; 1 never exits.
"""

import dataclasses
from typing import Any


class EconomizeCalm:
    """Answers greedily at every threshold."""

    def __init__(
        self, model: str, *, confidence: str = "softmax", min_layer: int = 1, max_new_tokens: int = 64
    ) -> None:
        """Stores only the model's name: this object is sent to workers, and weights need not be."""
        self._folder, self._most = model, max_new_tokens
        self._asked = {"confidence": confidence, "min_layer": min_layer, "threshold": 1.0}

    def setup(self) -> None:
        """Loads the model, once in every process."""
        import economize
        from economize.techniques.dynamic_depth.calm import CalmConfig
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(self._folder)
        base = AutoModelForCausalLM.from_pretrained(self._folder).eval()
        self._model = economize.apply(base, CalmConfig(**self._asked))

    def __call__(self, prompts: list[str], settings: tuple[float, ...]) -> dict[float, list[str]]:
        """Returns the answers by threshold."""
        import torch

        encoded = [torch.tensor(self._tokenizer.encode(prompt)) for prompt in prompts]
        calm, answers = self._model.techniques["calm"], {}
        for threshold in settings:
            calm.config = dataclasses.replace(calm.config, threshold=float(threshold))
            answers[threshold] = [self._answer(prompt) for prompt in encoded]
        return answers

    def _answer(self, prompt: Any) -> str:
        tokens = self._model.decode(prompt, self._most).tokens.reshape(-1).tolist()
        # economize may generate beyond the end token.
        end = self._tokenizer.eos_token_id
        kept = tokens[: tokens.index(end)] if end in tokens else tokens
        return self._tokenizer.decode(kept, skip_special_tokens=True)
