"""``rlkv generate``: one prompt, one completion, with a compressed cache."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

if TYPE_CHECKING:
    from rlkv.core.engine import Completion, Prompt, SamplingParams
    from rlkv.hf.attach import Session
    from rlkv.hf.loading import LoadedModel


@dataclass(frozen=True)
class Generate:
    """Write a completion to stdout as it comes, and the KV bytes it took to stderr."""

    prompt: tyro.conf.Positional[str]
    """What to say to the model; - reads it from stdin."""
    model: str = "embedded"
    """Model: embedded, smollm2, a local folder, or a hub id."""
    method: str | None = None
    """Method, see `rlkv list methods`; default: rlkv with a profile, else full."""
    profile: Path | None = None
    """Head profile, for methods that need one."""
    sparsity: float = 0.5
    """Share of KV heads to compress, in [0, 1)."""
    sink: int = 16
    """First tokens that a compressed head keeps."""
    recent: int = 64
    """Last tokens that a compressed head keeps."""
    prefill: Literal["local", "full"] = "local"
    """Whether compressed heads see sink + recent (local) or all of the prompt (full)."""
    any_model: bool = False
    """Accept a profile made for another model of the same shape."""
    max_new_tokens: int = 512
    """Completion limit in tokens."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Probability mass that sampling keeps, in (0, 1]."""
    top_k: int = 0
    """Tokens that sampling keeps; 0 keeps all."""
    seed: int = 0
    """Seed of sampling."""
    raw: bool = False
    """Pass the prompt as it is, without the chat template."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights."""
    device: str = "cpu"
    """Where the model runs, such as cpu or cuda:0."""

    def run(self) -> int:
        """Generates and prints; returns the exit status."""
        from rlkv.core.budget import Budget
        from rlkv.core.engine import SamplingParams
        from rlkv.core.head_profile import HeadProfile
        from rlkv.errors import ConfigError
        from rlkv.hf.sources import resolve_model
        from rlkv.registry import METHODS

        params = SamplingParams(
            self.max_new_tokens, self.temperature, self.top_p, self.top_k, seed=self.seed
        )
        budget = Budget(self.sparsity, self.sink, self.recent)
        text = self._text()
        if not text.strip():
            raise ConfigError("the prompt is empty; pass some text, or - to read it from stdin")
        method = self.method or ("full" if self.profile is None else "rlkv")
        METHODS.require(method)
        profile = None if self.profile is None else HeadProfile.load(self.profile)
        resolve_model(self.model)

        from rlkv.hf.attach import compress  # takes seconds: it imports transformers
        from rlkv.hf.loading import load_model, model_spec
        from rlkv.methods.base import MethodOptions

        options = MethodOptions(prefill=self.prefill, any_model=self.any_model)
        METHODS.load(method)(model_spec(self.model), budget, profile, options)  # checks profile
        loaded = load_model(self.model, dtype=self.dtype, device=self.device)
        with compress(
            loaded.model,
            method=method,
            profile=profile,
            sparsity=self.sparsity,
            sink=self.sink,
            recent=self.recent,
            options=options,
            spec=loaded.spec,
        ) as session:
            completion = self._stream(loaded, session, self._encode(loaded, text), params)
        full = loaded.spec.kv_bytes(completion.prompt_tokens + len(completion.token_ids) - 1)
        print(
            f"{method}: {completion.kv_bytes} KV bytes, full cache {full} "
            f"({completion.kv_bytes / full:.0%}); {completion.prompt_tokens} prompt tokens, "
            f"{len(completion.token_ids)} written, ended by {completion.finish_reason}",
            file=sys.stderr,
        )
        return 0

    def _text(self) -> str:
        """The prompt, from the command line or from stdin.

        Raises:
            ConfigError: It is not UTF-8, or there is no stdin.
        """
        from rlkv.errors import ConfigError

        if self.prompt == "-" and sys.stdin is None:
            raise ConfigError("the prompt is - and stdin is closed; pass the text itself")
        try:
            text = sys.stdin.read() if self.prompt == "-" else self.prompt
            text.encode("utf-8")  # bytes that are no text arrive as lone surrogates
        except UnicodeError as error:
            raise ConfigError(f"the prompt is not UTF-8 text ({error}); convert it") from error
        return text

    def _encode(self, loaded: LoadedModel, text: str) -> Prompt:
        from rlkv.core.engine import Prompt
        from rlkv.hf.engine import encode_chat

        if self.raw:
            return Prompt("prompt", tuple(loaded.tokenizer(text)["input_ids"]))
        return encode_chat(loaded, "prompt", [{"role": "user", "content": text}])

    def _stream(
        self, loaded: LoadedModel, session: Session, prompt: Prompt, params: SamplingParams
    ) -> Completion:
        """Generates and prints text as soon as its characters are whole."""
        from rlkv.hf.engine import HFEngine

        tokens: list[int] = []
        printed = ""

        def show(key: str, sample: int, token: int) -> None:
            nonlocal printed
            tokens.append(token)
            text = str(loaded.tokenizer.decode(tokens, skip_special_tokens=True))
            # an unfinished character decodes to the replacement mark: wait for its other bytes
            if text.startswith(printed) and not text.endswith("\ufffd"):
                sys.stdout.write(text[len(printed) :])
                sys.stdout.flush()
                printed = text

        engine = HFEngine(loaded, session, batch_size=1, on_token=show)
        ((completion,),) = engine.generate([prompt], params)
        sys.stdout.write(completion.text[len(printed) :] + "\n")
        return completion
