"""The openai client, unmodified, against `rlkv serve` with a real model."""

from __future__ import annotations

import asyncio

import pytest

from tests.vllm.test_server import server
from tests.vllm.test_smollm2 import smollm2  # noqa: F401 - a fixture

pytestmark = pytest.mark.vllm
MESSAGES = [{"role": "user", "content": "Name the capital of France in one word."}]
OPTIONS = {"model": "SmolLM2-135M-Instruct", "messages": MESSAGES, "max_tokens": 12}


def test_openai_client_sync_async_and_streaming(smollm2, tmp_path):  # noqa: F811
    openai = pytest.importorskip("openai")

    async def ask_async(base: str) -> str:
        async with openai.AsyncOpenAI(base_url=base, api_key="k3y") as client:
            answer = await client.chat.completions.create(**OPTIONS, temperature=0)
            return answer.choices[0].message.content

    with server(smollm2, 0.5, tmp_path / "log", tokenizer=True) as (address, _):
        base = address + "/v1"
        client = openai.OpenAI(base_url=base, api_key="k3y")
        whole = client.chat.completions.create(**OPTIONS, temperature=0)
        text = whole.choices[0].message.content
        stream = client.chat.completions.create(**OPTIONS, temperature=0, stream=True)
        pieces = [part.choices[0].delta.content or "" for part in stream if part.choices]
        several = client.chat.completions.create(**OPTIONS, n=3, temperature=0.8, seed=1)
        plain = client.completions.create(
            model=OPTIONS["model"], prompt="One, two, three,", max_tokens=8, temperature=0,
            stop=["\n"], logprobs=2,
        )  # fmt: skip
        assert [model.id for model in client.models.list()] == [OPTIONS["model"]]
        assert asyncio.run(ask_async(base)) == text
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=base, api_key="wrong").models.list()
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**{**OPTIONS, "max_tokens": 10**6})
    assert text
    assert "".join(pieces) == text
    assert len(pieces) > 3
    assert len(several.choices) == 3
    assert plain.choices[0].text
    assert len(plain.choices[0].logprobs.tokens) == plain.usage.completion_tokens
