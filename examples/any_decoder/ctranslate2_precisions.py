"""A language model of CTranslate2 at several precisions: which of them may be served in place of the first?

    ct2-transformers-converter --model TinyLlama-1.1B --output_dir tinyllama

    decoder = CTranslate2Precisions("tinyllama", tokenizer="TinyLlama-1.1B/tokenizer.model")
    pipeline | transforms.ReadExamples("data.jsonl") | transforms.SweepWith(
        decoder, settings=("float32", "int16", "int8"), output="swept", decoder_name="TinyLlama-1.1B, CTranslate2 4.8"
    )

Settings are CTranslate2's compute types. CTranslate2 silently replaces a type that the machine does not support; here
that is an error.
"""

from calm_beam.transforms import SettingOutput

_BITS = {"float32": 32, "int16": 16, "float16": 16, "bfloat16": 16, "int8": 8}


class CTranslate2Precisions:
    """Answers greedily at every precision; the cost of an answer is the number of bits of a weight."""

    def __init__(self, model: str, *, tokenizer: str, max_length: int = 64) -> None:
        """Stores only the model's name: this object is sent to workers, and weights need not be."""
        self._folder, self._pieces, self._most = model, tokenizer, max_length

    def setup(self) -> None:
        """Loads the tokenizer, once in every process."""
        import sentencepiece

        self._tokenizer = sentencepiece.SentencePieceProcessor(model_file=self._pieces)
        self._models = {}

    def __call__(self, prompts: list[str], settings: tuple[str, ...]) -> dict[str, list[SettingOutput]]:
        """Returns the answers by precision."""
        encoded = [self._tokenizer.encode(prompt, out_type=str) for prompt in prompts]
        return {precision: self._answers(encoded, precision) for precision in settings}

    def _answers(self, encoded: list[list[str]], precision: str) -> list[SettingOutput]:
        import ctranslate2

        if precision not in self._models:
            model = ctranslate2.Generator(self._folder, compute_type=precision)
            # CTranslate2 reports int8 by its full name, int8_float32.
            if not model.compute_type.startswith(precision):
                raise ValueError(f"this machine computes {precision} as {model.compute_type}")
            self._models[precision] = model
        found = self._models[precision].generate_batch(
            encoded, max_length=self._most, sampling_topk=1, include_prompt_in_result=False
        )
        texts = [self._tokenizer.decode(result.sequences[0]) for result in found]
        return [SettingOutput(text=text, cost=_BITS[precision]) for text in texts]
