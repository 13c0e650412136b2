"""Example adapters for third-party decoders are swept and certified; those whose package is absent are skipped."""

import pathlib
import re
import runpy
from typing import Any

import numpy as np
import pytest

import calm_beam as calm
from tests.builders import train_vocabulary
from tests.pipelines import write_rows
from tests.transforms.setting_decoders import sweep

_ROOT = pathlib.Path(__file__).parents[2]
_FOLDER = _ROOT / "examples" / "any_decoder"
_TEXTS = ("the cat sat", "the dog ran", "a cat and a dog", "the mat")


def test_the_page_runs(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The code of the page about external decoders runs unchanged, in order, and proves a setting."""
    page = (_ROOT / "docs" / "how-to" / "sweep-any-decoder.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S))
    write_rows(tmp_path / "data.jsonl", [{"id": f"e{i}", "input": f"one two three {i}"} for i in range(60)])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.py").write_text(code, encoding="utf-8")
    runpy.run_path("page.py", run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1] == "4 first words, version 1"


def _example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(_FOLDER / f"{name}.py"))


def _swept(decoder: Any, settings: tuple[Any, ...], folder: pathlib.Path) -> Any:
    """Sweeps a decoder over a few texts, and returns the manifest of their certification."""
    data = write_rows(folder / "data.jsonl", [{"id": f"e{i}", "input": text} for i, text in enumerate(_TEXTS)])
    sweep(data, folder / "swept", decoder=decoder, settings=settings, decoder_name="adapted", batch_size=2)
    manifest = calm.certify(outputs=folder / "swept", metric="token_f1", delta=0.9, output=folder / "swept")
    assert manifest is not None
    assert manifest.data.examples == len(_TEXTS)
    return manifest


def test_thinking_budget(capsys: pytest.CaptureFixture[str]) -> None:
    """The example about thinking proves the least safe budget for each tolerance, with its cost."""
    runpy.run_path(str(_FOLDER / "thinking_budget.py"), run_name="__main__")
    told = re.findall(r"delta ([\d.]+): budget (\d+), (\d+) tokens, risk ([\d.]+)", capsys.readouterr().out)
    assert [(delta, budget) for delta, budget, _, _ in told] == [("0.02", "800"), ("0.1", "400")]
    assert all(float(risk) <= float(delta) for delta, _, _, risk in told)


def test_ctranslate2(tmp_path: pathlib.Path) -> None:
    """CTranslate2 answers at three precisions, each with its cost; a precision that the machine lacks is an error."""
    ctranslate2 = pytest.importorskip("ctranslate2")
    vocabulary = train_vocabulary(tmp_path / "pieces.model")
    _write_ctranslate2(ctranslate2, tmp_path / "model", vocabulary)
    adapted = _example("ctranslate2_precisions")["CTranslate2Precisions"]
    decoder = adapted(str(tmp_path / "model"), tokenizer=str(vocabulary), max_length=6)
    settings = tuple(
        each for each in ("float32", "int16", "int8") if each in ctranslate2.get_supported_compute_types("cpu")
    )
    manifest = _swept(decoder, settings, tmp_path)
    bits = {"int16": 16, "int8": 8}
    assert {setting.name: setting.cost for setting in manifest.settings} == {each: bits[each] for each in settings[1:]}


def _write_ctranslate2(ctranslate2: Any, folder: pathlib.Path, vocabulary: pathlib.Path) -> None:
    """Writes a random decoder of two layers in CTranslate2's form."""
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(vocabulary))
    names = [pieces.id_to_piece(index) for index in range(pieces.get_piece_size())]
    spec = ctranslate2.specs.TransformerDecoderModelSpec.from_config(num_layers=2, num_heads=2)
    draw, width = np.random.default_rng(0), 16

    def random(*shape: int) -> np.ndarray:
        return draw.normal(size=shape, scale=0.5).astype(np.float32)

    def norm(layer: Any) -> None:
        layer.gamma, layer.beta = np.ones(width, np.float32), np.zeros(width, np.float32)

    spec.decoder.scale_embeddings = False
    spec.decoder.embeddings.weight = random(len(names), width)
    spec.decoder.projection.weight = random(len(names), width)
    spec.decoder.position_encodings.encodings = random(64, width)
    norm(spec.decoder.layer_norm)
    for layer in spec.decoder.layer:
        norm(layer.self_attention.layer_norm)
        norm(layer.ffn.layer_norm)
        layers = (*layer.self_attention.linear, layer.ffn.linear_0, layer.ffn.linear_1)
        shapes = ((3 * width, width), (width, width), (32, width), (width, 32))
        for linear, (rows, columns) in zip(layers, shapes, strict=True):
            linear.weight, linear.bias = random(rows, columns), np.zeros(rows, np.float32)
    spec.register_vocabulary(names)
    spec.config.unk_token, spec.config.eos_token = "<unk>", "</s>"
    spec.validate()
    spec.optimize()
    folder.mkdir()
    spec.save(str(folder))


@pytest.fixture
def llama(tmp_path: pathlib.Path) -> pathlib.Path:
    """A random model of transformers with four layers, and a tokenizer of words."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: index for index, word in enumerate(("[UNK]", "</s>", *sorted({*" ".join(_TEXTS).split()})))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path / "llama"
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", eos_token="</s>").save_pretrained(
        folder
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        eos_token_id=1,
        bos_token_id=None,
        initializer_range=0.5,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_transformers(llama: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Fewer layers of a transformers model give what a model with only those layers gives; then all layers are back."""
    import torch
    import transformers

    decoder = _example("transformers_exits")["TransformersExits"](str(llama), max_new_tokens=5)
    decoder.setup()
    answers = decoder([_TEXTS[0]], (4, 2))
    short = transformers.AutoModelForCausalLM.from_pretrained(llama, num_hidden_layers=2).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    prompt = torch.tensor([tokenizer.encode(_TEXTS[0])])
    (ids,) = short.generate(prompt, max_new_tokens=5, do_sample=False)[:, prompt.shape[1] :].tolist()
    assert answers[2][0].text == tokenizer.decode(ids, skip_special_tokens=True)
    assert answers[4][0].text != answers[2][0].text
    assert [each.cost for each in (answers[4][0], answers[2][0])] == [4, 2]
    fresh = _example("transformers_exits")["TransformersExits"](str(llama), max_new_tokens=5)
    manifest = _swept(fresh, (4, 3, 2), tmp_path)
    assert [setting.cost for setting in manifest.settings] == [3, 2]


def test_economize(llama: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """CALM from economize is swept at its thresholds: at 1 it answers as the full model, at 0 it does not."""
    pytest.importorskip("economize")
    adapted = _example("economize_calm")["EconomizeCalm"]
    decoder = adapted(str(llama), max_new_tokens=5)
    decoder.setup()
    answers = decoder(list(_TEXTS), (1.0, 0.0))
    full = _example("transformers_exits")["TransformersExits"](str(llama), max_new_tokens=5)
    full.setup()
    assert answers[1.0] == [full([text], (4,))[4][0].text for text in _TEXTS]
    assert answers[0.0] != answers[1.0]
    manifest = _swept(adapted(str(llama), max_new_tokens=5), (1.0, 0.5, 0.0), tmp_path)
    assert manifest.plan.order == ("0.5", "0.0")


def test_packages_are_imported_where_they_are_used() -> None:
    """Every adapter can be imported, and pickled for workers, without its package."""
    for name in ("transformers_exits", "economize_calm", "ctranslate2_precisions"):
        source = (_FOLDER / f"{name}.py").read_text(encoding="utf-8")
        assert not re.search(r"^(import|from) (torch|transformers|economize|ctranslate2)", source, re.M)
        assert _example(name)
