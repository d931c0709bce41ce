"""ModelSpec, Budget, HeadProfile and the importers, against hand-computed values."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rlkv.core.budget import Budget
from rlkv.core.engine import SamplingParams
from rlkv.core.head_profile import HeadProfile
from rlkv.core.import_scores import import_scores
from rlkv.core.model_spec import ModelSpec
from rlkv.errors import ConfigError, ProfileError, ProfileMismatchError

SPEC = ModelSpec("org/Tiny", "", num_layers=2, num_kv_heads=3, num_query_heads=6, head_dim=8)
SCORES = [[0.5, 0.1, 0.9], [0.5, 1.0, 0.0]]


def profile(scores=SCORES, spec=SPEC) -> HeadProfile:
    return HeadProfile(spec, np.array(scores, dtype=np.float32), "test", meta={"seed": 1})


def test_budget_reproduces_the_papers_fractions_at_3000_tokens():
    found = [round(Budget(s).kv_fraction(3000), 3) for s in (0.2, 0.4, 0.5, 0.6, 0.8)]
    assert found == [0.805, 0.611, 0.513, 0.416, 0.221]


def test_budget_bytes_count_full_and_compressed_heads():
    # 6 heads at s=.5: 3 full x 100 tokens + 3 compressed x 20 tokens, 32 bytes a token and head
    assert Budget(0.5, sink=4, recent=16).kv_bytes(SPEC, 100) == (3 * 100 + 3 * 20) * 32


def test_uniform_tokens_never_exceed_the_split_in_bytes():
    for s in (0.0, 0.25, 0.5, 0.75, 0.9):
        for n in (1, 50, 500, 4000):
            budget = Budget(s)
            assert budget.tokens_per_head(n) <= budget.kv_fraction(n) * n + 1e-6


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf")])
def test_temperature_must_be_finite(temperature):
    with pytest.raises(ConfigError, match="finite temperature"):
        SamplingParams(8, temperature)


@pytest.mark.parametrize("sparsity", [-0.1, 1.0, 1.5])
def test_sparsity_outside_its_range_is_refused(sparsity):
    with pytest.raises(ConfigError, match=r"outside \[0, 1\)"):
        Budget(sparsity)


@pytest.mark.parametrize(("sink", "recent"), [(0, 0), (-1, 5), (4, -1), (4, 0), (10**30, 64)])
def test_window_without_tokens_or_of_too_many_is_refused(sink, recent):
    with pytest.raises(ConfigError):
        Budget(0.5, sink=sink, recent=recent)


def test_ranking_breaks_ties_by_layer_then_head():
    assert profile().ranking() == [(1, 1), (0, 2), (0, 0), (1, 0), (0, 1), (1, 2)]


@pytest.mark.parametrize(("sparsity", "count"), [(0, 6), (0.25, 5), (0.5, 3), (0.75, 2), (0.9, 1)])
def test_exact_rule_keeps_the_rounded_number_of_heads(sparsity, count):
    assert profile().full_heads(sparsity).sum() == count


def test_exact_rule_keeps_the_best_heads():
    expected = [[True, False, True], [False, True, False]]
    assert profile().full_heads(0.5).tolist() == expected


def test_quantile_rule_keeps_all_ties():
    # the median of 0 .1 .5 .5 .9 1 is .5: both heads at .5 stay
    assert profile().full_heads(0.5, "quantile").sum() == 4


def test_profile_survives_a_round_trip_bit_for_bit(tmp_path):
    scores = np.random.default_rng(0).random((2, 3), dtype=np.float32)
    profile(scores).save(tmp_path / "p.json")
    loaded = HeadProfile.load(tmp_path / "p.json")
    assert np.array_equal(loaded.scores, scores)
    assert (loaded.spec, loaded.source, dict(loaded.meta)) == (SPEC, "test", {"seed": 1})


def damage(text: str, how: str) -> str:
    body = json.loads(text)
    if how == "truncated":
        return text[: len(text) // 2]
    if how == "nan":
        return text.replace("0.5", "NaN", 1)
    if how == "newer":
        return text.replace("rlkv-profile/1", "rlkv-profile/2")
    if how == "altered":
        return text.replace("0.1", "0.2")
    if how == "ragged":
        body["scores"][0].append(0.5)
    if how == "shape":
        body["scores"].append([0.1, 0.2, 0.3])
    if how == "no model":
        del body["model"]
    if how == "list":
        return "[1, 2]"
    if how == "nested":
        return "[" * 100_000
    if how == "infinite sink":
        body["sink"] = float("inf")
    if how == "surrogate":
        body["source"] = "\ud800"
    if how == "superscript":
        body["format"] = "rlkv-profile/²"
    if how == "foreign":
        body["format"] = "adapter/1"
    return json.dumps(body)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("truncated", "not JSON"),
        ("nan", "NaN"),
        ("newer", "upgrade"),
        ("altered", "checksum"),
        ("ragged", "table of numbers"),
        ("shape", "3x3.*2x3"),
        ("no model", "model"),
        ("list", "not a JSON object"),
        ("foreign", "expected rlkv-profile/1"),
        ("nested", "not JSON"),
        ("infinite sink", "garbles"),
        ("surrogate", "checksum"),
        ("superscript", "expected rlkv-profile/1"),
    ],
)
def test_damaged_profile_is_refused_in_one_sentence(tmp_path, how, says):
    path = tmp_path / "p.json"
    profile().save(path)
    path.write_text(damage(path.read_text(), how))
    with pytest.raises(ProfileError, match=says) as caught:
        HeadProfile.load(path)
    assert "\n" not in str(caught.value)


def test_missing_profile_is_refused(tmp_path):
    with pytest.raises(ProfileError, match="cannot read"):
        HeadProfile.load(tmp_path / "absent.json")


def test_profile_of_another_shape_or_model_is_refused():
    other_shape = ModelSpec("org/Tiny", "", 2, 4, 8, 8)
    with pytest.raises(ProfileMismatchError, match="2x3.*2x4"):
        profile().require_match(other_shape)
    same_shape = ModelSpec("org/Other", "", 2, 3, 6, 8)
    with pytest.raises(ProfileMismatchError, match="--any-model"):
        profile().require_match(same_shape)
    profile().require_match(same_shape, any_model=True)
    profile().require_match(ModelSpec("/local/folder/tiny", "", 2, 3, 6, 8))


def test_import_clips_and_records_its_source(tmp_path):
    table = tmp_path / "adapter_weights.tsv"
    table.write_text("-0.01\t0.5\t1.008\n0.1\t0.2\t0.3\n")
    imported = import_scores(table, SPEC)
    assert imported.scores[0].tolist() == [0.0, 0.5, 1.0]
    assert imported.meta["clipped"] == 2
    assert (imported.sink, imported.recent) == (128, 256)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1\t2\n3\t4\n", "2x2"),
        ("a\tb\tc\n", "not a table"),
        ("", "no table"),
        ("5\t0\t0\n0\t0\t0\n", "expected gate values"),
        ("nan\t0\t0\n0\t0\t0\n", "NaN"),
    ],
)
def test_import_refuses_what_is_no_score_table(tmp_path, text, says):
    table = tmp_path / "t.tsv"
    table.write_text(text)
    with pytest.raises(ProfileError, match=says):
        import_scores(table, SPEC)


@pytest.mark.parametrize(
    ("file", "shape", "zero_layers"),
    [
        ("rlkv-llama-3.1-8b-r1.adapter_weights.tsv", (32, 8), [0, 0, 0, 1, 7]),
        ("rlkv-qwen-2.5-7b-r1.adapter_weights.tsv", (28, 4), [None, 2, 4, 6, 13]),
    ],
)
def test_published_scores_leave_the_published_layers_without_full_heads(
    shared_data, file, shape, zero_layers
):
    spec = ModelSpec("m", "", shape[0], shape[1], shape[1], 128)
    imported = import_scores(shared_data / "head_scores" / file, spec)
    for s, expected in zip((0.2, 0.4, 0.5, 0.6, 0.8), zero_layers, strict=True):
        full = imported.full_heads(s, "quantile")
        if expected is not None:
            assert int((full.sum(axis=1) == 0).sum()) == expected, s
        assert abs(int(full.sum()) - (1 - s) * spec.num_heads) <= 3
