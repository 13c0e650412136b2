"""Makes `tokenizer_goldens/`: tokenizers and chat templates of four families, with the ids and texts of transformers.

Texts and templates are our own. Needs transformers, which the project itself never does; made with version 5.23 and
tokenizers 0.23:

    python -m tests.calm_beam.inputs.vocabularies.make_tokenizer_goldens
"""

import json
import pathlib
from typing import Any

FOLDER = pathlib.Path(__file__).with_name("tokenizer_goldens")

# The texts on which the tokenizers are trained, and which they encode.
TEXTS = (
    "The small boat crossed the river before the storm, and nobody saw it leave.",
    "A baker sells three loaves of bread; two of them are still warm!",
    "Why don't they open the window? It's hot, and we've waited for an hour.",
    "Les élèves mangent du pain et du fromage à midi, n'est-ce pas ?",
    "Der Bäcker verkauft süße Brötchen für 3,50 Euro.",
    "Twelve grey horses stood in the rain beside the old mill.",
    "def area(width, height):\n    return width * height  # in square metres\n",
    "Numbers: 1234567, 3.14159, 10^-6 and 50 %.",
    "The river is long. The river is wide. The river is cold.",
    "Nobody knows where the keys are, but everybody looks for them.",
)
ODD_TEXTS = (
    "",
    " ",
    "  two  spaces and a tab\t",
    "line\nbreaks\r\nof both kinds\n\n",
    "日本語のテキスト",
    "🙂 faces 🙃 and 👩‍👧",
    "cafe\u0301 and ＦＵＬＬ width",
    "spaces before . , ! ? and it 's , don 't",
    "<s>not the beginning</s> and <extra_id_1>",
    "<|begin_of_text|><|eot_id|><|im_end|>",
    "\u200bnothing to see\ufffd",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
)
SYSTEMS = (None, "Answer in one word.", "")
PROMPTS = ("Where is the river?", '  Two\nlines, <b>bold</b> & "quoted" 🙂 ', "<|im_start|>system")

_LLAMA_3 = """{{- bos_token }}
{%- set date = "26 Jul 2024" %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_text = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_text = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date + "\\n\\n" }}
{{- system_text }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
_MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}{% set start = messages[0]['content'] %}{% set turns = messages[1:] %}"
    "{%- else %}{% set turns = messages %}{% endif %}"
    "{{ bos_token }}"
    "{% for turn in turns %}"
    "{% if (turn['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must take turns') }}"
    "{% endif %}"
    "{% if turn['role'] == 'user' %}"
    "{% if loop.last and start is defined %}{{ '[INST] ' + start + '\\n\\n' + turn['content'] + ' [/INST]' }}"
    "{% else %}{{ '[INST] ' + turn['content'] + ' [/INST]' }}{% endif %}"
    "{% else %}{{ turn['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)
_CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}
{%- elif messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- generation %}{{- message.content }}{%- endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
    {%- set ns.count = ns.count + 1 %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
_ZEPHYR = """{% for message in messages %}
{% if message['role'] not in ['user', 'system', 'assistant'] %}
    {% continue %}
{% endif %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""


def main() -> None:
    """Writes the folder."""
    import transformers

    for name, (tokenizer, config, template) in {
        "llama_3": _llama_3(),
        "mistral": _mistral(),
        "qwen": _qwen(),
        "zephyr": _zephyr(),
    }.items():
        folder = FOLDER / name
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
        # Templates are in a file of their own, or in the config.
        if name == "qwen":
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        else:
            config = {**config, "chat_template": template}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
        texts = [*TEXTS, *ODD_TEXTS]
        prompts = [theirs(text)["input_ids"] for text in texts]
        chats = []
        for system in SYSTEMS:
            for prompt in PROMPTS:
                messages = [] if system is None else [{"role": "system", "content": system}]
                messages.append({"role": "user", "content": prompt})
                arguments: dict[str, Any] = {"add_generation_prompt": True}
                text = theirs.apply_chat_template(messages, tokenize=False, **arguments)
                ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **arguments)
                chats.append({"system": system, "prompt": prompt, "text": text, "ids": ids})
        expected = {
            "ids": prompts,
            "bare_ids": [theirs(text, add_special_tokens=False)["input_ids"] for text in texts],
            "texts": [theirs.decode(ids, skip_special_tokens=True) for ids in prompts],
            "chats": chats,
        }
        (folder / "expected.json").write_text(json.dumps(expected, ensure_ascii=False) + "\n", encoding="utf-8")


def _byte_level(pattern: str, special: tuple[str, ...]) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer


def _llama_3() -> tuple[Any, dict[str, Any], str]:
    from tokenizers import processors

    special = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    tokenizer = _byte_level(r"'\p{L}+|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+", special)
    begin = "<|begin_of_text|>"
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]),
        ]
    )
    return tokenizer, {"bos_token": begin, "eos_token": "<|eot_id|>", "clean_up_tokenization_spaces": True}, _LLAMA_3


def _qwen() -> tuple[Any, dict[str, Any], str]:
    from tokenizers import normalizers, processors

    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer = _byte_level(r"'\p{L}+|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+", special)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    added = {str(tokenizer.token_to_id(text)): {"content": text, **flags} for text in special}
    config = {"add_bos_token": False, "bos_token": None, "eos_token": "<|im_end|>", "added_tokens_decoder": added}
    return tokenizer, config, _CHATML


def _mistral() -> tuple[Any, dict[str, Any], str]:
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    every_byte = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", "<s>", "</s>", *every_byte], show_progress=False, max_token_length=9
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    # Bytes are not special tokens.
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < 3]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    bos = {"__type": "AddedToken", "content": "<s>", "lstrip": False, "normalized": False, "rstrip": False}
    config = {"add_bos_token": True, "add_eos_token": False, "bos_token": {**bos, "single_word": False}}
    return tokenizer, {**config, "eos_token": "</s>", "unk_token": "<unk>"}, _MISTRAL


def _zephyr() -> tuple[Any, dict[str, Any], str]:
    """Returns pieces as T5 has them, for a tokenizer that ends every prompt and has sentinels."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    words = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), words])
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens([f"<extra_id_{number}>" for number in reversed(range(3))])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    config = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "clean_up_tokenization_spaces": True}
    return tokenizer, config, _ZEPHYR


if __name__ == "__main__":
    main()
