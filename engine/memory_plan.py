"""How much memory goes where: weights, KV blocks in what is left, and blocks of the host tier. No torch."""

from dataclasses import dataclass

from engine.config import EngineConfig, ModelConfig
from engine.errors import EngineError, ModelNotSupported, NotEnoughMemory

CPU_KV_SHARE = 0.25
MAX_CPU_KV_BYTES = 4 * 2**30
GPU_KV_SHARE = 0.9
"""Of what is free once the weights are loaded; the rest is for the activations of a step."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    weights_bytes: int
    bytes_per_block: int
    num_blocks: int
    """Usable ones; the null block comes on top."""
    block_size: int
    max_model_len: int
    num_host_blocks: int = 0
    kv_dtype: str = "auto"
    num_ranks: int = 1
    """Bytes are those of one of them, the first, which has the most weights."""

    @property
    def kv_bytes(self) -> int:
        return (self.num_blocks + 1) * self.bytes_per_block

    @property
    def host_bytes(self) -> int:
        return self.num_host_blocks * self.bytes_per_block

    @property
    def max_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def __str__(self) -> str:
        host = ""
        if self.num_host_blocks:
            host = f", host tier {self.host_bytes / 2**20:,.0f} MiB: {self.num_host_blocks:,} blocks"
        ranks = f"each of {self.num_ranks} ranks: " if self.num_ranks > 1 else ""
        kv_dtype = "" if self.kv_dtype == "auto" else f" in {self.kv_dtype}"
        return (
            f"{ranks}weights {self.weights_bytes / 2**20:,.0f} MiB, "
            f"KV cache {self.kv_bytes / 2**20:,.0f} MiB{kv_dtype}: "
            f"{self.num_blocks:,} blocks of {self.block_size} tokens, {self.max_tokens:,} tokens fit, "
            f"context {self.max_model_len:,}{host}"
        )


def check_weights_fit(weights_bytes: int, available_bytes: int) -> None:
    """Raises NotEnoughMemory, before anything is loaded."""
    if weights_bytes > available_bytes:
        what = "loading the model's weights"
        raise NotEnoughMemory(what, needed_bytes=weights_bytes, available_bytes=available_bytes)


def plan_memory(
    model: ModelConfig,
    config: EngineConfig,
    *,
    kv_head_bytes: int,
    weights_bytes: int,
    available_bytes: int,
    available_host_bytes: int,
    on_gpu: bool,
) -> MemoryPlan:
    """`kv_head_bytes`: of one token's K, or V, of one head. `available_bytes`: what the weights leave;
    `available_host_bytes`: of the host's own memory, which on a CPU is the same and not counted twice. With several
    ranks all is of one rank, of the host tier its part.

    A number of blocks that was asked for has to fit; otherwise the pool is 25% of what is available on a CPU, at most
    4 GiB, and 90% on a GPU. The context is the model's own unless a shorter one was asked for, and never longer than
    the pool.
    Raises NotEnoughMemory, ModelNotSupported for a context longer than the model's, and EngineError.
    """
    model_len = config.max_model_len or model.max_position_embeddings
    if model_len > model.max_position_embeddings:
        raise ModelNotSupported(
            f"a context of {model_len} tokens was asked for, but the model has {model.max_position_embeddings}"
        )
    bytes_per_block = model.kv_bytes_per_token(kv_head_bytes) * config.block_size
    host_cache_bytes = config.host_cache_bytes // config.tensor_parallel
    num_host_blocks = _plan_host_blocks(host_cache_bytes, bytes_per_block, available_host_bytes)
    if not on_gpu:
        available_bytes -= num_host_blocks * bytes_per_block
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
        needed = (num_blocks + 1) * bytes_per_block
        if needed > available_bytes:
            raise NotEnoughMemory(
                f"a KV cache of {num_blocks} blocks", needed_bytes=needed, available_bytes=available_bytes
            )
    else:
        share = available_bytes * GPU_KV_SHARE if on_gpu else min(available_bytes * CPU_KV_SHARE, MAX_CPU_KV_BYTES)
        num_blocks = int(share) // bytes_per_block - 1
        least = -(-(config.max_model_len or config.block_size) // config.block_size)
        if num_blocks < least:
            raise NotEnoughMemory(
                f"a KV cache for {config.max_model_len or config.block_size} tokens",
                needed_bytes=(least + 1) * bytes_per_block,
                available_bytes=int(share),
            )
    if num_blocks < 1:
        raise NotEnoughMemory(
            "a KV cache of one block", needed_bytes=2 * bytes_per_block, available_bytes=available_bytes
        )
    return MemoryPlan(
        weights_bytes=weights_bytes,
        bytes_per_block=bytes_per_block,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=min(model_len, num_blocks * config.block_size),
        num_host_blocks=num_host_blocks,
        kv_dtype=config.kv_dtype,
        num_ranks=config.tensor_parallel,
    )


def _plan_host_blocks(host_cache_bytes: int, bytes_per_block: int, available_bytes: int) -> int:
    if host_cache_bytes < 0:
        raise EngineError(f"host_cache_bytes must be at least 0, got {host_cache_bytes}")
    if host_cache_bytes == 0:
        return 0
    if host_cache_bytes < bytes_per_block:
        raise NotEnoughMemory(
            "a host tier of one block", needed_bytes=bytes_per_block, available_bytes=host_cache_bytes
        )
    if host_cache_bytes > available_bytes:
        raise NotEnoughMemory("the host tier", needed_bytes=host_cache_bytes, available_bytes=available_bytes)
    return host_cache_bytes // bytes_per_block
