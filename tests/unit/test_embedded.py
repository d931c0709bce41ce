"""The shipped reasoner: small, complete, offline, and it solves its task."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlkv
from rlkv.tasks.chain import Chain

FOLDER = Path(rlkv.__file__).parent / "embedded"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def test_folder_is_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sum(files.values()) <= 8 * 2**20
    assert {"config.json", "generation_config.json", "model.safetensors"} <= files.keys()
    assert {"tokenizer.json", "tokenizer_config.json", "README.md"} <= files.keys()


def test_tokenizer_round_trips_one_token_per_character(tokenizer) -> None:
    example = next(Chain().examples(1))
    for text in (example.prompt, str(example.meta["chain"]), "Any ASCII text:\n {} ~", "  two  "):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text


def test_tokenizer_pads_left_and_knows_its_special_tokens(tokenizer) -> None:
    assert tokenizer.padding_side == "left"
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<pad>", "<eos>")
    batch = tokenizer(["a", "ab"], padding=True)
    assert batch["attention_mask"] == [[0, 1], [1, 1]]


def test_chat_template_marks_who_speaks(tokenizer) -> None:
    messages = [{"role": "user", "content": "a=1 ?a"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == "<user>a=1 ?a<assistant>"
    messages.append({"role": "assistant", "content": "a=1>a1 #1"})
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert whole == "<user>a=1 ?a<assistant>a=1>a1 #1<eos>"


def test_shape_leaves_heads_to_choose_from(model) -> None:
    config = model.config
    assert config.model_type == "qwen3"
    assert config.num_hidden_layers >= 6
    assert config.num_key_value_heads >= 4
    assert config.num_attention_heads == 2 * config.num_key_value_heads


def test_greedy_generation_solves_unseen_problems_and_stops(tokenizer, model) -> None:
    task = Chain()
    # a seed of its own: these are none of the problems that the model card's accuracy is about
    examples = list(task.examples(8, seed=20))
    inputs = tokenizer.apply_chat_template(
        [task.messages(example) for example in examples],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=task.max_new_tokens)
    new = ids[:, inputs["input_ids"].shape[1] :]
    completions = tokenizer.batch_decode(new, skip_special_tokens=True)
    rewards = [
        task.verifier(c, e.answer).reward for c, e in zip(completions, examples, strict=True)
    ]
    # 97 % of single problems are solved, so at least 7 of 8 in all but one run in 50
    assert sum(rewards) >= 7
    assert new.shape[1] < task.max_new_tokens
