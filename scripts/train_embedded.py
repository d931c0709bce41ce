"""Trains the embedded reasoner from scratch on the chain task; CPU, about an hour.

The model has Qwen3's shape at toy size and a character tokenizer; everything it needs is made here.
A curriculum is essential: training starts at a few variables and adds one whenever the running loss
is low. From mixed lengths a model of this size stays on a plateau. Shorter problems stay in the mix
so that they are not forgotten, and training goes a little past the length that is tested. Only the
tokens of the chain carry loss, since a prompt is random and cannot be predicted.

Usage::

    python scripts/train_embedded.py --out runs/embedded --minutes 55

A run that was stopped continues when the same command is given again. ``evaluate_embedded.py``
measures the result. The seed fixes weights and problems. Where ``minutes`` ends the run before
``steps`` does, the learning rate follows the clock, and a second run of one seed is not the same
to the bit.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AttentionInterface,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlkv.core.files import append_jsonl, require_writable_folder, to_json, write_atomic
from rlkv.tasks.base import Example
from rlkv.tasks.chain import DEFAULT_VARIABLES, Chain

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>", "<user>", "<assistant>")
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<assistant>' if message['role'] == 'assistant' else '<user>' }}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class Options:
    """Settings of one training run."""

    out: Path
    """Folder for the model, the metrics and the checkpoint."""
    seed: int = 0
    """Seed of the weights and of the problems."""
    minutes: float = 55.0
    """Training time; the learning rate reaches 0 at its end or at ``steps``, the sooner."""
    steps: int = 6000
    """Most optimizer steps."""
    optimizer: Literal["adamw", "muon"] = "muon"
    """Muon updates the matrices inside the layers, AdamW all else; or AdamW everything."""
    learning_rate: float = 2e-3
    """Peak, the same for both optimizers (Muon's update is scaled to AdamW's size)."""
    tokens: int = 4096
    """Tokens in a step, prompts included."""
    first_variables: int = 4
    """Where the curriculum starts."""
    last_variables: int = DEFAULT_VARIABLES + 2
    """Where it ends, a little past the test length."""
    loss_to_advance: float = 0.03
    """Running loss in nats per token under which a variable is added."""
    review: float = 0.25
    """Share of steps spent on shorter problems, in [0, 1]."""
    decay: float = 0.3
    """Share of the run, at its end, in which the learning rate falls to 0."""
    threads: int = 1
    """CPU threads."""
    save_every_s: float = 120.0
    """Seconds between checkpoints."""


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention without padding, quick to train on a CPU.

    Keys are not repeated for the queries that share them, and scores stay in the autocast dtype:
    forward and backward take a third of the time of the built-in kernel at a few hundred tokens.

    Args:
        module: Unused; part of the signature.
        query: (batch, query_heads, tokens, head_dim).
        key: (batch, kv_heads, tokens, head_dim), and so is ``value``.
        value: See ``key``.
        attention_mask: Unused; rows have no padding.
        scaling: What scores are multiplied with.

    Returns:
        The output, (batch, tokens, query_heads, head_dim), and None for the attention weights.
    """
    batch, query_heads, tokens, head_dim = query.shape
    kv_heads = key.shape[1]
    group = query_heads // kv_heads
    rows = query.reshape(batch * kv_heads, group * tokens, head_dim)
    future = torch.full((tokens, tokens), -1e4, dtype=torch.bfloat16).triu(1).repeat(group, 1)
    keys = key.reshape(batch * kv_heads, tokens, head_dim).transpose(1, 2)
    weights = torch.baddbmm(future, rows.bfloat16(), keys.bfloat16(), alpha=scaling).softmax(-1)
    mixed = torch.bmm(weights, value.reshape(batch * kv_heads, tokens, head_dim).bfloat16())
    return mixed.view(batch, query_heads, tokens, head_dim).transpose(1, 2), None


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per printable ASCII character and a chat template."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 of 6 layers, 4 kv heads and 8 query heads with random weights, in float32."""
    AttentionInterface.register("grouped", grouped_attention)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        attn_implementation="grouped",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=Chain.max_new_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


class Problems:
    """Batches of training problems; all rows of one batch have equally many variables."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, tokens: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._tokens = tokens
        self._sources: dict[int, Iterator[Example]] = {}

    def batch(self, num_variables: int) -> tuple[torch.Tensor, int]:
        """Token ids (batch, tokens) and the number of prompt tokens, equal in all rows."""
        if num_variables not in self._sources:
            task = Chain(num_variables=num_variables)
            self._sources[num_variables] = task.examples(seed=self._seed, split="train")
        source = self._sources[num_variables]
        first, prompt_length = self._encode(next(source))
        rows = [first]
        while (len(rows) + 1) * len(first) <= self._tokens:
            rows.append(self._encode(next(source))[0])
        return torch.tensor(rows), prompt_length

    def _encode(self, example: Example) -> tuple[list[int], int]:
        head = f"<user>{example.prompt}<assistant>"
        prompt = self._tokenizer(head)["input_ids"]
        chain = self._tokenizer(f"{example.meta['chain']}<eos>")["input_ids"]
        return prompt + chain, len(prompt)


def chain_loss(model: Qwen3ForCausalLM, ids: torch.Tensor, prompt_length: int) -> torch.Tensor:
    """Mean cross-entropy in nats of the tokens after the prompt; ids (batch, tokens)."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[:, prompt_length - 1 :])
    targets = ids[:, prompt_length:]
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def build_optimizers(model: Qwen3ForCausalLM, options: Options) -> list[torch.optim.Optimizer]:
    """One optimizer, or Muon for the layers' matrices and AdamW for everything else."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices} if options.optimizer == "muon" else set()
    others = [p for p in model.parameters() if id(p) not in chosen]
    rate = options.learning_rate
    built: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    ]
    if chosen:
        muon = torch.optim.Muon(
            matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        )
        built.append(muon)
    return built


@dataclass
class Progress:
    """What changes during training and is kept in a checkpoint."""

    step: int = 0
    level: int = 0
    """Variables of the hardest problems so far."""
    running: float = 3.0
    """Running loss at that level, nats per token."""
    at_level: int = 0
    """Steps spent at that level."""
    elapsed_s: float = 0.0

    def record(self, loss: float, options: Options) -> None:
        """Takes a loss at the current level in and adds a variable if it has been learned."""
        self.running = 0.9 * self.running + 0.1 * loss
        self.at_level += 1
        learned = self.running < options.loss_to_advance and self.at_level >= 8
        if learned and self.level < options.last_variables:
            self.level, self.at_level = self.level + 1, 0
            self.running += options.loss_to_advance


class Run:
    """One training run: its model, optimizers, progress and files."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.folder = require_writable_folder(options.out)
        torch.manual_seed(options.seed)
        self.tokenizer = build_tokenizer()
        self.model = build_model(self.tokenizer)
        self.optimizers = build_optimizers(self.model, options)
        self.progress = Progress(level=options.first_variables)
        self.checkpoint = self.folder / "checkpoint.pt"
        if self.checkpoint.exists():
            self._restore()

    def train(self) -> None:
        """Trains until the steps or the minutes are used up, then saves the model."""
        options, progress = self.options, self.progress
        # a continued run must not see the same problems again
        problems = Problems(self.tokenizer, options.seed * 1000003 + progress.step, options.tokens)
        rng = random.Random(options.seed * 1000003 + progress.step)
        saved = time.monotonic()
        while (done := self._done()) < 1:
            started = time.monotonic()
            level = self._variables(rng)
            ids, prompt_length = problems.batch(level)
            loss = self._step(ids, prompt_length, done)
            progress.step += 1
            if level == progress.level:
                progress.record(loss, options)
            progress.elapsed_s += time.monotonic() - started
            if progress.step % 20 == 0:
                self._report(loss, level)
            if time.monotonic() - saved > options.save_every_s:
                self._save()
                saved = time.monotonic()
        self._save()

    def _variables(self, rng: random.Random) -> int:
        """How many variables the next batch has."""
        options, level = self.options, self.progress.level
        if rng.random() < options.review:
            return rng.randint(options.first_variables, level)
        if level == options.last_variables:
            return rng.randint(min(DEFAULT_VARIABLES, level), level)
        return level

    def _done(self) -> float:
        """The share of the run that is over."""
        by_steps = self.progress.step / self.options.steps
        return max(by_steps, self.progress.elapsed_s / (60 * self.options.minutes))

    def _step(self, ids: torch.Tensor, prompt_length: int, done: float) -> float:
        warm = min(1.0, (self.progress.step + 1) / 50)
        rate = self.options.learning_rate * warm * min(1.0, (1 - done) / self.options.decay)
        loss = chain_loss(self.model, ids, prompt_length)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    def _report(self, loss: float, level: int) -> None:
        row = {**asdict(self.progress), "batch_variables": level, "loss": loss}
        append_jsonl(self.folder / "metrics.jsonl", row)
        print(json.dumps(row), flush=True)

    def _save(self) -> None:
        self.model.save_pretrained(self.folder)
        self.tokenizer.save_pretrained(self.folder)
        write_atomic(self.folder / "training.json", to_json(self._summary()))
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": asdict(self.progress),
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def _restore(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self.progress = Progress(**state["progress"])

    def _summary(self) -> dict[str, object]:
        options = {key: str(v) if key == "out" else v for key, v in asdict(self.options).items()}
        return {"options": options, "progress": asdict(self.progress)}


def main(options: Options) -> None:
    """Trains the model that ``options`` describe."""
    torch.set_num_threads(options.threads)
    Run(options).train()


if __name__ == "__main__":
    main(tyro.cli(Options))
