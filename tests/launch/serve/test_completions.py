"""Clients of OpenAI's completions interface get the generator's answers, or an error that says what is wrong."""

import json
import pathlib
import re
from typing import Any

import pytest
from fastapi.testclient import TestClient

from calm_beam.launch.serve.request import Limits
from calm_beam.serving import Generator, OutputError
from tests.calm_beam.serving.builders import STEPS, with_groups
from tests.launch.serve.served import (
    LIMITS,
    PROMPTS,
    answer_of,
    app_of,
    asked,
    assert_same,
    expected,
    read_events,
    ready_client,
)


def _ended(tokens: list[int]) -> str:
    return "stop" if tokens[-1] == 1 else "length"


def test_a_completion_is_the_generatorsanswer_of(client: TestClient, generator: Generator) -> None:
    """A completion has OpenAI's fields, with usage and a finish reason."""
    reasons = set()
    for prompt in PROMPTS:
        body = asked(client, prompt).json()
        (choice,) = body["choices"]
        answer = expected(generator, prompt)
        assert_same(answer_of(choice), answer)
        assert (choice["index"], choice["logprobs"]) == (0, None)
        assert choice["finish_reason"] == _ended(answer["tokens"])
        assert (body["object"], body["model"]) == ("text_completion", "calm-beam")
        assert body["id"].startswith("cmpl-")
        assert body["created"] > 0
        assert body["system_fingerprint"] == generator.manifest.digest
        prompt_tokens, made = len(generator.request(prompt, name="a").ids), len(answer["tokens"])
        assert body["usage"] == {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": made,
            "total_tokens": prompt_tokens + made,
        }
        reasons.add(choice["finish_reason"])
    assert "length" in reasons


def test_prompts_come_in_four_shapes(client: TestClient, generator: Generator) -> None:
    """A prompt may be a text, a list of texts, token ids or lists of ids; choices keep the order of the prompts."""
    ids = [list(generator.request(prompt, name="a").ids) for prompt in PROMPTS[:2]]
    answers = [expected(generator, prompt) for prompt in PROMPTS[:2]]
    for prompt in (PROMPTS[:2], ids):
        choices = asked(client, prompt).json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1]
        for choice, answer in zip(choices, answers, strict=True):
            assert_same(answer_of(choice), answer)
    (choice,) = asked(client, ids[0]).json()["choices"]
    assert_same(answer_of(choice), answers[0])


def test_a_stream_has_an_event_for_every_token(client: TestClient, generator: Generator) -> None:
    """A stream has an event for every token; each prompt ends with its finish reason, and the stream with [DONE]."""
    body = {"stream": True, "stream_options": {"include_usage": True}}
    response = asked(client, PROMPTS[:2], **body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, (_, usage), (_, done) = read_events(response.text)
    assert done == "[DONE]"
    parts: list[list[Any]] = [[], []]
    for _, event in events:
        assert (event["object"], event["usage"]) == ("text_completion", None)
        (choice,) = event["choices"]
        parts[choice["index"]].append(choice)
    total = 0
    for prompt, (*tokens, last) in zip(PROMPTS, parts, strict=False):
        answer = expected(generator, prompt)
        assert "".join(part["text"] for part in tokens) == answer["text"]
        assert [part["calm_beam"]["token"] for part in tokens] == answer["tokens"]
        assert [part["calm_beam"]["exit_layer"] for part in tokens] == answer["exit_layers"]
        assert {part["finish_reason"] for part in tokens} == {None}
        assert (last["text"], last["finish_reason"]) == ("", _ended(answer["tokens"]))
        assert_same({"text": answer["text"], **last["calm_beam"]}, answer)
        total += len(tokens)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == total
    # Usage is sent only if the client asks for it.
    *events, _ = read_events(asked(client, PROMPTS[0], stream=True).text)
    assert {"usage" in event for _, event in events} == {False}


def test_what_leaves_outputs_as_they_are_is_accepted(client: TestClient, generator: Generator) -> None:
    """Parameters that leave outputs unchanged, such as spelled-out defaults, are accepted."""
    answer = expected(generator, PROMPTS[0])
    neutral: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 1,
        "n": 1,
        "best_of": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "stop": [],
        "suffix": "",
        "echo": False,
        "logprobs": None,
        "max_tokens": STEPS,
        "seed": 7,
        "user": "somebody",
        "stream": False,
        "stream_options": None,
    }
    for parameters in (neutral, dict.fromkeys(neutral)):
        (choice,) = asked(client, PROMPTS[0], **parameters).json()["choices"]
        assert_same(answer_of(choice), answer)


@pytest.mark.parametrize(
    ("parameter", "value", "code", "message"),
    [
        (
            "temperature",
            0.7,
            "not_calibrated",
            "temperature 0.7 is refused: each token is the likeliest, .* Leave temperature out, or pass 0",
        ),
        ("top_p", 0.9, "not_calibrated", "top_p 0.9 is refused: each token"),
        ("n", 2, "not_calibrated", "n 2 is refused: .* all outputs would be the same"),
        ("best_of", 2, "not_calibrated", "best_of 2"),
        ("presence_penalty", 1, "not_calibrated", "presence_penalty 1"),
        ("frequency_penalty", -1, "not_calibrated", "frequency_penalty -1"),
        (
            "logit_bias",
            {"5": 1},
            "not_calibrated",
            r"logit_bias \{'5': 1\} is refused: .* Leave logit_bias out, or pass \{\}",
        ),
        (
            "stop",
            "a",
            "not_calibrated",
            "stop 'a' is refused: outputs were calibrated without stop strings, and the promise",
        ),
        ("stop", ["\ud800"], "not_calibrated", "stop"),
        ("suffix", "a", "not_calibrated", "suffix 'a'"),
        ("echo", True, "not_supported", "echo True is refused: this service does not give that"),
        ("logprobs", 0, "not_supported", "logprobs 0 is refused: .* Leave logprobs out"),
        ("max_tokens", STEPS + 1, "not_calibrated", f"max_tokens {STEPS + 1} is refused: .* at most {STEPS} tokens"),
        ("max_tokens", STEPS - 1, "not_calibrated", "nor about|neither about longer ones nor about their beginnings"),
        ("stream_options", {}, None, "stream_options are for streams: pass stream=true"),
        ("prompt", "a" * 201, None, "the prompt is longer than 200 characters"),
        ("prompt", [[2] * 101] * 2, None, "the prompts are longer than 200 characters"),
        ("prompt", ["a", "a", "a"], None, "a request may have 2 prompts, got 3"),
        ("prompt", " ", None, "the prompt is empty. Give a text"),
        ("prompt", ["a", " "], None, "prompt 1 is empty"),
        ("prompt", [5, 64], None, "the prompt: token ids must be integers from 0 to 63, got 64"),
        *(
            ("prompt", value, None, "prompt must be a text, a list of texts, a list of token ids, or a list of such")
            for value in ([], 7, None, {"a": 1}, [True], ["a", 5], [[5], "a"], [[5], []], [[5.5]], [[[5]]])
        ),
    ],
)
def test_what_was_not_calibrated_is_refused(
    client: TestClient, parameter: str, value: object, code: str | None, message: str
) -> None:
    """Parameters that were not calibrated are refused, with the parameter's name and the reason."""
    # Test JSON has escaped surrogates, as clients send them.
    response = client.post(
        "/v1/completions",
        content=json.dumps({"prompt": PROMPTS[0], parameter: value}),
        headers={"Content-Type": "application/json"},
    )
    error = response.json()["error"]
    assert response.status_code == (413 if "longer than" in message else 400)
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", parameter, code)
    assert re.search(message, error["message"])


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (b'{"model": "calm-beam"}', 400, "prompt is missing"),
        (b'{"model": "calm-beam", "prompt": "a", "beam_size": 4}', 400, "unknown field beam_size"),
        (
            b'{"model": "calm-beam", "prompt": "a", "calm_beam": {"threshold": 0}}',
            400,
            "unknown field calm_beam.threshold",
        ),
        (
            b'{"model": "calm-beam", "prompt": "a", "max_tokens": "many"}',
            400,
            "max_tokens: Input should be a valid int",
        ),
        (b'{"model": ', 400, "the body is not JSON: Expecting value at character 10"),
        (b'["a"]', 400, 'the body must be a JSON object, got ["a"]'),
        (b"", 400, "the body is missing; it must be a JSON object"),
        (b"\xff", 400, "There was an error parsing the body"),
        (b" " * 4000, 413, "the body is longer than 3400 bytes"),
        (b'{"model": "gpt-2", "prompt": "a"}', 404, "the model 'gpt-2' is not served here, but 'calm-beam' is"),
        (b'{"model": "\\ud800", "prompt": "a"}', 404, "is not served here"),
    ],
)
def test_bad_requests_are_refused_in_the_same_shape(
    client: TestClient, content: bytes, status: int, message: str
) -> None:
    """Malformed requests get an error of the same form."""
    response = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (status, "invalid_request_error")
    assert message in error["message"]
    assert client.get("/v1/completions").json()["error"]["message"] == "Method Not Allowed"


def test_a_body_that_is_not_declared_to_be_json_says_so(client: TestClient) -> None:
    """Without its header, JSON is not read as JSON; the error names the header."""
    response = client.post("/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"})
    assert response.status_code == 400
    assert "Content-Type: application/json" in response.json()["error"]["message"]


def test_models_are_listed(client: TestClient, generator: Generator) -> None:
    """The model list has one entry, with the settings that clients cannot change."""
    (model,) = client.get("/v1/models").json()["data"]
    assert client.get("/v1/models/calm-beam").json() == model
    assert (model["id"], model["object"], model["owned_by"]) == ("calm-beam", "model", "calm-beam")
    assert model["calm_beam"] == {
        "fingerprint": generator.manifest.model.fingerprint,
        "manifest": generator.manifest.digest,
        "max_tokens": STEPS,
        "max_prompt_tokens": 32,
        "threshold": 0.3,
        "delta": 0.1,
        "epsilon": 0.05,
    }
    response = client.get("/v1/models/gpt-2")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_a_completion_may_name_its_group(generator: Generator, folder: pathlib.Path) -> None:
    """A completion may name its group in our own field; each choice says what is promised for it."""
    grouped = Generator.from_manifest(with_groups(generator.manifest), folder / "model", batch_size=2)
    with ready_client(app_of(grouped, limits=LIMITS, name="mine")) as client:
        for group, threshold in (("en", 0.9), ("it", None)):
            body = {"model": "mine", "prompt": PROMPTS[0], "calm_beam": {"group": group}}
            (choice,) = client.post("/v1/completions", json=body).json()["choices"]
            promise = choice["calm_beam"].pop("promise")
            assert (promise and promise["threshold"]) == threshold
            assert_same(answer_of(choice), expected(grouped, PROMPTS[0], group=group))


def test_busy_and_broken_are_told_as_clients_expect(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy service and a failing model have statuses on which clients retry; a failing stream ends with an error."""
    with ready_client(app_of(generator, limits=Limits(prompts=2, waiting=2))) as client:
        asked(client, PROMPTS[0])

        def broken(_: object, *__: object) -> None:
            raise OutputError("the prompt: not finite")

        with monkeypatch.context() as patched:
            patched.setattr(Generator, "answer", broken)
            response = asked(client, PROMPTS[0])
            stream = asked(client, PROMPTS[0], stream=True)
        error = {"message": "the model gave no output", "type": "server_error", "param": None, "code": None}
        assert (response.status_code, response.json()) == (500, {"error": error})
        assert read_events(stream.text)[-1] == ("", {"error": error})
        monkeypatch.setattr("calm_beam.serving.ContinuousGenerator.room", 1)
        busy = asked(client, PROMPTS[:2])
        assert (busy.status_code, busy.headers["Retry-After"]) == (503, "1")
        assert busy.json()["error"]["type"] == "server_error"
        assert asked(client, PROMPTS[0]).status_code == 200
