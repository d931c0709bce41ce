"""Cache spec and block manager of the compressed heads, registered with vLLM.

The manager keeps the blocks of the sink and of the recent window and gives every block between them
back to vLLM's one pool, where it serves other requests. A freed block keeps its hash until it is
reused, so a later request with the same prefix finds it: a hit needs the sink blocks and the blocks
of the last ``recent - 1`` tokens before the hit's end, not the ones between.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from rlkv.errors import ConfigError
from rlkv.serve.vllm.metrics import KVUsage, UsageWriter


@dataclass(frozen=True, kw_only=True)
class SinkWindowSpec(AttentionSpec):
    """KV cache of the compressed heads of one layer.

    Not a subclass of vLLM's sliding-window spec on purpose: layers of that spec with differing head
    counts are cut into several groups and some are dropped.
    """

    sink: int
    """First tokens kept."""
    recent: int
    """Last tokens kept, the current one included."""
    in_flight: int
    """Most tokens that one scheduler step may compute."""
    full_block: int
    """Tokens in a block of the full heads; 0 when the model has none."""
    context: int
    """Longest request, in tokens."""
    pool_block_bytes: int
    """Bytes of one block of the pool, all ranks together."""

    def blocks_in(self, tokens: int, in_flight: int) -> int:
        """Most blocks of a request of ``tokens`` tokens while ``in_flight`` are computed."""
        steady = math.ceil(self.sink / self.block_size)
        steady += math.ceil((self.recent - 1 + in_flight) / self.block_size) + 1
        return min(math.ceil(tokens / self.block_size), steady)

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes of one request while it decodes; what vLLM derives its concurrency from.

        A prefill chunk holds more for one step. That is one budget for the whole batch, not one a
        request, so it is checked once, by the manager.
        """
        length = vllm_config.model_config.max_model_len
        return self.blocks_in(length, 0) * self.page_size_bytes

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Whether all of ``kv_cache_specs`` keep the same window."""
        return all(
            isinstance(spec, SinkWindowSpec)
            and (spec.sink, spec.recent) == (self.sink, self.recent)
            for spec in kv_cache_specs.values()
        )


class SinkWindowManager(SingleTypeKVCacheManager):
    """Block manager of the compressed heads: frees what lies between sink and recent window."""

    def __init__(
        self,
        kv_cache_spec: SinkWindowSpec,
        block_pool: BlockPool,
        **options: Any,  # noqa: ANN401 - handed on to vLLM's base class
    ) -> None:
        options["max_admission_blocks_per_request"] = kv_cache_spec.blocks_in(
            kv_cache_spec.context, kv_cache_spec.in_flight
        )
        super().__init__(kv_cache_spec, block_pool, **options)
        self.sink = kv_cache_spec.sink
        self.recent = kv_cache_spec.recent
        self._block_bytes = kv_cache_spec.pool_block_bytes
        self._usage = UsageWriter()
        # blocks that requests hold in this group, with the number of holders of each
        self._held: Counter[int] = Counter()
        _require_room(kv_cache_spec, block_pool.num_gpu_blocks - 1)

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Frees the blocks that no later query sees.

        The next query stands at position ``processed_computed_tokens`` and sees the tokens from
        ``processed_computed_tokens - recent + 1`` on, and the sink.
        """
        first = math.ceil(self.sink / self.block_size)
        last = max(0, processed_computed_tokens - self.recent + 1) // self.block_size
        self._remove_blocks_in_range(request_id, first, last)

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Adds the blocks of a prefix-cache hit to a request."""
        super().add_local_computed_blocks(
            request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens
        )
        self._hold(new_computed_blocks)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Takes blocks from the pool so that a request has room for ``num_tokens``."""
        blocks = super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
        self._hold(blocks)
        return blocks

    def _remove_blocks_in_range(self, request_id: str, first_block: int, last_block: int) -> None:
        blocks = self.req_to_blocks.get(request_id, [])
        freed: list[KVCacheBlock] = []
        # backwards to the first null block, as the base class walks: cost does not grow with length
        for index in range(min(last_block, len(blocks)) - 1, first_block - 1, -1):
            if blocks[index].is_null:
                break
            freed.append(blocks[index])
        super()._remove_blocks_in_range(request_id, first_block, last_block)
        self._release(freed)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Takes a finished request off the books."""
        blocks = super().pop_blocks_for_free(request_id)
        self._release(blocks)
        return blocks

    def free(self, request_id: str) -> None:
        """Frees a finished request; its full heads were freed just before."""
        super().free(request_id)
        self._publish()

    def new_step_starts(self) -> None:
        """Called once a scheduler step."""
        self._publish()

    def _hold(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._held.update(block.block_id for block in blocks if not block.is_null)

    def _release(self, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            if not block.is_null:
                self._held[block.block_id] -= 1
                if not self._held[block.block_id]:
                    del self._held[block.block_id]

    def _publish(self) -> None:
        pool = self.block_pool
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        compressed = len(self._held)
        self._usage.write(
            KVUsage(
                (used - compressed) * self._block_bytes,
                compressed * self._block_bytes,
                len(self.req_to_blocks),
            )
        )

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """The longest cached prefix whose sink blocks and last window blocks are all there.

        Blocks between the two come back as null blocks.
        """
        if not isinstance(kv_cache_spec, SinkWindowSpec) or drop_eagle_block:
            raise ConfigError("compressed heads cannot be combined with speculative decoding")
        size = kv_cache_spec.block_size
        hashes = resolve_block_hashes(
            block_hashes,
            block_pool.hash_block_size,
            size,
            supports_fine_grained_hash_lookup=cls.supports_fine_grained_hash_lookup,
            alignment_tokens=alignment_tokens,
        )
        sink_blocks = math.ceil(kv_cache_spec.sink / size)
        found: dict[int, Sequence[KVCacheBlock] | None] = {}

        def cached(index: int) -> Sequence[KVCacheBlock] | None:
            if index not in found:
                found[index] = block_pool.get_cached_block(hashes[index], kv_cache_group_ids)
            return found[index]

        for blocks in range(max_length // size, 0, -1):
            if blocks * size % alignment_tokens:
                continue
            tail = max(0, blocks * size - kv_cache_spec.recent + 1) // size
            # the tail first: a miss there rules the length out most often
            needed = [*range(blocks - 1, tail - 1, -1), *range(min(sink_blocks, tail))]
            if all(cached(index) for index in needed):
                rows = _hit(block_pool, kv_cache_group_ids, blocks, found, set(needed))
                return rows, blocks * size
        return tuple([] for _ in kv_cache_group_ids), 0


def _hit(
    block_pool: BlockPool,
    group_ids: list[int],
    blocks: int,
    found: dict[int, Sequence[KVCacheBlock] | None],
    needed: set[int],
) -> tuple[list[KVCacheBlock], ...]:
    """Per group, the blocks of a hit of ``blocks`` blocks, null where none is needed."""
    per_group: list[list[KVCacheBlock]] = []
    for position in range(len(group_ids)):
        row = [block_pool.null_block] * blocks
        for index in needed:
            cached = found[index]
            if cached:
                row[index] = cached[position]
        per_group.append(row)
    return tuple(per_group)


def _require_room(spec: SinkWindowSpec, usable: int) -> None:
    """Checks that the longest request can be prefilled when it is alone.

    Raises:
        ConfigError: The pool is too small; without this check the request would wait forever.
    """
    full = math.ceil(spec.context / spec.full_block) if spec.full_block else 0
    needed = full + spec.blocks_in(spec.context, spec.in_flight)
    if needed > usable:
        raise ConfigError(
            f"the KV pool has {usable} blocks, but one request of {spec.context} tokens needs "
            f"{needed} while {spec.in_flight} of them are prefilled at once; lower "
            "--max-num-batched-tokens or --max-model-len, or give the KV cache more memory"
        )


def register_spec() -> None:
    """Makes the spec and its manager known to vLLM; may be called again."""
    # vLLM registers its own specs on first use, but only while nothing else is registered
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(
        SinkWindowSpec, SinkWindowManager, uniform_type_base_spec=SinkWindowSpec
    )
