"""Settings of one engine and the facts of one model. Frozen, built once, handed in by part. No torch."""

from typing import Any, Literal

import msgspec

DTYPES = ("bfloat16", "float16", "float32")


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a decoder of the Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool = False
    """Bias of q, k and v (Qwen2)."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of q and k before RoPE (Qwen3)."""

    def kv_bytes_per_token(self, head_bytes: int) -> int:
        """Of all layers, K and V; head_bytes: of one token's K, or V, of one head."""
        return 2 * self.num_layers * self.num_kv_heads * head_bytes

    def replace(self, **changes: Any) -> "ModelConfig":
        return msgspec.structs.replace(self, **changes)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an engine process is started with (sent to it as JSON)."""

    model_dir: str
    """A prepared model (engine.prepared)."""
    address: str = ""
    """ZeroMQ endpoint the ROUTER binds; empty in process."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """Of keys and values in the cache; auto: the model's."""
    max_model_len: int | None = None
    """None: the model's own, lowered to what the pool holds."""
    block_size: Literal[8, 16, 32, 64] = 16
    num_blocks: int | None = None
    """None: from the memory that is free."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 576
    """512 tokens of prompts beside a full batch of decode rows."""
    max_waiting: int = 4096
    """Requests of one tenant that may wait; further ones are refused as `overloaded`."""
    tensor_parallel: int = 1
    """Ranks that the model is split over, a process each, and a GPU each where there are GPUs."""
    runtime_dir: str | None = None
    """Where the ranks meet; None: in the system's folder for such files."""
    threads: int | None = None
    """Of each rank; None: this machine's processors, dealt out."""
    kernels: Literal["auto", "cpu", "reference", "triton"] = "auto"
    """auto: the fastest backend of the device; reference: plain torch, the oracle of the others; triton: on a GPU."""
    kernels_dir: str | None = None
    """Where what is compiled for this machine is kept; None: in the default state folder."""
    max_isa: Literal["amx_bf16", "avx512_bf16", "avx512", "avx2", "none"] | None = None
    """The best instructions that compiled CPU kernels may use; none: nothing is compiled, torch's operators serve."""
    shared_attention: Literal["auto", "always", "never"] = "auto"
    """Blocks that decode rows share are read once for all of them: where it pays, wherever it can be, or never."""
    enforce_eager: bool = False
    """On a GPU: no graphs are captured, and each step's launches are made one by one."""
    deterministic: bool = False
    """A row's logits have the same bits in every batch, however its K and V came about. C++ decoder only."""
    enable_prefix_caching: bool = True
    pin_budget: float = 0.2
    """Share of the blocks that pinned trunks may keep."""
    host_cache_bytes: int = 0
    """Host memory for blocks that are evicted; 0: they are forgotten."""
    check_kv: bool = False
    lease_s: float = 10.0

    @property
    def kv_quantisation(self) -> Literal["int8", "fp8"] | None:
        """None: K and V are kept in the model's dtype."""
        return None if self.kv_dtype == "auto" else self.kv_dtype

    def replace(self, **changes: Any) -> "EngineConfig":
        return msgspec.structs.replace(self, **changes)
