r"""The model ``rlkv`` of lm-evaluation-harness: its tasks, with a compressed cache.

The harness (0.4.13) finds models by name in its own registry and looks for none in other packages,
so importing this module registers ``rlkv``, and ``rlkv-lm-eval`` is the harness's command line with
that import done::

    rlkv-lm-eval run --model rlkv --tasks gsm8k \
        --model_args pretrained=smollm2,profile=p.json,method=rlkv,sparsity=0.5

Needs the extra ``rlkv[lm-eval]``. Deviation from the harness's own models: stop strings cut the
finished completion, they do not end generation early.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from rlkv.core.engine import Prompt, SamplingParams
from rlkv.errors import ConfigError, MissingExtraError
from rlkv.hf.attach import compress
from rlkv.hf.engine import HFEngine
from rlkv.hf.forced import Gold, force
from rlkv.hf.loading import load_model
from rlkv.methods.base import MethodOptions

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise MissingExtraError(
        "the harness model needs the package lm-eval, which is not installed; run `pip install "
        "'rlkv[lm-eval]'`"
    ) from error


@register_model("rlkv")
class RLKVModel(TemplateLM):
    """A causal language model with a compressed KV cache.

    Args:
        pretrained: Model name: embedded, smollm2, a local folder, or a hub id.
        method: Method name; default: rlkv with a profile, else full.
        profile: Head profile, for methods that need one.
        sparsity: Share of KV heads to compress, in [0, 1).
        sink: First tokens that a compressed head keeps.
        recent: Last tokens that a compressed head keeps.
        prefill: ``local`` or ``full``.
        batch_size: Rows run together.
        max_gen_toks: Completion limit where the task names none, in tokens.
        dtype: Type of the weights.
        device: Where the model runs.
    """

    def __init__(
        self,
        pretrained: str,
        method: str | None = None,
        profile: str | None = None,
        sparsity: float = 0.5,
        sink: int = 16,
        recent: int = 64,
        prefill: str = "local",
        batch_size: int | str = 16,
        max_gen_toks: int = 512,
        dtype: str = "auto",
        device: str | None = "cpu",
        **unknown: object,
    ) -> None:
        super().__init__()
        extra = sorted(set(unknown) - {"max_batch_size"})
        if extra:
            raise ConfigError(f"model rlkv has no argument {extra[0]!r}; see its documentation")
        if not str(batch_size).isdigit():
            raise ConfigError(
                f"batch_size is {batch_size!r}, expected a number; 'auto' is not known"
            )
        self.batch_size, self.max_gen_toks = int(batch_size), int(max_gen_toks)
        self._attached = ExitStack()
        self.loaded = load_model(pretrained, dtype=dtype, device=device or "cpu")  # type: ignore[arg-type]
        self.session = self._attached.enter_context(
            compress(
                self.loaded.model,
                method=method or ("rlkv" if profile else "full"),
                profile=profile,
                sparsity=float(sparsity),
                sink=int(sink),
                recent=int(recent),
                options=MethodOptions(prefill=prefill),  # type: ignore[arg-type]
                spec=self.loaded.spec,
            )
        )
        self.engine = HFEngine(self.loaded, self.session, batch_size=self.batch_size)

    @property
    def eot_token_id(self) -> int:
        """Token that stands for no context."""
        tokenizer = self.loaded.tokenizer
        found = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else None
        return int(tokenizer.eos_token_id if found is None else found)

    @property
    def tokenizer_name(self) -> str:
        """Name under which the harness caches requests."""
        return self.loaded.spec.model_id

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's text, for the harness's log."""
        return str(self.loaded.tokenizer.chat_template or "") if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation as text; :meth:`tok_encode` adds no second BOS token to it."""
        return str(
            self.loaded.tokenizer.apply_chat_template(
                chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool = True, **_: object) -> list[int]:
        """Token ids, with at most one BOS token in front."""
        encoded = self.loaded.tokenizer(string, add_special_tokens=add_special_tokens)
        tokens = [int(token) for token in encoded["input_ids"]]
        bos = self.loaded.tokenizer.bos_token_id
        doubled = len(tokens) > 1 and tokens[0] == tokens[1] == bos
        return tokens[1:] if doubled else tokens

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: object,
    ) -> list[tuple[float, bool]]:
        """(log-probability, whether greedy decoding would write it) of each continuation."""
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for batch in _by_length([len(r[1]) + len(r[2]) for r in requests], self.batch_size):
            prompts = [Prompt(str(i), tuple(requests[i][1])) for i in batch]
            golds = [Gold(tuple(requests[i][2]), ()) for i in batch]
            for prompt, gold in zip(prompts, golds, strict=True):
                self.engine.require_room(prompt, len(gold.token_ids))
            found = force(self.loaded, self.session, prompts, golds, with_logprobs=True)
            for i, gold, one in zip(batch, golds, found, strict=True):
                is_greedy = tuple(one.predicted) == gold.token_ids
                results[i] = (sum(one.logprobs), is_greedy)
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in windows as long as the model's positions."""
        config = self.loaded.model.config.get_text_config(decoder=True)
        longest = int(config.max_position_embeddings) - 1
        totals = []
        for request in requests:
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(
                token_list=tokens,
                prefix_token=self.eot_token_id,
                max_seq_len=longest,
                context_len=1,
            )
            pairs = [make_disjoint_window(window) for window in windows]
            parts = self._loglikelihood_tokens([(None, list(a), list(b)) for a, b in pairs])
            totals.append(sum(value for value, _ in parts))
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Completions up to the first stop string."""
        texts: list[str] = [""] * len(requests)
        groups: dict[SamplingParams, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(self._params(request.args[1]), []).append(i)
        for params, places in groups.items():
            prompts = [Prompt(str(i), tuple(self.tok_encode(requests[i].args[0]))) for i in places]
            for i, (completion, *_) in zip(
                places, self.engine.generate(prompts, params), strict=True
            ):
                texts[i] = cut_at(completion.text, _stops(requests[i].args[1]))
                self.cache_hook.add_partial("generate_until", requests[i].args, texts[i])
        return texts

    def _params(self, options: dict[str, Any]) -> SamplingParams:
        limit = int(options.get("max_gen_toks", options.get("max_new_tokens", self.max_gen_toks)))
        temperature = float(options.get("temperature", 0.0) or 0.0)
        if not options.get("do_sample", temperature > 0):
            temperature = 0.0
        return SamplingParams(
            limit, temperature, float(options.get("top_p", 1.0)), int(options.get("top_k", 0))
        )


def cut_at(text: str, stops: Sequence[str]) -> str:
    """``text`` up to the first of ``stops``.

    Example:
        >>> cut_at("a b. c", [".", "c"])
        'a b'
    """
    ends = [place for stop in stops if stop and (place := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def _stops(options: dict[str, Any]) -> list[str]:
    until = options.get("until", [])
    return [until] if isinstance(until, str) else list(until or [])


def _by_length(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Indices in batches of similar length, the longest first."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for start in range(0, len(order), size):
        yield order[start : start + size]


def main() -> None:
    """The harness's command line, with the model ``rlkv`` registered."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
