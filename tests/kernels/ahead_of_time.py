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

from kernels.batch import AttentionBatch, DrawBatch, Extend, KVShape, Node, Tail
from kernels.triton import backend, blocks, draw
from kernels.triton.tiles import BY_ARCHITECTURE, DEFAULT, Tiles

TABLE = Path(__file__).parent / "compiled.json"
CPU = torch.device("cpu")
MODULES = (backend, blocks, draw)


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


SHAPES = {
    "Llama-3-8B": Shape(4096, 14336, 32, 8, 128, 128256),
    "Qwen2.5-7B": Shape(3584, 18944, 28, 4, 128, 152064),
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
                options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages") if name in kwargs}
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


def launches_of(shape: Shape, tiles: Tiles, dtype: torch.dtype = torch.bfloat16) -> dict[str, Launched]:
    """Those of a step of the model with nodes of few and of many rows, and of what is around a step. By a name each."""
    kernels = backend.TritonKernels(CPU, shape.num_heads, tiles)
    kv_shape = KVShape(8, shape.num_kv_heads, 16, shape.head_dim)
    kv = torch.empty(2, 8, shape.num_kv_heads, 16, shape.head_dim, dtype=dtype)
    few, many = (AttentionBatch(range(n), [Tail([1], 1)] * n, [Node([2], range(n))]) for n in (2, 64))
    extend = AttentionBatch(range(64), (), (), [Extend(64, 0, [1, 2, 3, 4])])
    num_all = shape.num_heads + 2 * shape.num_kv_heads
    found: dict[str, Launched] = {}
    with recorded_launches() as launches:

        def take(*names: str) -> None:
            assert len(launches) == len(names), [launched.function for launched in launches]
            found.update(zip(names, launches, strict=True))
            launches.clear()

        for name, batch in (("few", few), ("many", many)):
            num = len(batch.tails)
            heads = torch.empty(num, num_all, shape.head_dim, dtype=dtype)
            tables = torch.empty(num, 1, shape.head_dim)
            plan = kernels.plan(batch, kv_shape, dtype)
            q = kernels.rope_and_write_kv(heads, tables, tables, kv, plan)
            kernels.decode_attention(q, kv, plan, torch.empty(num, shape.num_heads, shape.head_dim, dtype=dtype))
            take("rotate and write", f"nodes, {name} rows", "tails", "merge")
        q = torch.empty(64, num_all, shape.head_dim, dtype=dtype)[:, : shape.num_heads]
        out = torch.empty(64, shape.num_heads, shape.head_dim, dtype=dtype)
        kernels.extend_attention(q, kv, kernels.plan(extend, kv_shape, dtype), out)
        take("extends")
        x, weight = torch.empty(64, shape.hidden_size, dtype=dtype), torch.empty(shape.hidden_size, dtype=dtype)
        kernels.rms_norm(x, weight, 1e-5)
        square = kernels.pack_linear(torch.empty(shape.hidden_size, 16, dtype=dtype))
        kernels.linear_and_norm(torch.empty(64, 16, dtype=dtype), square, x, weight, 1e-5)
        take("norm", "add and norm")
        if shape.head_norms:
            kernels.rms_norm(q, torch.empty(shape.head_dim, dtype=dtype), 1e-5)
            take("norm of heads")
        gate = kernels.pack_linear(torch.empty(shape.intermediate_size, 16, dtype=dtype))
        kernels.swiglu(torch.empty(64, 16, dtype=dtype), gate, gate)
        take("swiglu")
        layers = kv[None].expand(2, -1, -1, -1, -1, -1).contiguous()
        ids = torch.tensor([1, 2])
        blocks.copy_blocks(layers, [1], [2])
        gathered = blocks.gather_blocks(layers, ids)
        blocks.scatter_blocks(layers, ids, gathered)
        take("copy blocks", "gather blocks", "scatter blocks")
        numbers = {name: torch.zeros(4, dtype=kind).numpy() for name, kind in DRAW_DTYPES.items()}
        with mock.patch.object(draw, "tiles_for", return_value=tiles):
            draw.draw(torch.empty(4, shape.vocab_size), DrawBatch(**numbers))
        take("draw")
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
