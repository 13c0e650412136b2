"""Writes the tokenizer in a GGUF file's metadata as transformers' tokenizer files.

Source: llama.cpp `src/llama-vocab.cpp` for the meaning of `tokenizer.ggml.model` and `tokenizer.ggml.pre`; transformers
`convert_slow_tokenizer.py` for SentencePiece's BPE in a form with merges.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from calm_beam.inputs.vocabularies.tokenizer_json import CONFIG, TEMPLATE, TOKENIZER

from .gguf_file import GGUFFile
from .metadata import CheckpointError, shortened

# Pre-tokenization of GPT-2, which `ByteLevel` does by itself, and of Llama 3 and Qwen2.
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_GPT_2: Sequence[Mapping[str, Any]] = ({**_BYTES, "use_regex": True},)
_SINGLE_DIGITS: Sequence[Mapping[str, Any]] = ({"type": "Digits", "individual_digits": True}, *_GPT_2)


def _by_regex(regex: str) -> Sequence[Mapping[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return (split, {**_BYTES, "use_regex": False})


# Pre-tokenizers, by `tokenizer.ggml.pre`.
_CUTS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "gpt-2": _GPT_2,
    "olmo": _GPT_2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama-bpe": _by_regex(_LLAMA_3),
    "dbrx": _by_regex(_LLAMA_3),
    "qwen2": _by_regex(_LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")),
}
# For these, words that are tokens are not merged, and `<|begin_of_text|>` begins a text unless a key says otherwise.
_WHOLE_WORDS = ("llama-bpe",)
# For these, texts are normalised to NFC first.
_COMPOSED = ("qwen2",)
# Families of which some special tokens strip the spaces next to them. GGUF does not say which ones.
_STRIPPING = ("phi3",)
# Kinds of tokens in `tokenizer.ggml.token_type`.
_CONTROL, _USER_DEFINED = 3, 4
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_SPACE = "▁"


def write_gguf_tokenizer(path: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Writes the tokenizer of a GGUF file and its chat template, and returns the path of the `tokenizer.json`.

    Args:
      path: The model's file.
      folder: The folder to write to.

    Raises:
      CheckpointError: If there is no tokenizer, or its pre-tokenization is not supported, or the metadata do not
        determine its ids.
      MissingExtraError: If `gguf` is not installed.
    """
    file = GGUFFile(path)
    tokens, types = file.value("tokenizer.ggml.tokens"), file.value("tokenizer.ggml.token_type")
    if not tokens:
        raise CheckpointError(f"{path}: has no tokenizer (tokenizer.ggml.tokens).")
    architecture = file.value("general.architecture")
    if architecture in _STRIPPING:
        raise CheckpointError(
            f"{path}: some special tokens of {architecture} strip the spaces next to them, and no key says which "
            "ones. Put the model's own tokenizer.json next to the file."
        )
    types = types or [1] * len(tokens)
    kind = file.value("tokenizer.ggml.model")
    makers = {"gpt2": _of_bytes, "llama": _of_pieces}
    if kind not in makers:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.model is {shortened(repr(kind))}; only {', '.join(makers)} are supported."
        )
    names = {name: file.value(f"tokenizer.ggml.{key}_token_id") for key, name in _NAMED.items()}
    if any(index is not None and not 0 <= index < len(tokens) for index in names.values()):
        raise CheckpointError(f"{path}: special tokens {names} are not all among the {len(tokens)} tokens.")
    special = {name: tokens[index] for name, index in names.items() if index is not None}
    made, adds_bos = makers[kind](file, tokens)
    if len(made["model"]["vocab"]) != len(tokens):
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens names some tokens twice.")
    added = [
        {
            "id": index,
            "content": token,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
            "special": kind == _CONTROL,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    around = {
        "bos_token": file.value("tokenizer.ggml.add_bos_token", default=adds_bos),
        "eos_token": file.value("tokenizer.ggml.add_eos_token", default=False),
    }
    fields = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **made}
    if processor := _around({name: special.get(name) for name, is_on in around.items() if is_on}, tokens):
        fields["post_processor"] = processor
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TOKENIZER).write_text(json.dumps(fields, ensure_ascii=False), encoding="utf-8")
    config = {**special, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / CONFIG).write_text(json.dumps(config, ensure_ascii=False) + "\n", encoding="utf-8")
    template = file.value("tokenizer.chat_template")
    if template is not None:
        (folder / TEMPLATE).write_text(template, encoding="utf-8")
    return folder / TOKENIZER


def _of_bytes(file: GGUFFile, tokens: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """Returns the parts of a byte-level BPE, and whether it adds a begin token by default."""
    pre = file.value("tokenizer.ggml.pre")
    if pre not in _CUTS:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.pre is {shortened(repr(pre))}, which says how texts are cut; only "
            f"{', '.join(_CUTS)} are known here. Put the model's own tokenizer.json next to the file."
        )
    cuts = _CUTS[pre]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": pre in _WHOLE_WORDS,
        "vocab": {token: index for index, token in enumerate(tokens)},
        "merges": file.value("tokenizer.ggml.merges", default=[]),
    }
    parts = {
        "normalizer": {"type": "NFC"} if pre in _COMPOSED else None,
        "pre_tokenizer": dict(cuts[0]) if len(cuts) == 1 else {"type": "Sequence", "pretokenizers": list(cuts)},
        "post_processor": None,
        "decoder": {**_BYTES, "use_regex": True},
        "model": model,
    }
    return parts, pre in _WHOLE_WORDS


def _of_pieces(file: GGUFFile, tokens: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """Returns the parts of a SentencePiece BPE, whose merges are derived from the scores of its pieces."""
    scores = file.value("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.scores must have a number for each token.")
    if file.value("tokenizer.ggml.remove_extra_whitespaces", default=False):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.remove_extra_whitespaces is on; that is not supported.")
    unknown = file.value("tokenizer.ggml.unknown_token_id")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    begins = file.value("tokenizer.ggml.add_space_prefix", default=True)
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None if unknown is None else tokens[unknown],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": _merges(vocabulary, scores),
    }
    parts = {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": _SPACE}] if begins else []), space],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if begins else []),
            ],
        },
        "model": model,
    }
    return parts, True


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[list[str]]:
    """Returns all pairs of pieces that make another piece, the piece with the highest score first."""
    found: list[tuple[float, int, int, list[str]]] = []
    for piece, index in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[index], vocabulary[left], vocabulary[right], [left, right]))
    return [pair for *_, pair in sorted(found)]


def _around(named: Mapping[str, str | None], tokens: Sequence[str]) -> dict[str, Any] | None:
    """Returns the post-processor that adds tokens before and after a text; None if there are none."""
    placed = {name: token for name, token in named.items() if token is not None}
    if not placed:
        return None

    def sequence(which: str, number: int) -> list[dict[str, Any]]:
        parts = [{"Sequence": {"id": which, "type_id": number}}]
        if "bos_token" in placed:
            parts.insert(0, {"SpecialToken": {"id": placed["bos_token"], "type_id": number}})
        if "eos_token" in placed:
            parts.append({"SpecialToken": {"id": placed["eos_token"], "type_id": number}})
        return parts

    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": [*sequence("A", 0), *sequence("B", 1)],
        "special_tokens": {
            token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]} for token in placed.values()
        },
    }
