"""Third-party clients: OpenAI's library talks to the service, and Prometheus reads its metrics."""

import re
import runpy
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from calm_beam.checkpoints import load_checkpoint, write_native
from calm_beam.inputs.vocabularies.chat_templates import chat_of
from calm_beam.inputs.vocabularies.vocabulary import open_vocabulary
from calm_beam.serving import Generator
from tests.builders import build_arrays, build_config
from tests.calm_beam.inputs.vocabularies.make_tokenizer_goldens import FOLDER
from tests.calm_beam.serving.builders import STEPS, build_entry, build_served_manifest
from tests.launch.serve.served import LIMITS, PROMPTS, app_of, asked, expected, ready_client, served
from tests.snippets import ROOT

_TEXT = "the cat sees 0"


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Generator:
    """A generator of a tiny model that was calibrated on chats."""
    pytest.importorskip("jinja2", reason="a chat template needs calm-beam[tokenizers]")
    folder = tmp_path_factory.mktemp("chatting")
    config = build_config(vocab_size=208, num_encoder_layers=1)
    write_native(folder, config, arrays=build_arrays(config, 3), vocabulary_path=FOLDER / "zephyr" / "tokenizer.json")
    tokenizer = str(folder / "tokenizer.json")
    chat = chat_of("model", tokenizer=tokenizer, system="Be brief.")
    manifest = build_served_manifest(
        load_checkpoint(str(folder)),
        (build_entry(0.3),),
        vocabulary=open_vocabulary(tokenizer, chat=chat),
        decode={"max_input_length": 64},
    )
    return Generator.from_manifest(manifest, folder, batch_size=2)


@pytest.fixture(scope="module")
def url(chatting: Generator) -> Iterator[str]:
    """The address of the chat service."""
    with served(app_of(chatting), LIMITS) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def openai() -> Any:
    """OpenAI's library, or the test is skipped."""
    return pytest.importorskip("openai", reason="OpenAI's client is not installed: pip install openai")


def test_openais_library_chats(openai: Any, url: str, chatting: Generator) -> None:
    """OpenAI's library gets the generator's text for a chat, at once and as a stream, with usage."""
    answer = chatting.generate(_TEXT)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        chat = {"model": "calm-beam", "messages": [{"role": "user", "content": _TEXT}]}
        whole = client.chat.completions.create(**chat)
        assert whole.choices[0].message.content == answer.text
        assert whole.choices[0].message.role == "assistant"
        assert whole.choices[0].calm_beam["exit_layers"] == list(answer.exit_layers)
        assert whole.usage.completion_tokens == len(answer.tokens)
        events = [*client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True})]
        *parts, last = events
        assert "".join(part.choices[0].delta.content or "" for part in parts) == answer.text
        assert parts[0].choices[0].delta.role == "assistant"
        assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        assert last.usage == whole.usage


def test_openais_library_completes_and_hears_errors(openai: Any, url: str, chatting: Generator) -> None:
    """OpenAI's library raises its exception for each error status, with our message."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        completion = client.completions.create(model="calm-beam", prompt=_TEXT, temperature=0, max_tokens=STEPS)
        assert completion.choices[0].text == chatting.generate(_TEXT).text
        parts = [*client.completions.create(model="calm-beam", prompt=_TEXT, stream=True)]
        assert "".join(part.choices[0].text for part in parts) == completion.choices[0].text
        assert [model.id for model in client.models.list()] == ["calm-beam"]
        with pytest.raises(openai.BadRequestError, match="temperature 1 is refused") as refused:
            client.completions.create(model="calm-beam", prompt=_TEXT, temperature=1)
        assert (refused.value.code, refused.value.param) == ("not_calibrated", "temperature")
        with pytest.raises(openai.NotFoundError, match="is not served here"):
            client.completions.create(model="gpt-2", prompt=_TEXT)


def test_the_example_shows_what_the_service_says(
    openai: Any, url: str, chatting: Generator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example prints the answer, every token with its exit layer, and why a parameter is refused."""
    monkeypatch.setattr("sys.argv", ["client.py", f"--url={url}", _TEXT])
    runpy.run_path(str(ROOT / "examples" / "web_service" / "client.py"), run_name="__main__")
    answer = chatting.generate(_TEXT)
    shown = capsys.readouterr().out
    assert shown.startswith(f"{answer.text}\n{answer.layers_saved} of {4 * len(answer.tokens)} layers saved\n")
    assert re.findall(r"\[(\d)\]", shown) == [str(layer) for layer in answer.exit_layers]
    assert "not_calibrated: " in shown


def test_a_chat_is_what_was_calibrated_or_refused(url: str, chatting: Generator) -> None:
    """A chat of one user message, after the calibrated system message or none, is answered; others are refused."""
    user = {"role": "user", "content": _TEXT}
    parts = {"role": "user", "content": [{"type": "text", "text": "the cat "}, {"type": "text", "text": "sees 0"}]}
    text = chatting.generate(_TEXT).text
    with httpx.Client(base_url=url, timeout=60) as client:

        def chat(messages: Any, **more: Any) -> httpx.Response:
            return client.post("/v1/chat/completions", json={"messages": messages, **more})

        messages: Any
        for messages in ([user], [parts], [{"role": "system", "content": "Be brief."}, user]):
            assert chat(messages).json()["choices"][0]["message"]["content"] == text
        neutral = {"n": 1, "logprobs": False, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}}
        assert chat([user], **neutral, max_completion_tokens=STEPS).status_code == 200
        for messages, more, param, reason in (
            ([], {}, "messages", "messages must be"),
            (
                [user, {"role": "assistant", "content": "Yes."}, user],
                {},
                "messages",
                "has earlier turns, and the calibrated chats had one turn",
            ),
            ([{"role": "system", "content": "Rhyme."}, user], {}, "messages", "calibrated with 'Be brief.'"),
            (["hello"], {}, "messages", "an object with role and content"),
            ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "messages", "must be a text"),
            ([user], {"tools": [{"type": "function"}]}, "tools", "does not give that"),
            ([user], {"response_format": {"type": "json_object"}}, "response_format", "the whole output"),
            ([user], {"max_completion_tokens": 3}, "max_completion_tokens", "max_completion_tokens 3 is refused"),
            ([{"role": "user", "content": " "}], {}, "messages", "is empty"),
        ):
            response = chat(messages, **more)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param)
            assert reason in error["message"]


def test_without_a_template_there_are_no_chats(generator: Generator) -> None:
    """Without a chat template, a chat is refused, and the error names the endpoint for plain prompts."""
    with ready_client(app_of(generator, limits=LIMITS)) as client:
        response = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
        assert response.status_code == 400
        assert "POST /v1/completions" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("accept", "parsed"),
    [
        ("text/plain;version=0.0.4", text_string_to_metric_families),
        ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", openmetrics_families),
    ],
)
def test_prometheus_reads_the_metrics(generator: Generator, accept: str, parsed: Any) -> None:
    """Prometheus parses the metrics; every name has our prefix or is about the process."""
    with served(app_of(generator, limits=LIMITS), LIMITS) as port:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            assert asked(client, PROMPTS[0]).status_code == 200
            response = client.get("/metrics", headers={"Accept": accept})
        assert response.headers["content-type"].startswith(accept.partition(";")[0])
        families = {family.name: family for family in parsed(response.text)}
        assert {name.partition("_")[0] for name in families} == {"calm", "process"}
        layers = expected(generator, PROMPTS[0])["exit_layers"]
        (tokens,) = [family for name, family in families.items() if name.removesuffix("_total") == "calm_beam_tokens"]
        counted = {
            sample.labels["exit_layer"]: sample.value for sample in tokens.samples if sample.name.endswith("_total")
        }
        assert counted == {str(layer): layers.count(layer) for layer in set(layers)}
