"""The GPU backend's kernels in Triton's interpreter, on a CPU, against dense attention."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from tests.vllm.conftest import in_child

pytestmark = pytest.mark.vllm
KERNELS = "vllm.v1.attention.ops.triton_reshape_and_cache_flash"


@pytest.fixture(autouse=True)
def real_triton() -> None:
    # found, not imported: TRITON_INTERPRET must be set first, in the child
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    if KERNELS in sys.modules:
        pytest.skip("earlier tests imported vLLM's kernels without Triton; run this file alone")


def use_interpreter() -> None:
    """Makes vLLM's Triton kernels run in Python; only in a child of its own."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch
    import triton
    import triton.language as tl
    import vllm.triton_utils as utils

    # vLLM without a GPU replaces Triton by a stand-in before any kernel is defined
    utils.triton, utils.tl, utils.HAS_TRITON = triton, tl, True
    # the launchers ask the device only to pick tile sizes and pipeline depths
    torch.cuda.get_device_capability = lambda *_: (9, 0)


@pytest.mark.parametrize(("sink", "recent", "block"), [(16, 64, 16), (16, 32, 48), (0, 48, 32)])
def test_window_backend_equals_dense_attention(sink, recent, block):
    def task():
        use_interpreter()
        import torch

        from rlkv.serve.geometry import UNIT
        from rlkv.serve.vllm.triton_backend import TritonWindowImpl
        from rlkv.serve.vllm.window_base import WindowMetadata, page_shape
        from rlkv.serve.vllm.windows import cut_step, spread_tiles, unit_slots

        torch.manual_seed(0)
        heads, group, dim = 2, 2, 32
        lengths = [(150, 1), (200, 70), (20, 20), (97, 1)]  # all tokens, new ones
        width = -(-200 // block)
        page = heads * block * 2 * dim
        # other layers' pages lie before and after this one in every block of the pool
        unit = UNIT * 2 * dim
        stride = page + 3 * unit
        pool = torch.zeros(len(lengths) * width * stride + unit)
        cache = pool.as_strided(
            (len(lengths) * width, heads, block, 2 * dim),
            (stride, block * 2 * dim, 2 * dim, 1),
            unit,
        )
        table = torch.randperm(len(lengths) * width).view(len(lengths), width)
        impl = TritonWindowImpl(heads * group, dim, dim**-0.5, heads, sink=sink, recent=recent)
        layer = SimpleNamespace(_k_scale=torch.ones(1), _v_scale=torch.ones(1))
        keys = [torch.randn(total, heads, dim) for total, _ in lengths]
        values = [torch.randn(total, heads, dim) for total, _ in lengths]
        queries = [torch.randn(total, heads * group, dim) for total, _ in lengths]

        def step(begin, end):
            """Runs tokens begin..end of each request."""
            counts = [b - a for a, b in zip(begin, end, strict=True)]
            slots = [
                table[r, p // block] * block + p % block
                for r in range(len(lengths))
                for p in range(begin[r], end[r])
            ]
            shape = page_shape(cache)
            cut = cut_step(
                torch.tensor(counts), torch.tensor(end, dtype=torch.int32), table.int(), shape,
                sink=sink, recent=recent,
            )  # fmt: skip
            metadata = WindowMetadata(
                spread_tiles(cut, shape), unit_slots(torch.stack(slots), shape), sum(counts), None
            )

            def joined(parts):
                pieces = [p[a:b] for p, a, b in zip(parts, begin, end, strict=True)]
                return torch.cat(pieces)

            output = torch.zeros(sum(counts), heads * group, dim)
            impl.forward(
                layer, joined(queries), joined(keys), joined(values), cache, metadata, output
            )
            return output

        step([0] * 4, [max(1, total - new) for total, new in lengths])
        output = step([total - new for total, new in lengths], [total for total, _ in lengths])
        expected = []
        for r, (total, new) in enumerate(lengths):
            q, k = torch.arange(total - new, total)[:, None], torch.arange(total)[None]
            visible = (k <= q) & ((k < sink) | (q - k < recent))
            key = keys[r].repeat_interleave(group, 1)
            value = values[r].repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", queries[r][total - new :], key) * dim**-0.5
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            expected.append(torch.einsum("hqk,khd->qhd", weights, value))
        return float((output - torch.cat(expected)).abs().max())

    assert in_child(task) < 1e-5


def test_full_backend_keeps_the_selected_one_and_fixes_its_layout():
    def task():
        use_interpreter()
        from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
        from vllm.v1.kv_cache_interface import KVCacheLayout

        from rlkv.errors import UnsupportedFeatureError
        from rlkv.serve.vllm.triton_backend import full_backend

        backend = full_backend(TritonAttentionBackend)
        other = SimpleNamespace(get_name=lambda: "FLASHINFER")
        with pytest.raises(UnsupportedFeatureError, match="FLASHINFER"):
            full_backend(other)
        return (
            backend.get_name(),
            backend.supported_kv_cache_layouts() == (KVCacheLayout.BLHNC,),
        )

    assert in_child(task) == ("TRITON_ATTN", True)
