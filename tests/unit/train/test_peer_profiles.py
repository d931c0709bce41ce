"""Peer profiles from a task's texts, on the embedded model."""

from __future__ import annotations

import numpy as np
import pytest

from rlkv.errors import ConfigError
from rlkv.hf.loading import load_model
from rlkv.registry import TASKS
from rlkv.train.peer_profiles import PeerProfileConfig, make_peer_profile


@pytest.fixture(scope="module")
def loaded():
    return load_model("embedded")


def test_duo_profile_is_repeatable_and_moves_gates(loaded):
    task = TASKS.load("chain")()
    config = PeerProfileConfig("duo_attention", length=160, steps=4, passkeys=1, words_per_key=2)
    first, second = (make_peer_profile(loaded, task, config) for _ in range(2))
    assert np.array_equal(first.scores, second.scores)
    assert first.scores.max() <= 1.0
    assert first.scores.min() < 1.0
    assert (first.source, first.meta["task"]) == ("duo_attention", "chain")


def test_kvzip_profile_scores_are_attention_shares(loaded):
    task = TASKS.load("chain")()
    profile = make_peer_profile(loaded, task, PeerProfileConfig("kvzip", length=120, contexts=1))
    assert profile.scores.shape == loaded.spec.shape
    assert (profile.scores > 0).all()
    assert len(np.unique(profile.scores)) > 20


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        PeerProfileConfig("kvzip", length=0)
