"""Attention of decode rows alone, all layers of a real model, over K and V of random contents."""

import time

import torch

from benchmarks.step_bench import SequenceMaker
from benchmarks.step_work import DecodeShape
from benchmarks.turns import Step
from engine.attention_timing import ensure_node_cost
from engine.batch_tensors import BatchTensors
from engine.config import EngineConfig
from engine.kv_memory import allocate_blocks
from engine.machine import available_cpus
from engine.models.choose import choose_decoder, find_kernels_dir
from engine.models.fingerprint import resolve_dtype
from engine.models.weights import Weights
from engine.prepared import PreparedModel
from engine.scheduled_batch import ScheduledBatch
from engine.shared_attention import USUAL_NODE_COST, SharedAttention
from kernels.batch import KVShape

FILLED_AT_ONCE = 1 << 22


class AttentionBench:
    @torch.inference_mode()
    def __init__(self, model: PreparedModel, config: EngineConfig, num_blocks: int) -> None:
        """num_blocks: without the null block. config.shared_attention says whether what a node costs is measured."""
        torch.set_num_threads(config.threads or available_cpus())
        shape = model.manifest.config
        dtype_name = resolve_dtype(config.dtype, "cpu")
        dtype: torch.dtype = getattr(torch, dtype_name)
        weights = Weights(model.weights_path(dtype_name), shape)
        device = torch.device("cpu")
        self._decoder = choose_decoder(shape, weights, config, device, dtype, shape.max_position_embeddings)
        self._num_layers = shape.num_layers
        self._kv_shape = KVShape(num_blocks + 1, shape.num_kv_heads, config.block_size, shape.head_dim)
        folder = find_kernels_dir(config)
        is_auto = config.shared_attention == "auto"
        cost = ensure_node_cost(self._decoder, shape, self._kv_shape, folder) if is_auto else USUAL_NODE_COST
        self.shared_attention = SharedAttention(config.shared_attention, cost)
        self.sequences = SequenceMaker(config.block_size, num_blocks, shape.vocab_size)
        sizes = (shape.num_layers, 2, num_blocks + 1, shape.num_kv_heads, config.block_size, shape.head_dim)
        self._kv = allocate_blocks(sizes, dtype, device)
        some = torch.randn(FILLED_AT_ONCE).to(dtype)
        for part in self._kv.view(-1).split(FILLED_AT_ONCE):
            part.copy_(some[: len(part)])
        self._heads = (shape.num_heads, shape.head_dim)
        self._dtype = dtype

    def plan(self, shape: DecodeShape, shared_attention: SharedAttention) -> tuple[ScheduledBatch, float]:
        """The blocks of the last shape are used again, so that all modes read the same ones. With it the planner's
        milliseconds."""
        self.sequences.free_all()
        rows = self.sequences.rows(shape)
        start = time.perf_counter()
        batch = self.sequences.batch(rows, shared_attention)
        return batch, (time.perf_counter() - start) * 1000

    @torch.inference_mode()
    def attention(self, batch: ScheduledBatch) -> Step:
        """For the same queries each time; what comes back is the last layer's, [rows, num_heads, head_dim]."""
        tensors = BatchTensors.build(batch, self._kv_shape.block_size)
        plan = self._decoder.plan(tensors.attention, self._kv_shape)
        generator = torch.Generator().manual_seed(0)
        q = torch.randn(tensors.num_decodes, *self._heads, generator=generator).to(self._dtype)
        out = torch.empty_like(q)

        @torch.inference_mode()
        def step() -> torch.Tensor:
            for layer in range(self._num_layers):
                self._decoder.decode_attention(layer, q, self._kv, plan, out)
            return out

        return step
