"""Measures the embedded reasoner: full cache, all heads local, and one head local at a time.

Plain transformers with greedy generation; nothing of this package's caches takes part. A local head
is simulated exactly by an additive mask per query head: query ``q`` sees key ``k`` if and only if
``k <= q`` and (``k < sink`` or ``q - k < recent``), positions counted from the row's first token.
All problems of one run have equally many variables, hence equally many tokens, so that rows need no
padding. Prompt and completion are masked alike, as in training with gates.

Usage::

    python scripts/evaluate_embedded.py src/rlkv/embedded
    python scripts/evaluate_embedded.py src/rlkv/embedded --leave-one-out 100 --halves 5

The result is one JSON object on stdout.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from rlkv.core.files import to_json
from rlkv.tasks.base import Example
from rlkv.tasks.chain import DEFAULT_VARIABLES, Chain


@dataclass(frozen=True)
class Options:
    """What to measure."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Folder of the model."""
    full: int = 500
    """Test problems with the full cache."""
    all_local: int = 200
    """Test problems with every head local."""
    leave_one_out: int = 0
    """Test problems for each head made local alone; 0 leaves this out."""
    halves: int = 0
    """Random halves of the heads made local, after the leave-one-out order's half."""
    variables: int = DEFAULT_VARIABLES
    """Variables of a problem."""
    seed: int = 0
    """Seed of the test problems."""
    sink: int = 16
    """First tokens a local head keeps."""
    recent: int = 64
    """Last tokens a local head keeps, the query's own included."""
    batch: int = 100
    """Rows generated together."""
    threads: int = 1
    """CPU threads."""


class LocalHeads:
    """Attention in which chosen kv heads see sink and recent tokens only.

    Attributes:
        local: (layers, kv_heads) bool; True for a head that is local.
    """

    def __init__(self, model: PreTrainedModel, sink: int, recent: int) -> None:
        self._sink, self._recent = sink, recent
        config = model.config
        shape = (config.num_hidden_layers, config.num_key_value_heads)
        self.local = torch.zeros(shape, dtype=torch.bool)
        AttentionInterface.register("local_heads", self._attend)
        model.set_attn_implementation("local_heads")

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """Attention over unpadded rows; shapes as in transformers' attention interface."""
        batch, query_heads, tokens, head_dim = query.shape
        kv_heads, length = key.shape[1], key.shape[2]
        at = torch.arange(length - tokens, length)[:, None]
        keys_at = torch.arange(length)[None]
        causal = keys_at <= at
        near = causal & ((keys_at < self._sink) | (at - keys_at < self._recent))
        # (kv_heads, 1, tokens, length): a head's group of queries shares its mask
        visible = torch.where(self.local[module.layer_idx][:, None, None], near, causal)[:, None]
        grouped = query.view(batch, kv_heads, query_heads // kv_heads, tokens, head_dim)
        scores = torch.einsum("bhgqd,bhkd->bhgqk", grouped, key) * scaling
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        mixed = torch.einsum("bhgqk,bhkd->bhgqd", weights, value)
        return mixed.reshape(batch, query_heads, tokens, head_dim).transpose(1, 2), None


class Measurement:
    """A loaded model and the test problems it is asked."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.task = Chain(num_variables=options.variables)
        self.tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(options.folder)
        self.model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32)
        self.model.eval()
        self.heads = LocalHeads(self.model, options.sink, options.recent)
        most = max(options.full, options.all_local, options.leave_one_out)
        self.problems = list(self.task.examples(most, seed=options.seed))

    def accuracy(self, local: torch.Tensor, limit: int) -> float:
        """Share of the first ``limit`` problems solved with the heads of ``local`` local."""
        self.heads.local = local
        rewards: list[float] = []
        for start in range(0, limit, self.options.batch):
            rows = self.problems[start : min(start + self.options.batch, limit)]
            for completion, row in zip(self._complete(rows), rows, strict=True):
                rewards.append(self.task.verifier(completion, row.answer).reward)
        return sum(rewards) / len(rewards)

    def _complete(self, rows: list[Example]) -> list[str]:
        encoded = self.tokenizer.apply_chat_template(
            [list(self.task.messages(row)) for row in rows],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        if not bool(encoded["attention_mask"].all()):
            raise ValueError("prompts differ in length, expected equal; rows must not be padded")
        with torch.inference_mode():
            ids = self.model.generate(
                **encoded, do_sample=False, max_new_tokens=self.task.max_new_tokens
            )
        new = ids[:, encoded["input_ids"].shape[1] :]
        return self.tokenizer.batch_decode(new, skip_special_tokens=True)

    def leave_one_out(self) -> list[list[float]]:
        """Accuracy with each head local alone, by layer and kv head."""
        layers, kv_heads = self.heads.local.shape
        left = [[0.0] * kv_heads for _ in range(layers)]
        for layer in range(layers):
            for head in range(kv_heads):
                local = torch.zeros(layers, kv_heads, dtype=torch.bool)
                local[layer, head] = True
                left[layer][head] = self.accuracy(local, self.options.leave_one_out)
                show(f"head {layer}.{head} local: {left[layer][head]:.3f}")
        return left

    def chosen(self, left: list[list[float]], share: float) -> torch.Tensor:
        """The ``share`` of heads that are missed least, as a (layers, kv_heads) mask.

        Ties go to the later layer, then to the later head.
        """
        flat = [value for row in left for value in row]
        order = sorted(range(len(flat)), key=lambda i: (flat[i], i), reverse=True)
        local = torch.zeros(len(flat), dtype=torch.bool)
        local[order[: round(share * len(flat))]] = True
        return local.view(len(left), -1)

    def random_half(self, seed: int) -> torch.Tensor:
        """A random half of the heads, as a (layers, kv_heads) mask."""
        local = torch.zeros(self.heads.local.numel(), dtype=torch.bool)
        local[random.Random(seed).sample(range(local.numel()), local.numel() // 2)] = True
        return local.view(self.heads.local.shape)


def show(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def measure(options: Options) -> dict[str, object]:
    """All figures that ``options`` ask for; accuracies are fractions in [0, 1]."""
    task = Measurement(options)
    none = torch.zeros_like(task.heads.local)
    chains = [str(problem.meta["chain"]) for problem in task.problems]
    tokens = [len(task.tokenizer(chain)["input_ids"]) for chain in chains]
    report: dict[str, object] = {"variables": options.variables, "seed": options.seed}
    report["median_chain_tokens"] = statistics.median(tokens)
    report["full"] = task.accuracy(none, options.full)
    show(f"full: {report['full']:.3f} on {options.full}")
    report["all_local"] = task.accuracy(~none, options.all_local)
    show(f"all local: {report['all_local']:.3f} on {options.all_local}")
    if options.leave_one_out:
        left = task.leave_one_out()
        report["leave_one_out"] = left
        for share in (0.25, 0.5, 0.625, 0.75):
            local = task.chosen(left, share)
            value = task.accuracy(local, options.all_local)
            report[f"least_missed_local_{share}"] = value
            show(f"{share:.3f} of heads local, least missed first: {value:.3f}")
    if options.halves:
        halves = [
            task.accuracy(task.random_half(seed), options.all_local)
            for seed in range(options.halves)
        ]
        report["random_half_local"] = halves
        show(f"random half local: {halves}")
    return report


def main(options: Options) -> None:
    """Measures the model in ``options.folder``."""
    torch.set_num_threads(options.threads)
    started = time.monotonic()
    report = measure(options)
    report["seconds"] = round(time.monotonic() - started, 1)
    sys.stdout.write(to_json(report))


if __name__ == "__main__":
    main(tyro.cli(Options))
