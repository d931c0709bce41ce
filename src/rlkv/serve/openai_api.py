"""A reference OpenAI server over ``HFEngine``, for machines without vLLM and for small use.

Routes: ``/health``, ``/metrics``, ``/v1/models``, ``/v1/completions``, ``/v1/chat/completions``,
both streamed or whole. The web part is Starlette's.
"""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from rlkv.core.engine import Completion, Prompt
from rlkv.errors import MissingExtraError, PromptTooLongError, RLKVError
from rlkv.hf.engine import HFEngine, encode_chat
from rlkv.serve.batcher import Batcher
from rlkv.serve.openai_body import Ask, StopText, parse_ask

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response


class ReferenceServer:
    """Answers the routes with one engine.

    Args:
        engine: Decodes; RLKV is attached to its model for as long as the server lives.
        name: What clients ask for.
        api_key: Key that clients must send; None asks for none.
    """

    def __init__(self, engine: HFEngine, name: str, api_key: str | None = None) -> None:
        self._engine, self._name, self._api_key = engine, name, api_key
        self._batcher = Batcher(engine)
        self._numbers = itertools.count()
        self._started = int(time.time())

    def app(self) -> Starlette:
        """The web application.

        Raises:
            MissingExtraError: Starlette is not installed.
        """
        try:
            from starlette.applications import Starlette
            from starlette.routing import Route
        except ImportError as error:
            raise MissingExtraError(
                "the reference server needs starlette and uvicorn; run `pip install 'rlkv[serve]'`"
            ) from error
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    def stop(self) -> None:
        """Lets the batch that runs finish."""
        self._batcher.stop()

    async def _health(self, request: Request) -> Response:
        from starlette.responses import Response

        return Response(status_code=200)

    async def _metrics(self, request: Request) -> Response:
        from starlette.responses import PlainTextResponse

        return PlainTextResponse(
            "# TYPE rlkv:num_requests_running gauge\n"
            f"rlkv:num_requests_running {self._batcher.running}\n"
            "# TYPE rlkv:num_requests_waiting gauge\n"
            f"rlkv:num_requests_waiting {self._batcher.waiting}\n"
        )

    async def _models(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        if refusal := self._refusal(request):
            return refusal
        model = {
            "id": self._name, "object": "model", "created": self._started, "owned_by": "rlkv",
        }  # fmt: skip
        return JSONResponse({"object": "list", "data": [model]})

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, is_chat=False)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, is_chat=True)

    async def _answer(self, request: Request, *, is_chat: bool) -> Response:
        from starlette.responses import JSONResponse, StreamingResponse

        if refusal := self._refusal(request):
            return refusal
        try:
            body = await request.json()
            ask = parse_ask(body, is_chat=is_chat)
            prompt = self._encode(ask)
            self._engine.require_room(prompt, ask.params.max_new_tokens)
            wanted = body.get("model")
        except (RLKVError, ValueError) as error:
            return _error(400, str(error))
        if wanted not in (None, self._name):
            return _error(404, f"model {wanted!r} is not served; ask for {self._name!r}")
        shape = _Shape(self._name, is_chat)
        if ask.is_stream:
            events = self._stream(ask, prompt, shape)
            return StreamingResponse(events, media_type="text/event-stream")
        try:
            return JSONResponse(await self._whole(ask, prompt, shape))
        except PromptTooLongError as error:
            return _error(400, str(error))
        except (RLKVError, RuntimeError, MemoryError) as error:
            return _error(500, f"the batch failed: {error}")

    def _encode(self, ask: Ask) -> Prompt:
        key, limit = f"request-{next(self._numbers)}", ask.params.max_new_tokens
        if ask.messages:
            encoded = encode_chat(self._engine.loaded, key, ask.messages)
            return Prompt(key, encoded.token_ids, limit)
        if isinstance(ask.prompt, str):
            return Prompt(key, tuple(self._engine.loaded.tokenizer(ask.prompt)["input_ids"]), limit)
        return Prompt(key, ask.prompt or (), limit)

    async def _parts(
        self, ask: Ask, prompt: Prompt
    ) -> AsyncIterator[tuple[str, Completion | None]]:
        """Pieces of text as they come; the last one carries the completion."""
        decode = self._engine.loaded.tokenizer.decode
        text, tokens = StopText(ask.stop), []
        async for event in self._batcher.run(prompt, ask.params):
            if isinstance(event, Completion):
                yield ("" if text.is_stopped else text.update(event.text, is_final=True)), event
            elif not text.is_stopped:
                tokens.append(event)
                decoded = str(decode(tokens, skip_special_tokens=True))
                if fresh := text.update(decoded, is_final=False):
                    yield fresh, None
        return

    async def _whole(self, ask: Ask, prompt: Prompt, shape: _Shape) -> dict[str, Any]:
        pieces: list[str] = []
        completion = None
        async for piece, found in self._parts(ask, prompt):
            pieces.append(piece)
            completion = found or completion
        return shape.whole("".join(pieces), _reason(ask, pieces, completion), completion)

    async def _stream(self, ask: Ask, prompt: Prompt, shape: _Shape) -> AsyncIterator[str]:
        pieces: list[str] = []
        try:
            async for piece, completion in self._parts(ask, prompt):
                pieces.append(piece)
                reason = None if completion is None else _reason(ask, pieces, completion)
                yield f"data: {json.dumps(shape.part(piece, reason))}\n\n"
        except (RLKVError, RuntimeError, MemoryError) as error:
            yield f"data: {json.dumps({'error': {'message': str(error), 'code': 500}})}\n\n"
        yield "data: [DONE]\n\n"

    def _refusal(self, request: Request) -> Response | None:
        if self._api_key is None:
            return None
        given = request.headers.get("authorization", "")
        if secrets.compare_digest(given.encode(), f"Bearer {self._api_key}".encode()):
            return None
        return _error(401, "the API key is missing or wrong; send it as Authorization: Bearer KEY")


class _Shape:
    """The JSON of one answer, as the OpenAI API has it."""

    def __init__(self, model: str, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._base = {
            "id": ("chatcmpl-" if is_chat else "cmpl-") + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, text: str, reason: str, completion: Completion | None) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": text}} if self._is_chat else {
            "text": text
        }  # fmt: skip
        written = len(completion.token_ids) if completion else 0
        read = completion.prompt_tokens if completion else 0
        usage = {
            "prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written,
        }  # fmt: skip
        kind = "chat.completion" if self._is_chat else "text_completion"
        choice = {"index": 0, "finish_reason": reason, "logprobs": None, **said}
        return {**self._base, "object": kind, "choices": [choice], "usage": usage}

    def part(self, text: str, reason: str | None) -> dict[str, Any]:
        said = {"delta": {"role": "assistant", "content": text}} if self._is_chat else {
            "text": text
        }  # fmt: skip
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        choice = {"index": 0, "finish_reason": reason, "logprobs": None, **said}
        return {**self._base, "object": kind, "choices": [choice]}


def _reason(ask: Ask, pieces: list[str], completion: Completion | None) -> str:
    if completion is None:
        return "stop"
    cut = len("".join(pieces)) < len(completion.text)
    return "stop" if cut and ask.stop else completion.finish_reason


def _error(status: int, message: str) -> Response:
    from starlette.responses import JSONResponse

    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return JSONResponse(body, status_code=status)
