"""The table of cases: what is damaged, the command line, and what the message has to name."""

import dataclasses
import gzip
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import safetensors.numpy

from calm_beam.manifest import content_digest
from tests.builders import build_arrays, train_vocabulary, write_t5x
from tests.calm_beam.checkpoints.decoder_only_folders import write_decoder_only
from tests.calm_beam.inputs.vocabularies.make_tokenizer_goldens import FOLDER as TOKENIZERS
from tests.pipelines import CONFIG, text_rows, write_rows

from .place import CALIBRATE, edit_arrays, edit_json

Here = pathlib.Path


def _nothing(here: Here) -> None:
    """Leaves the place as it is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A malformed input.

    Attributes:
      argv: The command line.
      names: Texts that the message has to contain.
      spoil: Damages the place.
      statuses: Exit statuses that are right.
      lines: The most lines of stderr, apart from progress.
      environment: Environment variables to set.
      stdin: Content of standard input.
      is_fresh: Whether it needs an interpreter of its own.
      may_write: Names in the folder that may have appeared or changed.
    """

    argv: tuple[str, ...]
    names: tuple[str, ...]
    spoil: Callable[[Here], None] = _nothing
    statuses: tuple[int, ...] = (1, 2)
    lines: int = 2
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stdin: bytes = b""
    is_fresh: bool = False
    may_write: tuple[str, ...] = ()


def calibrate(*flags: str, names: tuple[str, ...], **fields: Any) -> Case:
    """Returns a valid calibration with the given changes; later flags override earlier ones."""
    return Case(argv=(*CALIBRATE, *flags), names=names, **fields)


def inspect(path: str, *names: str, spoil: Callable[[Here], None], flags: tuple[str, ...] = ()) -> Case:
    """Returns a call of `inspect` for a manifest or a checkpoint."""
    return Case(argv=("inspect", path, *flags), names=names, spoil=spoil)


def writing(name: str, content: str | bytes) -> Callable[[Here], None]:
    """Returns a function that puts this content into a file of the place."""

    def spoil(here: Here) -> None:
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return spoil


def editing(name: str, **changes: Any) -> Callable[[Here], None]:
    """Returns a function that sets keys of a JSON file of the place."""
    return lambda here: edit_json(here / name, **changes)


def with_arrays(changes: Mapping[str, Any], *, model: str = "model") -> Callable[[Here], None]:
    """Returns a function that sets arrays of a model; None removes one."""
    return lambda here: edit_arrays(here / model, changes)


def llama(model_type: str = "llama", **fields: Any) -> Callable[[Here], None]:
    """Returns a function that adds a decoder-only model whose config has these fields."""

    def spoil(here: Here) -> None:
        # The config is read first, whatever the tensors are.
        tensors = {"model.norm.weight": np.ones(12, np.float32)}
        write_decoder_only(here / "llama", model_type, tensors=tensors, **fields)

    return spoil


def templated(template: str, *, name: str = "tokenizer_config.json") -> Callable[[Here], None]:
    """Returns a function that gives the place's model a tokenizer with this chat template."""

    def spoil(here: Here) -> None:
        (here / "model" / "sentencepiece.model").unlink()
        shutil.copy(TOKENIZERS / "zephyr" / "tokenizer.json", here / "model" / "tokenizer.json")
        content = template if name.endswith(".jinja") else json.dumps({"chat_template": template, "eos_token": "</s>"})
        (here / "model" / name).write_text(content, encoding="utf-8")

    return spoil


def _prefixed_names(here: Here) -> None:
    path = here / "hugging_face" / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    safetensors.numpy.save_file({f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}, path)


_NO_OBJECTS: tuple[Any, ...] = ([], False, "", 0)
_LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
_TEMPLATES = {
    "loops within loops": (f"{_LOOPS}{'{% endfor %}' * 3}", "processor time"),
    "loops that write": (f"{_LOOPS}aaaa{'{% endfor %}' * 3}", "cannot be rendered"),
    "a width of a billion": ("{{ messages[0].content | center(1000000000) }}", "memory"),
    "an indent of a billion": ("{{ ('a\n' * 9) | indent(1000000000) }}", "memory"),
    "a billion letters": ("{{ 'a' * 1000000000 }}", "memory"),
    "a string that doubles": (
        "{% set n = namespace(x='ab') %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}", "memory"
    ),
    "a format of a billion": ("{{ '%1000000000d' % 7 }}", "memory"),
    "a number without end": ("{{ 9 ** (9 ** 9) }}", "cannot be rendered"),
    "macros without end": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deeply"),
    "deep parentheses": ("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}", "cannot be rendered"),
    "NUL": ("{{ messages[0].content }}{{ '%c' % 0 }}", "NUL"),
    "a lone surrogate": ("{{ messages[0].content }}{{ '\\ud800' }}", "surrogates"),
    "no text": ("{{ messages[0] }}{{ messages[0].content.nothing.at.all }}", "UndefinedError"),
}  # fmt: skip

_DEEP = "[" * 100_000
_EMBEDDING = "token_embedder/embedding"


_CERTIFY = ("certify", "--losses=losses.csv", "--order=a", "--delta=0.1", "--output=out")


def _plan_folder(here: Here) -> None:
    (here / "losses.csv").write_text("id,setting,loss\n1,a,0\n")
    (here / "out" / "plan.json").mkdir(parents=True)


def _link_to_itself(here: Here) -> None:
    (here / "loop").symlink_to("loop")


def _t5x_embedding_without_dimensions(here: Here) -> None:
    shutil.rmtree(here / "t5x")
    write_t5x(here / "t5x", {**build_arrays(CONFIG, 0), _EMBEDDING: np.array(1, np.float32)}, inline=[_EMBEDDING])


def _absurd_zarr(here: Here) -> None:
    (path,) = here.glob("t5x/checkpoint_1000/target.token_embedder.embedding/.zarray")
    edit_json(path, shape=[10**9, 10**9], chunks=[10**9, 10**9])


def _nan_weights(here: Here) -> None:
    embedding = np.full((CONFIG.vocab_size, CONFIG.emb_dim), np.nan, np.float32)
    edit_arrays(here / "model", {_EMBEDDING: embedding})


def _orbax_metadata(here: Here) -> None:
    folder = here / "orbax" / "checkpoint_5" / "default"
    folder.mkdir(parents=True)
    (folder / "_METADATA").write_text(_DEEP)


def _references_without_a_word(here: Here) -> None:
    write_rows(here / "rows.jsonl", [{**row, "references": ["§"]} for row in text_rows(12)])


def _ids_with_text_references(here: Here) -> None:
    rows = [{"id": f"i{n}", "input_ids": [n + 3, 1], "references": ["the cat"]} for n in range(8)]
    write_rows(here / "rows.jsonl", rows)


def _config_with_a_repeated_key(here: Here) -> None:
    path = here / "model" / "config.json"
    path.write_text(path.read_text().replace("{", '{"emb_dim": 16,', 1))


def _nested_index(here: Here) -> None:
    (here / "hugging_face" / "model.safetensors").unlink()
    (here / "hugging_face" / "model.safetensors.index.json").write_text(_DEEP)


def _ids_and_text(here: Here) -> None:
    _append(here, {"id": "ids", "input_ids": [5, 1], "references": ["the cat"]})


def _append(here: Here, row: object) -> None:
    with open(here / "rows.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")


def _appended(row: object) -> Callable[[Here], None]:
    return lambda here: _append(here, row)


def _repeated_key(here: Here) -> None:
    with open(here / "rows.jsonl", "a") as file:
        file.write('{"id": "twice", "input": "the cat", "input": "the dog", "references": ["the cat"]}\n')


def _repeated_column(here: Here) -> None:
    columns = [pyarrow.array(["the cat"]), pyarrow.array(["the dog"]), pyarrow.array([["a"]])]
    table = pyarrow.Table.from_arrays(columns, names=["input", "input", "references"])
    pyarrow.parquet.write_table(table, here / "rows.parquet")


def _other_vocabulary(here: Here) -> None:
    train_vocabulary(here / "model" / "sentencepiece.model", size=45)


def _resealed(here: Here, change: Callable[[dict[str, Any]], None]) -> None:
    path = here / "done" / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps({**content, "digest": content_digest(content)}))


def _long_word(here: Here) -> None:
    def change(content: dict[str, Any]) -> None:
        content["model"]["uri"] = "m" * 80_000

    _resealed(here, change)


def _escape_in_a_manifest(here: Here) -> None:
    def change(content: dict[str, Any]) -> None:
        content["schema"] = "\x1b[2J\u202e"

    _resealed(here, change)


def _flipped_shard(here: Here) -> None:
    for path in (here / "done" / "generations").rglob("*.parquet"):
        content = bytearray(path.read_bytes())
        content[len(content) // 3] ^= 0xFF
        path.write_bytes(content)


def _text_bomb(here: Here) -> None:
    (here / "bomb.txt.gz").write_bytes(gzip.compress(b"a" * 100_000_000, mtime=0))


def _json_bomb(here: Here) -> None:
    (here / "bomb.jsonl.gz").write_bytes(gzip.compress(b'{"input": "' + b"a" * 100_000_000 + b'"}', mtime=0))


def _pipe(here: Here) -> None:
    os.mkfifo(here / "pipe.jsonl")


def _brackets(here: Here) -> None:
    (here / "rows.jsonl").rename(here / "rows[1].jsonl")
    (here / "rows[1].jsonl").write_text("{}\n")


def _foreign_generations(here: Here) -> None:
    (here / "out").mkdir()
    (here / "precious").mkdir()
    (here / "precious" / "thesis.txt").write_text("years of work")
    (here / "out" / "generations").symlink_to("../precious")
    shutil.copy(here / "done" / "manifest.json", here / "out" / "manifest.json")


def _without_read_permission(here: Here) -> None:
    (here / "rows.jsonl").unlink()
    (here / "rows.jsonl").symlink_to("/proc/1/mem")


def _changed_rows(here: Here) -> None:
    (here / "done" / "manifest.json").unlink()
    _append(here, {"id": "new", "input": "the owl", "references": ["owl"]})


def _half_file(name: str) -> Callable[[Here], None]:
    def spoil(here: Here) -> None:
        content = (here / name).read_bytes()
        (here / name).write_bytes(content[: len(content) // 2])

    return spoil


def _job_file(content: str, name: str) -> Callable[[Here], None]:
    def spoil(here: Here) -> None:
        for path in (here / "done" / "generations").rglob(name):
            path.write_text(content)

    return spoil


_AGAIN = ("calibrate", "--generations=done", "--metric=token_f1", "--delta=0.2", "--epsilon=0.1", "--output=out")
_GENERATE = ("generate", "--manifest=done/manifest.json", "--checkpoint=model")
_MONITOR = ("monitor", "--manifest=done/manifest.json", "--state=state.json", "--losses=-")
_PLAN = ("plan", "--epsilon=0.05")

CASES: Mapping[str, Case] = {
    # Promises that could be false.
    "text references of id prompts, no vocabulary": calibrate(
        "--checkpoint=ids_model",
        "--consistency=risk",
        names=("reference_ids", "rows.jsonl"),
        spoil=_ids_with_text_references,
    ),
    "a full model that never scores": calibrate(
        "--consistency=risk", names=("token_f1", "§"), spoil=_references_without_a_word, may_write=("out",)
    ),
    "a metric of one value": calibrate(
        "--metric=own_metrics:constant", "--consistency=risk", names=("own_metrics:constant",), may_write=("out",)
    ),
    "a manifest that names code": Case(
        argv=("verify", "--manifest=done/manifest.json", "--checkpoint=model", "--data=rows.jsonl"),
        names=("own_metrics:share", "--metric"),
    ),
    "a metric that exits": calibrate("--metric=own_metrics:leaves", names=("own_metrics:leaves", "SystemExit")),
    "a metric that exits at import": calibrate("--metric=leaves_at_import:f", names=("leaves_at_import", "SystemExit")),
    "a metric that raises no Exception": calibrate(
        "--metric=own_metrics:interrupts", names=("own_metrics:interrupts",)
    ),
    "a metric of words": calibrate("--metric=own_metrics:words", names=("own_metrics:words", "good")),
    "a metric that is not a number": calibrate(
        "--metric=own_metrics:not_a_number", names=("own_metrics:not_a_number",)
    ),
    "a model of another vocabulary": inspect(
        "done/manifest.json", "vocabulary", spoil=_other_vocabulary, flags=("--checkpoint=model",)
    ),
    "generate, with another vocabulary": Case(
        argv=(*_GENERATE, "--prompt=the cat"), names=("vocabulary",), spoil=_other_vocabulary
    ),
    "an empty output": calibrate("--output=", names=("--output",)),
    "an empty output of decode": Case(
        argv=("decode", "--checkpoint=model", "--data=rows.jsonl", "--thresholds=0.5", "--output="), names=("--output",)
    ),
    "an empty checkpoint": calibrate("--checkpoint=", names=("--checkpoint",)),
    "an empty vocabulary": calibrate("--vocabulary=", names=("--vocabulary",)),
    "a row with a repeated key": calibrate(names=("rows.jsonl", "line 13", "input"), spoil=_repeated_key),
    "columns of one name": calibrate("--data=rows.parquet", names=("rows.parquet", "input"), spoil=_repeated_column),
    "a config with a repeated key": calibrate(names=("config.json", "emb_dim"), spoil=_config_with_a_repeated_key),
    "a job with a repeated key": Case(
        argv=_AGAIN, names=("decode.json",), spoil=_job_file('{"a": 1, "a": 2}', "decode.json")
    ),
    "ids beside text": calibrate(names=("token ids", "rows.jsonl, line 13"), spoil=_ids_and_text),
    # Checkpoints.
    "nested native config": calibrate(names=("config.json",), spoil=writing("model/config.json", _DEEP)),
    "nested Hugging Face config": calibrate(
        "--checkpoint=hugging_face", names=("config.json",), spoil=writing("hugging_face/config.json", _DEEP)
    ),
    "nested index of shards": calibrate(
        "--checkpoint=hugging_face", names=("model.safetensors.index.json",), spoil=_nested_index
    ),
    "nested Orbax metadata": calibrate("--checkpoint=orbax", names=("_METADATA",), spoil=_orbax_metadata),
    "nested job": Case(argv=_AGAIN, names=("decode.json",), spoil=_job_file(_DEEP, "decode.json")),
    "nested completion": Case(argv=_AGAIN, names=("complete.json",), spoil=_job_file(_DEEP, "complete.json")),
    "a checkpoint that links to itself": calibrate("--checkpoint=loop", names=("loop",), spoil=_link_to_itself),
    "a relative table without buckets": calibrate(
        names=("rel_embedding",),
        spoil=with_arrays({"encoder/relpos_bias/rel_embedding": np.zeros((0, 32), np.float32)}),
    ),
    "a classifier of no shape": calibrate(
        "--checkpoint=classifier",
        "--confidence=classifier",
        names=("meta_cls/kernel",),
        spoil=with_arrays({"decoder/meta_cls/kernel": np.zeros((), np.float32)}, model="classifier"),
    ),
    "an embedding without dimensions": calibrate(
        "--checkpoint=t5x", names=("embedding",), spoil=_t5x_embedding_without_dimensions
    ),
    "an array that claims exabytes": calibrate("--checkpoint=t5x", names=("embedding",), spoil=_absurd_zarr),
    "a billion layers": calibrate(
        names=("num_decoder_layers",), spoil=editing("model/config.json", num_decoder_layers=10**9)
    ),
    "a billion encoder layers": calibrate(
        "--checkpoint=hugging_face",
        names=("num_encoder_layers",),
        spoil=editing("hugging_face/config.json", num_layers=10**9),
    ),
    "a billion layers of a Llama": calibrate(
        "--checkpoint=llama", names=("num_hidden_layers", "1000000000"), spoil=llama(num_hidden_layers=10**9)
    ),
    "a billion layers of a Qwen with windows": calibrate(
        "--checkpoint=llama",
        names=("num_hidden_layers", "1000000000"),
        spoil=llama(
            "qwen2", num_hidden_layers=10**9, use_sliding_window=True, sliding_window=4, max_window_layers=10**9
        ),
    ),
    "a billion decoder layers": calibrate(
        "--checkpoint=hugging_face",
        names=("num_decoder_layers",),
        spoil=editing("hugging_face/config.json", num_decoder_layers=10**9),
    ),
    "a number of layers beyond all": calibrate(
        "--checkpoint=llama", names=("num_hidden_layers",), spoil=llama(num_hidden_layers=10**300)
    ),
    **{
        f"rotary positions that are {value!r}": calibrate(
            "--checkpoint=llama", names=("rope_parameters", "expected one object"), spoil=llama(rope_parameters=value)
        )
        for value in _NO_OBJECTS
    },
    "names behind a prefix": calibrate(
        "--checkpoint=hugging_face", names=("_orig_mod.", "torch.compile"), spoil=_prefixed_names
    ),
    "an end token that is no id": calibrate(
        "--checkpoint=hugging_face",
        names=("generation_config.json", "eos_token_id"),
        spoil=writing("hugging_face/generation_config.json", '{"eos_token_id": [1, "x"]}'),
    ),
    "an end token beyond the vocabulary": calibrate(
        "--checkpoint=hugging_face",
        names=("end_ids", "1000000000"),
        spoil=writing("hugging_face/generation_config.json", '{"eos_token_id": 1000000000}'),
    ),
    "a start token that is no id": calibrate(
        "--checkpoint=hugging_face",
        names=("generation_config.json", "decoder_start_token_id"),
        spoil=writing("hugging_face/generation_config.json", '{"decoder_start_token_id": 1.5}'),
    ),
    "nested settings of generation": calibrate(
        "--checkpoint=hugging_face",
        names=("generation_config.json",),
        spoil=writing("hugging_face/generation_config.json", _DEEP),
    ),
    "an empty vocabulary file": calibrate(
        names=("sentencepiece.model", "empty"), spoil=writing("model/sentencepiece.model", b"")
    ),
    "added tokens with a gap": calibrate(
        "--checkpoint=hugging_face",
        names=("spiece.model", "above a gap"),
        spoil=writing("hugging_face/added_tokens.json", '{"{": 1000000}'),
    ),
    "added tokens that are no ids": calibrate(
        "--checkpoint=hugging_face",
        names=("added_tokens.json", "must have ids"),
        spoil=writing("hugging_face/added_tokens.json", '{"{": [7]}'),
    ),
    # Chat templates.
    "a template that nothing is said of": calibrate(
        names=("tokenizer.json", "--chat_template"), spoil=templated("{{ messages[0].content }}")
    ),
    "a template in a file that nothing is said of": calibrate(
        names=("tokenizer.json", "--chat_template"), spoil=templated("{{ bos }}", name="chat_template.jinja")
    ),
    **{
        f"a template with {name}": calibrate("--chat_template=model", names=(word,), spoil=templated(template))
        for name, (template, word) in _TEMPLATES.items()
    },
    "a prefix that is no text": calibrate("--task_prefix=a\udcffb", names=("--task_prefix", "UTF-8")),
    "a system prompt that is no text": calibrate(
        "--system=a\udcffb", "--chat_template=model", names=("--system", "UTF-8")
    ),
    "a distance of 1": calibrate(
        names=("relative_max_distance",), spoil=editing("model/config.json", relative_max_distance=1)
    ),
    "an astronomic distance": calibrate(
        names=("relative_max_distance",), spoil=editing("model/config.json", relative_max_distance=1e30)
    ),
    "a billion extra ids": calibrate("--extra_ids=1000000000", names=("extra_ids",)),
    "weights that are not finite": calibrate(names=(_EMBEDDING,), spoil=_nan_weights),
    "half a safetensors file": calibrate(names=("model.safetensors",), spoil=_half_file("model/model.safetensors")),
    "half a vocabulary": calibrate(names=("sentencepiece.model",), spoil=_half_file("model/sentencepiece.model")),
    "a head of negative width": calibrate(names=("vocab_size",), spoil=editing("model/config.json", vocab_size=-64)),
    "a width of true": calibrate(names=("emb_dim",), spoil=editing("model/config.json", emb_dim=True)),
    "an array too few": calibrate(names=("wo/kernel",), spoil=with_arrays({"decoder/layers_1/mlp/wo/kernel": None})),
    "a config that is a list": calibrate(names=("config.json",), spoil=writing("model/config.json", "[]")),
    "a config that is no text": calibrate(names=("config.json",), spoil=writing("model/config.json", b"\xff\xfe{}")),
    "a checkpoint that is a file": calibrate("--checkpoint=rows.jsonl", names=("rows.jsonl",)),
    "a name of a hub": calibrate("--checkpoint=google/t5-v1_1-small", names=("google/t5-v1_1-small",)),
    # Sizes and values.
    "outputs of 100,000 tokens": calibrate("--max_decode_length=100000", names=("--max_decode_length",)),
    "prompts of ten million tokens": calibrate("--max_input_length=10000000", names=("--max_input_length",)),
    "a budget of 10^15": calibrate("--max_cache_tokens=1000000000000000", names=("max_cache_tokens",)),
    "minus one worker": calibrate("--direct_num_workers=-1", names=("--direct_num_workers",)),
    "a million workers": calibrate("--direct_num_workers=1000000", names=("--direct_num_workers",)),
    "ten billion shards": calibrate("--num_shards=10000000000", names=("--num_shards",)),
    "a portable runner alone": calibrate("--runner=PortableRunner", names=("--job_endpoint",)),
    "a trillion trials": Case(
        argv=(
            "evaluate",
            "--generations=done",
            "--metric=token_f1",
            "--delta=0.1",
            "--trials=1000000000000",
            "--output=out",
        ),
        names=("--trials",),
    ),
    "trials that are no number": Case(
        argv=("evaluate", "--generations=done", "--metric=token_f1", "--delta=0.1", "--trials=1e12", "--output=out"),
        names=("--trials",),
    ),
    "a delta of words": Case(argv=(*_PLAN, "--delta=small"), names=("--delta",)),
    "a plan that needs no time": Case(
        argv=(*_PLAN, "--delta=0.001", "--risk_guess=0.0001"), names=(), statuses=(0,), lines=0
    ),
    "a plan of millions": Case(
        argv=(*_PLAN, "--delta=0.0001", "--risk_guess=0.00001"), names=(), statuses=(0,), lines=0
    ),
    "a threshold of infinity": calibrate("--thresholds=inf", names=("thresholds", "inf")),
    "a number of 400 digits": calibrate(f"--max_decode_length={10**400}", names=("--max_decode_length",)),
    # Streams and texts.
    "stdin that is no UTF-8": Case(
        argv=_GENERATE,
        names=("UTF-8", "line 2"),
        stdin=b"the cat\n\xff\xfe\n",
        environment={"PYTHONUTF8": "1"},
        is_fresh=True,
    ),
    "an ASCII terminal": Case(
        argv=("inspect", "done/manifest.json"),
        names=(),
        statuses=(0,),
        environment={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"},
        is_fresh=True,
    ),
    "a state of 400 digits": Case(
        argv=_MONITOR, names=("state.json",), spoil=writing("state.json", json.dumps({"n": 10**400})), stdin=b"0.1\n"
    ),
    "a nested state": Case(argv=_MONITOR, names=("state.json",), spoil=writing("state.json", _DEEP), stdin=b"0.1\n"),
    "losses that are none": Case(argv=_MONITOR, names=("line 2",), stdin=b"0.1\n7\n", may_write=("state.json",)),
    "losses as only Python writes numbers": Case(
        argv=_MONITOR, names=("line 2", "1_0e-1_0"), stdin=b"0.1\n1_0e-1_0\n", may_write=("state.json",)
    ),
    "losses in other digits": Case(argv=_MONITOR, names=("line 1",), stdin="٠.١\n".encode(), may_write=("state.json",)),
    "losses that are no UTF-8": Case(
        argv=_MONITOR, names=("line 2", "0xff"), stdin=b"0.1\n\xff\xfe\n", may_write=("state.json",)
    ),
    "a binary table of losses": Case(
        argv=_CERTIFY, names=("losses.csv",), spoil=writing("losses.csv", bytes(range(256)))
    ),
    "a folder in the place of a plan": Case(argv=_CERTIFY, names=("plan.json",), spoil=_plan_folder),
    "a log in the place of losses": Case(
        argv=("certify", "--baseline=log.eval", "--candidates=log.eval", "--delta=0.1", "--output=out"),
        names=("log.eval",),
        spoil=writing("log.eval", b"PK\x03\x04" + bytes(200)),
    ),
    "a word of 80 kB": Case(argv=("inspect", "done/manifest.json"), names=(), spoil=_long_word, statuses=(0, 1)),
    "a schema that clears the screen": inspect("done/manifest.json", "schema", spoil=_escape_in_a_manifest),
    "a nested manifest": inspect(
        "done/manifest.json", "done/manifest.json", spoil=writing("done/manifest.json", _DEEP)
    ),
    "half a manifest": inspect("done/manifest.json", "done/manifest.json", spoil=_half_file("done/manifest.json")),
    # Data.
    "a line of 100 MB": calibrate(
        "--data=bomb.txt.gz", "--consistency=textual", names=("bomb.txt.gz", "line 1"), spoil=_text_bomb
    ),
    "a row of 100 MB": calibrate("--data=bomb.jsonl.gz", names=("bomb.jsonl.gz", "line 1"), spoil=_json_bomb),
    "a pipe as data": calibrate("--data=pipe.jsonl", names=("pipe.jsonl", "pipe"), spoil=_pipe),
    "a link loop as data": calibrate(
        "--data=loop", "--data_format=jsonl", names=("loop", "link"), spoil=_link_to_itself
    ),
    "brackets in a name": calibrate("--data=rows[1].jsonl", names=("rows[1].jsonl, line 1",), spoil=_brackets),
    "data that nobody may read": calibrate(names=("rows.jsonl",), spoil=_without_read_permission),
    "Parquet that is none": calibrate(
        "--data=rows.parquet", names=("rows.parquet",), spoil=writing("rows.parquet", "PAR1PAR1")
    ),
    "a list as prompt": calibrate(names=("rows.jsonl, line 13", "input"), spoil=_appended({"input": ["the cat"]})),
    "an empty prompt": calibrate(
        names=("rows.jsonl, line 13", "input"), spoil=_appended({"input": "", "references": ["a"]})
    ),
    "a reference that is a number": calibrate(
        names=("rows.jsonl, line 13", "references"), spoil=_appended({"input": "the cat", "references": [5]})
    ),
    "an id that is a number": calibrate(
        names=("rows.jsonl, line 13", "id"), spoil=_appended({"id": 5, "input": "the cat"})
    ),
    "an escape sequence in an id": calibrate(
        "--consistency=risk",
        "--metric=token_f1",
        names=("r1\\x1b[31m",),
        spoil=_appended({"id": "r1\x1b[31m", "input": "the cat", "references": []}),
    ),
    "a zip bomb that is no gzip": calibrate(
        "--data=rows.jsonl.gz", names=("rows.jsonl.gz",), spoil=writing("rows.jsonl.gz", "{}")
    ),
    # Flags, runners, folders.
    "a misspelt flag of ours": calibrate("--tua=4", names=("--tua", "--tau")),
    "a misspelt flag, nearer to ours": calibrate("--confidense=softmax", names=("--confidence",)),
    "stored outputs with a flipped byte": Case(
        argv=_AGAIN, names=(".parquet",), spoil=_flipped_shard, may_write=("out",)
    ),
    "resuming with other data": calibrate(
        "--output=done", "--resume", names=("--resume",), spoil=_changed_rows, may_write=("done",)
    ),
    "a link in the place of the generations": calibrate(
        "--overwrite", names=("generations", "link"), spoil=_foreign_generations, may_write=("out",)
    ),
    "an output below a file": calibrate("--output=rows.jsonl/out", names=("rows.jsonl",)),
    "a report of nothing": Case(argv=("report", "--calibration=model"), names=("manifest.json",)),
    "generations that are not there": Case(argv=(*_AGAIN[:1], "--generations=model", *_AGAIN[2:]), names=("model",)),
    "training on nothing": Case(argv=("train", "--data=none.jsonl", "--output=out"), names=("none.jsonl",)),
    "converting to itself": Case(
        argv=("convert", "--checkpoint=model", "--output=model", "--layout=native"), names=("model",)
    ),
}
