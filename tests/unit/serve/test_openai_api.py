"""The reference server: routes, batching, streaming, stops and errors."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("starlette", reason="needs rlkv[serve]")
pytest.importorskip("httpx", reason="the test client of starlette needs it")

from starlette.testclient import TestClient

from rlkv.core.engine import Prompt, SamplingParams
from rlkv.errors import ConfigError, UnsupportedFeatureError
from rlkv.hf.attach import compress
from rlkv.hf.engine import HFEngine
from rlkv.hf.loading import LoadedModel, spec_from_config
from rlkv.serve.openai_api import ReferenceServer
from rlkv.serve.openai_body import StopText, parse_ask
from tests.tiny import tiny_model


class Letters:
    """A tokenizer of single letters: token i is the i-th character from the space on."""

    chat_template = None
    pad_token_id = 0
    eos_token_id = 96

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - 32 for letter in text]}

    def decode(self, tokens, skip_special_tokens: bool = False) -> str:
        return "".join(chr(32 + token) for token in tokens if token != 96)


@pytest.fixture(scope="module")
def engine():
    model = tiny_model("llama")
    loaded = LoadedModel(model, Letters(), spec_from_config(model.config, "tiny-llama"))
    with compress(model, method="streaming_llm", sink=4, recent=12, spec=loaded.spec) as session:
        yield HFEngine(loaded, session, batch_size=8)


@pytest.fixture
def client(engine):
    server = ReferenceServer(engine, "tiny-llama", api_key="k3y")
    with TestClient(server.app(), headers={"Authorization": "Bearer k3y"}) as client:
        yield client
    server.stop()


def expected(engine, text: str, tokens: int) -> str:
    prompt = Prompt("x", tuple(Letters()(text)["input_ids"]))
    on_token, engine.on_token = engine.on_token, None
    ((completion,),) = engine.generate([prompt], SamplingParams(tokens))
    engine.on_token = on_token
    return completion.text


def body(prompt: str, **fields) -> dict:
    return {"model": "tiny-llama", "prompt": prompt, "max_tokens": 12, "temperature": 0, **fields}


def test_completion_is_the_engines_greedy_text(engine, client):
    answer = client.post("/v1/completions", json=body("hello there")).json()
    assert answer["choices"][0]["text"] == expected(engine, "hello there", 12)
    assert answer["usage"]["prompt_tokens"] == 11
    assert answer["object"] == "text_completion"


def test_streamed_pieces_join_to_the_whole(engine, client):
    with client.stream("POST", "/v1/completions", json=body("stream me", stream=True)) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    parts = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert "".join(part["text"] for part in parts) == expected(engine, "stream me", 12)
    assert [part["finish_reason"] for part in parts][-1] == "length"
    assert len(parts) > 5


def test_chat_answers_like_the_openai_api(engine, client):
    ask = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=ask).json()
    assert answer["choices"][0]["message"] == {
        "role": "assistant", "content": expected(engine, "hi", 6),
    }  # fmt: skip


def test_requests_at_once_share_batches_and_keep_their_own_answers(engine, client):
    texts = [f"request number {i} of some" for i in range(12)]
    lengths = [3 + i for i in range(12)]
    wanted = [expected(engine, text, n) for text, n in zip(texts, lengths, strict=True)]

    def ask(pair):
        return client.post("/v1/completions", json=body(pair[0], max_tokens=pair[1])).json()

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, zip(texts, lengths, strict=True)))
    assert [answer["choices"][0]["text"] for answer in answers] == wanted


def test_a_stop_text_ends_the_answer_before_it(engine, client):
    # the random model must not end by itself before the stop text
    prompt = next(
        p for p in ("a stop", "halt", "end it", "no more") if len(expected(engine, p, 12)) > 8
    )
    text = expected(engine, prompt, 12)
    answer = client.post("/v1/completions", json=body(prompt, stop=text[4:6])).json()
    assert answer["choices"][0]["text"] == text[: text.index(text[4:6])]
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "status", "word"),
    [
        ({"prompt": ""}, 400, "prompt"),
        ({"max_tokens": -1}, 400, "max_new_tokens"),
        ({"max_tokens": 10**6}, 400, "holds 4096"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"n": 3}, 400, "n above 1"),
        ({"logprobs": 5}, 400, "--engine vllm"),
        ({"model": "other"}, 404, "tiny-llama"),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_reason(client, fields, status, word):
    answer = client.post("/v1/completions", json={**body("text"), **fields})
    assert answer.status_code == status
    assert word in answer.json()["error"]["message"]


def test_a_wrong_key_is_refused(client):
    assert client.get("/v1/models", headers={"Authorization": "Bearer x"}).status_code == 401
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny-llama"
    assert client.get("/health").status_code == 200
    assert "rlkv:num_requests_running 0" in client.get("/metrics").text


def test_text_is_held_back_while_a_stop_may_begin():
    text = StopText(["END"])
    assert text.update("abcE", is_final=False) == "ab"
    assert text.update("abcEx", is_final=False) == "c"
    assert text.update("abcExEND and more", is_final=False) == "Ex"
    assert text.is_stopped


def test_bodies_are_checked():
    with pytest.raises(ConfigError, match="no JSON object"):
        parse_ask([], is_chat=False)
    with pytest.raises(ConfigError, match="role and a content"):
        parse_ask({"messages": [{"content": "x"}]}, is_chat=True)
    with pytest.raises(UnsupportedFeatureError, match="tools"):
        parse_ask({"tools": [1], "messages": []}, is_chat=True)
