"""What clients of the reference server may ask, checked; and text from tokens, cut at stops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rlkv.core.engine import SamplingParams
from rlkv.errors import ConfigError, UnsupportedFeatureError

_REFUSED = ("tools", "functions", "logprobs", "top_logprobs", "suffix", "echo", "best_of")
_DEFAULT_TOKENS = 256
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class Ask:
    """One completion request."""

    prompt: str | tuple[int, ...] | None
    """Text or tokens; None for a chat."""
    messages: tuple[dict[str, str], ...]
    """Chat messages; empty for a plain completion."""
    params: SamplingParams
    """Sampling settings and completion limit."""
    stop: tuple[str, ...]
    """Texts that end a completion and are not part of it."""
    is_stream: bool
    """Whether tokens are sent as they come."""


def parse_ask(body: object, *, is_chat: bool) -> Ask:
    """The request in a JSON body.

    Raises:
        ConfigError: A field is missing or wrong.
        UnsupportedFeatureError: A field asks for something that the reference server lacks.
    """
    if not isinstance(body, Mapping):
        raise ConfigError("the request body is no JSON object")
    for name in _REFUSED:
        if body.get(name):
            raise UnsupportedFeatureError(f"{name} is not served by --engine hf; use --engine vllm")
    if body.get("n", 1) != 1:
        raise UnsupportedFeatureError("n above 1 is not served by --engine hf; send n requests")
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or _DEFAULT_TOKENS
    params = SamplingParams(
        max_new_tokens=_number(limit, "max_tokens", int),
        temperature=_number(body.get("temperature", 1.0), "temperature", float),
        top_p=_number(body.get("top_p", 1.0), "top_p", float),
        top_k=max(0, _number(body.get("top_k", 0), "top_k", int)),
        seed=_number(body.get("seed") or 0, "seed", int),
    )
    stop = body.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in stop):
        raise ConfigError("stop must be a text or a list of texts")
    prompt = None if is_chat else _prompt(body.get("prompt"))
    messages = _messages(body.get("messages")) if is_chat else ()
    return Ask(prompt, messages, params, stop, bool(body.get("stream", False)))


def _number(value: object, name: str, kind: type[Number]) -> Number:
    if isinstance(value, bool) or not isinstance(value, int | float) or kind(value) != value:
        raise ConfigError(f"{name} is {value!r}; expected a number")
    return kind(value)


def _prompt(value: object) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
        return tuple(value)
    raise ConfigError("prompt must be a text or a list of token ids, one prompt a request")


def _messages(value: object) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise ConfigError("messages must be a list of at least one message")
    found: list[dict[str, str]] = []
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ConfigError("each message needs a role and a content")
        content = message.get("content")
        if isinstance(content, list):  # the form that clients use for mixed content
            parts = [p.get("text") for p in content if isinstance(p, Mapping)]
            content = "".join(part for part in parts if isinstance(part, str))
        if not isinstance(content, str):
            raise ConfigError("each message needs a content that is text")
        found.append({"role": str(message["role"]), "content": content})
    return tuple(found)


class StopText:
    """Text that grows token by token, held back where a stop could still begin."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._sent = 0
        self.is_stopped = False

    def update(self, text: str, *, is_final: bool) -> str:
        """The new part of ``text`` that may be sent.

        Args:
            text: Everything decoded so far.
            is_final: Whether nothing follows.
        """
        ends = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if ends:
            self.is_stopped = True
            end = min(ends)
        elif is_final:
            end = len(text)
        else:
            # an unfinished character decodes to the replacement mark: wait for its other bytes
            whole = text.rstrip("\ufffd")
            end = len(whole) - max((len(stop) - 1 for stop in self._stops), default=0)
        fresh = text[self._sent : max(end, self._sent)]
        self._sent = max(end, self._sent)
        return fresh
