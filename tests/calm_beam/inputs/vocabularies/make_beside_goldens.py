"""Makes `beside_goldens/`: tokenizer folders that differ in their further files, and the ids of transformers.

Needs transformers, which the project itself never does. Each version adds its ids to those of the other: made with
4.57.6 and 5.24.0, the first of which makes the T5's files, too:

    python -m tests.calm_beam.inputs.vocabularies.make_beside_goldens
"""

import copy
import io
import itertools
import json
import pathlib
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

from tests.calm_beam.inputs.vocabularies.make_tokenizer_goldens import FOLDER as TOKENIZERS
from tests.calm_beam.inputs.vocabularies.make_tokenizer_goldens import TEXTS as TRAINING_TEXTS

FOLDER = pathlib.Path(__file__).with_name("beside_goldens")
EXPECTED = FOLDER / "expected.json"
TEXTS = (
    "the cat <|user|> sat <|x|>",
    "cat<|user|>on",
    " two  spaces and a line<|x|> ",
    "a river</s>is",
    "cat<extra_id_1>on",
    "the <extra_id_0><extra_id_2> is",
    "a {river} is < cold <unk>",
    "",
)
AROUND = "a cold river"
_USER, _X = "<|user|>", "<|x|>"
_CLASSES = (
    "PreTrainedTokenizerFast",
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "GemmaTokenizerFast",
    "CodeLlamaTokenizer",
    "CohereTokenizerFast",
    "GPTNeoXTokenizerFast",
    "Qwen2Tokenizer",
    "GPT2Tokenizer",
)


def _token(content: str, **flags: bool) -> dict[str, Any]:
    unset = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"__type": "AddedToken", "content": content, **unset, "special": True, **flags}


def _plain(content: str, **flags: bool) -> dict[str, Any]:
    return {key: value for key, value in _token(content, **flags).items() if key != "__type"}


def _additions(first: int, eos: tuple[int, str]) -> dict[str, dict[str, Any]]:
    """Returns the forms in which files name tokens, by the name of the case: contents of files by their names."""
    decoder = {str(eos[0]): _plain(eos[1])}
    forms: dict[str, tuple[Any, Any, Any]] = {
        "nothing": ({}, None, None),
        "additional": ({"additional_special_tokens": [_USER, _X]}, None, None),
        "additional with flags": ({"additional_special_tokens": [_token(_USER, lstrip=True), _token(_X)]}, None, None),
        "additional in the map": ({}, {"additional_special_tokens": [_USER, _X]}, None),
        "additional in the map with flags": ({}, {"additional_special_tokens": [_plain(_USER, lstrip=True)]}, None),
        "additional in both": ({"additional_special_tokens": [_X]}, {"additional_special_tokens": [_USER, _X]}, None),
        "additional empty and in the map": (
            {"additional_special_tokens": []},
            {"additional_special_tokens": [_X]},
            None,
        ),
        "the same additional in both": ({"additional_special_tokens": [_X]}, {"additional_special_tokens": [_X]}, None),
        "extra": ({"extra_special_tokens": [_USER, _X]}, None, None),
        "extra with flags": ({"extra_special_tokens": [_token(_USER, lstrip=True), _token(_X)]}, None, None),
        "extra with names": ({"extra_special_tokens": {"user_token": _USER, "x_token": _X}}, None, None),
        "extra in the map": ({}, {"extra_special_tokens": [_USER, _X]}, None),
        "extra and additional": ({"extra_special_tokens": [_X], "additional_special_tokens": [_USER]}, None, None),
        "names and additional": (
            {"extra_special_tokens": {"x_token": _X}, "additional_special_tokens": [_USER]},
            None,
            None,
        ),
        "names of its own": ({"image_token": _USER, "other_token": _X}, None, None),
        "names of its own that are there": ({"image_token": eos[1]}, None, None),
        "added": ({}, None, {_USER: first, _X: first + 1}),
        "added in another order": ({}, None, {_USER: first + 1, _X: first}),
        "added and special": ({}, {"additional_special_tokens": [_USER]}, {_USER: first, _X: first + 1}),
        "added and special by the config": (
            {"additional_special_tokens": [_USER]},
            None,
            {_USER: first, _X: first + 1},
        ),
        "added, and a decoder": ({"added_tokens_decoder": decoder}, None, {_USER: first, _X: first + 1}),
        "map, and a decoder": ({"added_tokens_decoder": decoder}, {"additional_special_tokens": [_USER, _X]}, None),
        "additional, and a decoder": (
            {"added_tokens_decoder": decoder, "additional_special_tokens": [_USER, _X]},
            None,
            None,
        ),
        "decoder": (
            {"added_tokens_decoder": {**decoder, str(first): _plain(_USER)}, "additional_special_tokens": [_X]},
            None,
            None,
        ),
        "pad in the map": ({"pad_token": _X}, {"pad_token": _USER}, None),
        "pad in the map, and a decoder": (
            {"pad_token": _X, "added_tokens_decoder": decoder},
            {"pad_token": _USER},
            None,
        ),
        "pad in the map with flags": ({}, {"pad_token": _plain(_USER, rstrip=True)}, None),
        "pad with flags, and additional": (
            {"pad_token": _token(_USER, lstrip=True), "additional_special_tokens": [_X]},
            None,
            None,
        ),
        "names before lists": ({"additional_special_tokens": [_X], "pad_token": _USER, "cls_token": "<c>"}, None, None),
        "a piece that is special": ({"additional_special_tokens": ["river"]}, None, None),
        "special tokens are split": ({"split_special_tokens": True, "additional_special_tokens": [_USER]}, None, None),
    }
    files = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    return {
        name: {file: content for file, content in zip(files, form, strict=True) if content is not None}
        for name, form in forms.items()
    }


def cases() -> list[dict[str, Any]]:
    """Returns all folders: `name`, `base` (whose files are copied), and `files` that are changed or added.

    Fields of `tokenizer_config.json` and of `tokenizer.json` replace those of the base; None removes one.
    """
    found: list[dict[str, Any]] = []
    for base, eos in (("mistral", (2, "</s>")), ("qwen", (332, "<|im_end|>"))):
        first = {"mistral": 420, "qwen": 333}[base]
        for name, files in _additions(first, eos).items():
            changed = copy.deepcopy(files)
            config = changed.setdefault("tokenizer_config.json", {})
            config.setdefault("added_tokens_decoder", None)
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
            found.append({"name": f"{base}: {name}", "base": base, "files": changed})
    for kind, adds_bos, adds_eos, has_processor in itertools.product(
        (*_CLASSES, None), (None, True, False), (None, True, False), (True, False)
    ):
        config = {"tokenizer_class": kind, "add_bos_token": adds_bos, "add_eos_token": adds_eos}
        beside: dict[str, Any] = {"tokenizer_config.json": config}
        if not has_processor:
            beside["tokenizer.json"] = {"post_processor": None}
        if kind is None:
            beside["config.json"] = {"model_type": "llama"}
        ends = "with" if has_processor else "without"
        name = f"{kind or 'llama by config.json'}, bos {adds_bos}, eos {adds_eos}, {ends}"
        found.append({"name": name, "base": "mistral", "files": beside, "is_around": True})
    t5 = {"config.json": {"model_type": "t5"}}
    for base in ("t5", "t5_added", "t5_glued"):
        found.append({"name": f"{base}: whole", "base": base, "files": t5})
    found.append({"name": "t5: spiece.model and its config", "base": "t5", "files": {**t5, "tokenizer.json": None}})
    bare: dict[str, Any] = {
        **t5,
        **dict.fromkeys(("special_tokens_map.json", "tokenizer.json")),
        "tokenizer_config.json": "replaced",
    }
    found.append({"name": "t5: spiece.model and the number of sentinels", "base": "t5", "files": bare})
    found.append({"name": "t5_added: spiece.model and added_tokens.json", "base": "t5_added", "files": bare})
    found.append(
        {"name": "t5_added: spiece.model and its files", "base": "t5_added", "files": {**t5, "tokenizer.json": None}}
    )
    return [{"is_around": False, **case} for case in found]


def around(ids: Sequence[int]) -> list[list[int]]:
    """Returns bos and eos in the ids of `AROUND`, if they are there. Version 5 leaves the rest to classes."""
    return [[index for index in ids[:1] if index == 1], [index for index in ids[-1:] if index == 2]]


def write(case: dict[str, Any], folder: pathlib.Path) -> pathlib.Path:
    """Writes the folder of a case; returns the vocabulary in it."""
    base = FOLDER / case["base"] if (FOLDER / case["base"]).is_dir() else TOKENIZERS / case["base"]
    for path in base.iterdir():
        if path.name != "expected.json":
            shutil.copyfile(path, folder / path.name)
    for name, content in case["files"].items():
        path = folder / name
        if content is None:
            path.unlink(missing_ok=True)
        elif content == "replaced":
            path.write_text(json.dumps({"extra_ids": 5}))
        else:
            old = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            new = {**old, **content}
            kept = new if name == "tokenizer.json" else {key: value for key, value in new.items() if value is not None}
            path.write_text(json.dumps(kept), encoding="utf-8")
    return next(folder / name for name in ("tokenizer.json", "spiece.model") if (folder / name).is_file())


def _make_t5(folder: pathlib.Path, added: tuple[str, ...], **settings: Any) -> None:
    import sentencepiece
    import transformers

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINING_TEXTS),
        model_writer=model,
        vocab_size=90,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        normalization_rule_name="identity",
        num_threads=1,
        minloglevel=2,
    )
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "spiece.model"
        path.write_bytes(model.getvalue())
        (pathlib.Path(directory) / "config.json").write_text(json.dumps({"model_type": "t5"}))
        (pathlib.Path(directory) / "tokenizer_config.json").write_text(json.dumps({"extra_ids": 5, **settings}))
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        tokenizer.add_tokens(list(added))
        tokenizer.save_pretrained(folder)


def main() -> None:
    """Adds the ids of the installed version."""
    import transformers

    version = transformers.__version__
    FOLDER.mkdir(exist_ok=True)
    if version.startswith("4."):
        _make_t5(FOLDER / "t5", ())
        _make_t5(FOLDER / "t5_added", ("{", "}", "<"))
        _make_t5(FOLDER / "t5_glued", (), legacy=False)
    expected = json.loads(EXPECTED.read_text(encoding="utf-8")) if EXPECTED.is_file() else {}
    for case in cases():
        with tempfile.TemporaryDirectory() as directory:
            write(case, pathlib.Path(directory))
            ids: Any
            try:
                theirs = transformers.AutoTokenizer.from_pretrained(directory)
                ids = (
                    around(theirs(AROUND)["input_ids"])
                    if case["is_around"]
                    else [theirs(text)["input_ids"] for text in TEXTS]
                )
            except Exception as error:
                ids = type(error).__name__
        expected.setdefault(case["name"], {})[version.partition(".")[0]] = ids
    lines = [f"{json.dumps(name)}: {json.dumps(ids, separators=(',', ':'))}" for name, ids in expected.items()]
    EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
