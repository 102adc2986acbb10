"""Compiles the Triton kernels for GPUs that are not here, exactly as the backend would launch them, and reads off what
each needs. `python -m tests.kernels.ahead_of_time` writes the table that the tests compare with.

What is compiled is not written down a second time: the backend runs with launches that are recorded instead of made,
and types, alignments and constants are those of the recorded arguments.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend

from kernels.attention_rule import FULL, AttentionRule
from kernels.batch import AttentionBatch, DrawBatch, Extend, KVQuantisation, KVShape, Node, Tail
from kernels.kv_format import cache_dtype, layer_sizes
from kernels.triton import backend, blocks, draw
from kernels.triton.tiles import BY_ARCHITECTURE, DEFAULT, Tiles

TABLE = Path(__file__).parent / "compiled.json"
CPU = torch.device("cpu")
MODULES = (backend, blocks, draw)
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


@dataclass(frozen=True)
class Target:
    name: str
    gpu: GPUTarget
    max_shared_bytes: int
    mma: str
    """How products of many rows are computed."""


TARGETS = (
    Target("sm_80", GPUTarget("cuda", 80, 32), 163 * 1024, "mma.sync"),
    Target("sm_90", GPUTarget("cuda", 90, 32), 227 * 1024, "wgmma"),
    Target("gfx942", GPUTarget("hip", "gfx942", 64), 64 * 1024, "mfma"),
)


@dataclass(frozen=True)
class Shape:
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    head_norms: bool = False
    has_variants: bool = False


@dataclass(frozen=True)
class Variant:
    """Of the kernels that read and write the cache."""

    quantisation: KVQuantisation | None = None
    rule: AttentionRule = FULL


USUAL = Variant()
VARIANTS = {
    "int8": Variant("int8"),
    "fp8": Variant("fp8"),
    "window and soft cap": Variant(rule=AttentionRule(window=4096, soft_cap=50.0)),
}
SHAPES = {
    "Llama-3-8B": Shape(4096, 14336, 32, 8, 128, 128256, has_variants=True),
    "Qwen2.5-7B": Shape(3584, 18944, 28, 4, 128, 152064, has_variants=True),
    "Qwen3-8B": Shape(4096, 12288, 32, 8, 128, 151936, head_norms=True),
    "SmolLM2-135M": Shape(576, 1536, 9, 3, 64, 49152),
}


@dataclass(frozen=True)
class Launched:
    """One launch that the backend wanted to make."""

    function: Any
    arguments: dict[str, Any]
    options: dict[str, int]


@contextmanager
def recorded_launches() -> Iterator[list[Launched]]:
    """In place of every kernel that the backend's modules know."""
    launches: list[Launched] = []

    class Recorder:
        def __init__(self, function: Any) -> None:
            self._function = function

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: Any, **kwargs: Any) -> None:
                names = self._function.arg_names
                options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
                arguments = {**dict(zip(names, args, strict=False)), **kwargs}
                assert set(arguments) == set(names), f"{self._function}: {set(arguments) ^ set(names)}"
                launches.append(Launched(self._function, arguments, options))

            return launch

    patches = [
        mock.patch.object(module, name, Recorder(function))
        for module in MODULES
        for name, function in vars(module).items()
        if isinstance(function, triton.runtime.JITFunction) and function.fn.__name__ == name
    ]
    for patch in patches:
        patch.start()
    try:
        yield launches
    finally:
        for patch in patches:
            patch.stop()


def launches_of(shape: Shape, tiles: Tiles) -> dict[str, Launched]:
    """Those of a step of the model with nodes of few and of many rows, and of what is around a step; and the variants
    of attention, which only some shapes are compiled in. By a name each."""
    found = _both_steps(shape, tiles, USUAL)
    for name, variant in VARIANTS.items() if shape.has_variants else ():
        launches = _both_steps(shape, tiles, variant)
        wanted = {*ATTENTION, *(MOVES if variant.quantisation else ())}
        found.update({f"{name}: {kernel}": launches[kernel] for kernel in launches if kernel in wanted})
    return found


def _both_steps(shape: Shape, tiles: Tiles, variant: Variant) -> dict[str, Launched]:
    few, many = (step_launches(shape, tiles, num_decodes, 64, variant) for num_decodes in (2, 64))
    return {"nodes, few rows": few["nodes"], "nodes, many rows": many.pop("nodes"), **many}


ATTENTION = ("tails", "nodes, few rows", "nodes, many rows", "extends")
MOVES = ("rotate and write", "copy blocks", "gather blocks", "scatter blocks")
"""What has another form for bytes."""


def step_launches(
    shape: Shape, tiles: Tiles, num_decodes: int, num_new: int, variant: Variant = USUAL
) -> dict[str, Launched]:
    """Of one node over so many decode rows and an extend of so many tokens, in bfloat16."""
    dtype = torch.bfloat16
    kernels = backend.TritonKernels(CPU, shape.num_heads, tiles, variant.rule)
    kv_shape = KVShape(8, shape.num_kv_heads, 16, shape.head_dim, variant.quantisation)
    kv = torch.empty(1, *layer_sizes(kv_shape), dtype=cache_dtype(kv_shape, dtype))
    num_rows, num_all = num_decodes + num_new, shape.num_heads + 2 * shape.num_kv_heads
    tails, node = [Tail([1], 1)] * num_decodes, Node([2], range(num_decodes))
    batch = AttentionBatch(range(num_rows), tails, [node], [Extend(num_new, 0, [1, 2, 3, 4])])

    def empty(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype)

    found: dict[str, Launched] = {}
    with recorded_launches() as launches:

        def take(*names: str) -> None:
            assert len(launches) == len(names), [launched.function for launched in launches]
            found.update(zip(names, launches, strict=True))
            launches.clear()

        plan = kernels.plan(batch, kv_shape, dtype)
        tables = torch.empty(num_rows, 1, shape.head_dim)
        q = kernels.rope_and_write_kv(empty(num_rows, num_all, shape.head_dim), tables, tables, kv[0], plan)
        out = empty(num_rows, shape.num_heads, shape.head_dim)
        kernels.decode_attention(q[:num_decodes], kv[0], plan, out[:num_decodes])
        kernels.extend_attention(q[num_decodes:], kv[0], plan, out[num_decodes:])
        take("rotate and write", "nodes", "tails", "merge", "extends")

        x, narrow, weight = empty(num_rows, shape.hidden_size), empty(num_rows, 16), empty(shape.hidden_size)
        kernels.rms_norm(x, weight, 1e-5)
        kernels.linear_and_norm(narrow, kernels.pack_linear(empty(shape.hidden_size, 16)), x, weight, 1e-5)
        take("norm", "add and norm")
        if shape.head_norms:
            kernels.rms_norm(q, empty(shape.head_dim), 1e-5)
            take("norm of heads")
        gate = kernels.pack_linear(empty(shape.intermediate_size, 16))
        kernels.swiglu(narrow, gate, gate)
        take("swiglu")

        ids = list(range(num_decodes))
        blocks.copy_blocks(kv, ids, [num_decodes + i for i in ids])
        gathered = blocks.gather_blocks(kv, torch.tensor(ids))
        blocks.scatter_blocks(kv, torch.tensor(ids), gathered)
        numbers = {name: torch.zeros(num_decodes, dtype=kind).numpy() for name, kind in DRAW_DTYPES.items()}
        with mock.patch.object(draw, "tiles_for", return_value=tiles):
            draw.draw(torch.empty(num_decodes, shape.vocab_size), DrawBatch(**numbers))
        take("copy blocks", "gather blocks", "scatter blocks", "draw")
    return found


DRAW_DTYPES = {
    "temperatures": torch.float32,
    "top_ks": torch.int32,
    "top_ps": torch.float64,
    "min_ps": torch.float64,
    "seeds": torch.int64,
    "choices": torch.int32,
    "positions": torch.int64,
}
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


def compile_for(target: Target, launched: Launched) -> CompiledKernel:
    return triton.compile(source_of(launched), target=target.gpu, options=launched.options)


def intermediate_of(target: Target, launched: Launched) -> str:
    """What the front end makes of it, before anything is optimised or made for a device."""
    compiler = make_backend(target.gpu)
    context = ir.context()
    ir.load_dialects(context)
    compiler.load_dialects(context)
    options = compiler.parse_options(dict(launched.options))
    generators, modules = compiler.get_codegen_implementation(options), compiler.get_module_map()
    return str(source_of(launched).make_ir(target.gpu, options, generators, modules, context))


def source_of(launched: Launched) -> ASTSource:
    """With what a launch would know: which pointers and numbers are multiples of 16, and which numbers are 1."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    hints: dict[tuple[int], list[list[Any]]] = {}
    for i, parameter in enumerate(launched.function.params):
        value = launched.arguments[parameter.name]
        is_special = not (parameter.do_not_specialize or isinstance(value, float))
        if parameter.is_constexpr or value is None or (is_special and isinstance(value, int) and value == 1):
            signature[parameter.name] = "constexpr"
            constants[i,] = value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + _TYPES[value.dtype]
            is_aligned = value.data_ptr() % 16 == 0
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            is_aligned = is_special and value % 16 == 0
        if is_aligned:
            hints[i,] = [["tt.divisibility", 16]]
    return ASTSource(launched.function, signature, constants, hints)


def resources(target: Target, compiled: CompiledKernel) -> dict[str, int | str]:
    """Registers of a thread, bytes of its stack, which is where what does not fit the registers is spilled to, bytes
    of shared memory, and the instructions of products."""
    if target.gpu.backend == "cuda":
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
        assembly, kinds = compiled.asm["ptx"], ("wgmma", "mma.sync")
        needs = {"registers": found["REG"], "stack": found["STACK"] + found["LOCAL"]}
    else:
        assembly, kinds = compiled.asm["amdgcn"], ("mfma",)

        def number(name: str) -> int:
            found = re.search(rf"\.{name}:\s+(\d+)", assembly)
            assert found is not None, name
            return int(found.group(1))

        needs = {
            "registers": number("vgpr_count"),
            "accumulators": number("agpr_count"),
            "stack": number("private_segment_fixed_size"),
        }
    mma = next((kind for kind in kinds if kind in assembly), "none")
    return {**needs, "shared": compiled.metadata.shared, "mma": mma}


def measure(target: Target, shape: Shape, names: tuple[str, ...] = ()) -> dict[str, dict[str, int | str]]:
    """By kernel; all of them if none is named."""
    tiles = BY_ARCHITECTURE.get(target.name, DEFAULT)
    return {
        name: resources(target, compile_for(target, launched))
        for name, launched in launches_of(shape, tiles).items()
        if not names or name in names
    }


def read_table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TABLE.read_text())
    return table


def main() -> None:
    table = {
        "triton": triton.__version__,
        "kernels": {
            target.name: {name: measure(target, shape) for name, shape in SHAPES.items()} for target in TARGETS
        },
    }
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
