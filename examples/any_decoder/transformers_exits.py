"""A causal language model of transformers that exits after fewer of its layers, as in LayerSkip's drafting.

    decoder = TransformersExits("layerskip-llama3.2-1B")
    pipeline | transforms.ReadExamples("data.jsonl") | transforms.SweepWith(
        decoder, settings=(16, 12, 8), output="swept", decoder_name="layerskip-llama3.2-1B, transformers 5.24"
    )

Settings are numbers of layers, the full number first. Prompts of a call are padded to one width, which may change an
output at a near tie: use `batch_size=1` if the served model answers one prompt at a time.
"""

from typing import Any

from calm_beam.transforms import SettingOutput


class TransformersExits:
    """Answers greedily after the first layers, as many as a setting says; the norm and head are the model's own."""

    def __init__(self, model: str, *, max_new_tokens: int = 64) -> None:
        """Stores only the model's name: this object is sent to workers, and weights need not be."""
        self._folder, self._most = model, max_new_tokens

    def setup(self) -> None:
        """Loads the model, once in every process."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(self._folder, padding_side="left")
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model = AutoModelForCausalLM.from_pretrained(self._folder).eval()
        self._layers = self._model.config.num_hidden_layers

    def __call__(self, prompts: list[str], settings: tuple[int, ...]) -> dict[int, list[SettingOutput]]:
        """Returns the answers by number of layers."""
        encoded = self._tokenizer(prompts, return_tensors="pt", padding=True)
        return {layers: self._answers(encoded, layers) for layers in settings}

    def _answers(self, encoded: Any, layers: int) -> list[SettingOutput]:
        if not 1 <= layers <= self._layers:
            raise ValueError(f"the model has {self._layers} layers, and {layers} are asked for")
        # `generate` drafts in the same way with assistant_early_exit.
        self._model.config.num_hidden_layers = layers
        try:
            found = self._model.generate(
                **encoded, max_new_tokens=self._most, do_sample=False, pad_token_id=self._tokenizer.pad_token_id
            )
        finally:
            self._model.config.num_hidden_layers = self._layers
        answers = found[:, encoded["input_ids"].shape[1] :].tolist()
        texts = self._tokenizer.batch_decode(answers, skip_special_tokens=True)
        return [SettingOutput(text=text, cost=layers) for text in texts]
