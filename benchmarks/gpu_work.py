"""What attention and a decode step on a GPU cannot do without, in bytes and operations; and the shapes that are
measured.

Time is that of memory or that of products, whichever is longer, of each phase, and phases follow one another: linear
layers read the weights, a trunk is read once for all rows, tails once a row, parts are written and merged.
"""

from dataclasses import dataclass, field

from benchmarks.step_work import head_parameters, layer_parameters

DTYPE_BYTES = 2
MERGED_PARTS = 5
"""Of a row: as few as would do, whatever the kernels make."""


@dataclass(frozen=True, slots=True)
class Rope:
    """As `engine.config.RopeConfig`, which needs msgspec."""

    theta: float = 500000.0
    kind: str = "default"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """As `engine.config.ModelConfig`, which needs msgspec."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope: Rope = field(default=Rope())
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes

    @property
    def kv_bytes(self) -> int:
        """Of a token, all layers."""
        return self.kv_bytes_per_token(DTYPE_BYTES)

    @property
    def read_parameters(self) -> int:
        """Of one step: all but the embedding."""
        return layer_parameters(self) + head_parameters(self)


LLAMA_3_8B = ModelShape("Llama-3-8B", 128256, 4096, 14336, 32, 32, 8, 128)
QWEN_2_5_7B = ModelShape("Qwen2.5-7B", 152064, 3584, 18944, 28, 28, 4, 128, attention_bias=True)
TINY_LLAMA = ModelShape("tiny, groups of 2", 48, 32, 48, 1, 2, 1, 16)
TINY_QWEN = ModelShape("tiny, groups of 3", 48, 48, 48, 1, 3, 1, 16, attention_bias=True)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: on a device, or of a dry run."""

    llama: ModelShape
    qwen: ModelShape
    trunks: tuple[int, int]
    attention_rows: tuple[int, ...]
    decode_rows: tuple[int, ...]
    own_tokens: int
    decode_steps: int
    prompt_rounds: int
    prompt_tokens: int
    hot_tokens: int
    """Of the prompt, behind what is cached."""
    chunk_tokens: int
    copy_bytes: int
    product_size: int
    moved_blocks: int
    private_bytes: int
    """That a cache with a copy of everything for each row may take: what does not fit is measured in fewer layers."""


ON_A_DEVICE = Sizes(
    llama=LLAMA_3_8B,
    qwen=QWEN_2_5_7B,
    trunks=(2048, 8192),
    attention_rows=(32, 128, 512),
    decode_rows=(32, 128, 256),
    own_tokens=256,
    decode_steps=16,
    prompt_rounds=5,
    prompt_tokens=2048,
    hot_tokens=32,
    chunk_tokens=512,
    copy_bytes=4 << 30,
    product_size=8192,
    moved_blocks=2048,
    private_bytes=24 << 30,
)
DRY = Sizes(
    llama=TINY_LLAMA,
    qwen=TINY_QWEN,
    trunks=(16, 32),
    attention_rows=(1, 2, 3),
    decode_rows=(2,),
    own_tokens=4,
    decode_steps=2,
    prompt_rounds=1,
    prompt_tokens=24,
    hot_tokens=8,
    chunk_tokens=16,
    copy_bytes=1 << 20,
    product_size=64,
    moved_blocks=2,
    private_bytes=1 << 20,
)


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """One token for each of `num_rows` sequences over one trunk."""

    model: ModelShape
    trunk_tokens: int
    num_rows: int
    own_tokens: int

    @property
    def name(self) -> str:
        return f"{self.model.name} {self.num_rows} x {self.trunk_tokens}"

    @property
    def flat_bytes(self) -> int:
        """Of K and V, all layers, each row's own copy read."""
        return self.model.kv_bytes * self.num_rows * (self.trunk_tokens + self.own_tokens)

    @property
    def shared_bytes(self) -> int:
        return self.model.kv_bytes * (self.trunk_tokens + self.num_rows * self.own_tokens)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """As they were measured."""

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, num_bytes: float, flops: float) -> float:
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


@dataclass(frozen=True, slots=True)
class Floor:
    """Milliseconds of each phase of a decode step."""

    linear_ms: float
    trunk_ms: float
    tails_ms: float
    merge_ms: float

    @property
    def attention_ms(self) -> float:
        return self.trunk_ms + self.tails_ms + self.merge_ms

    @property
    def step_ms(self) -> float:
        return self.linear_ms + self.attention_ms


def decode_floor(case: DecodeCase, ceilings: Ceilings) -> Floor:
    model, rows = case.model, case.num_rows
    flops_per_token = 4 * model.num_layers * model.num_heads * model.head_dim
    parts_bytes = 2 * MERGED_PARTS * rows * model.num_layers * model.num_heads * (model.head_dim + 1) * 4
    parameters = model.read_parameters
    return Floor(
        linear_ms=1000 * ceilings.seconds(parameters * DTYPE_BYTES, 2 * rows * parameters),
        trunk_ms=1000
        * ceilings.seconds(model.kv_bytes * case.trunk_tokens, rows * case.trunk_tokens * flops_per_token),
        tails_ms=1000
        * ceilings.seconds(rows * case.own_tokens * model.kv_bytes, rows * case.own_tokens * flops_per_token),
        merge_ms=1000 * ceilings.seconds(parts_bytes, 0),
    )


def attention_cases(sizes: Sizes) -> list[DecodeCase]:
    """The twelve rows of attention alone."""
    return [
        DecodeCase(model, trunk, rows, sizes.own_tokens)
        for model in (sizes.llama, sizes.qwen)
        for trunk in sizes.trunks
        for rows in sizes.attention_rows
    ]


def decode_cases(sizes: Sizes) -> list[DecodeCase]:
    """Those of whole steps."""
    return [
        DecodeCase(sizes.llama, trunk, rows, sizes.own_tokens) for rows in sizes.decode_rows for trunk in sizes.trunks
    ]
