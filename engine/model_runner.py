"""The device side of the engine: weights, the KV cache, and one step of the model over a scheduled batch."""

import torch

from engine import logprobs
from engine.attention_timing import ensure_node_cost
from engine.batch_tensors import BatchTensors, PromptRows
from engine.config import DTYPES, EngineConfig
from engine.errors import ModelNotSupported
from engine.host_cache import HostCache
from engine.kv_memory import allocate_blocks
from engine.machine import available_cpus, available_memory_bytes
from engine.memory_plan import MemoryPlan, check_weights_fit, plan_memory
from engine.models.choose import choose_decoder, choose_draw, choose_moves, find_kernels_dir
from engine.models.fingerprint import resolve_dtype
from engine.models.packed_decoder import PackedDecoder
from engine.models.weights import Weights
from engine.pages_ahead import PagesAhead
from engine.prepared import PreparedModel
from engine.protocol import EngineInfo, TokenLogprobs
from engine.sampler import Sampler, not_finite
from engine.scheduled_batch import BlockCopy, SampledToken, ScheduledBatch, StepResult, Transfers
from engine.sequence import Sequence
from engine.shared_attention import USUAL_NODE_COST
from engine.steady_decode import SteadyDecode
from engine.swap_cost import SwapTime
from kernels.batch import KVShape
from kernels.cpu.native import StepArrays


class ModelRunner:
    """Loads a prepared model and computes steps.

    Raises ModelNotSupported and NotEnoughMemory while loading; nothing of it depends on the scheduler.
    """

    def __init__(self, model: PreparedModel, config: EngineConfig) -> None:
        self._device = resolve_device(config.device)
        on_gpu = self._device.type == "cuda"
        if not on_gpu:
            torch.set_num_threads(config.threads or min(torch.get_num_threads(), available_cpus()))
        dtype_name = _choose_dtype(model, config.dtype, self._device)
        dtype: torch.dtype = getattr(torch, dtype_name)
        shape = model.manifest.config

        weights = Weights(model.weights_path(dtype_name), shape)
        # a tied head is packed in its own layout beside the embedding
        head_bytes = shape.vocab_size * shape.hidden_size * dtype.itemsize if shape.tie_word_embeddings else 0
        weights_bytes = weights.num_bytes + head_bytes
        available_bytes = _available_bytes(self._device)
        check_weights_fit(weights_bytes, available_bytes)
        self.plan: MemoryPlan = plan_memory(
            shape,
            config,
            dtype_bytes=dtype.itemsize,
            weights_bytes=weights_bytes,
            available_bytes=available_bytes - weights_bytes,
            available_host_bytes=available_memory_bytes() if on_gpu else available_bytes - weights_bytes,
            on_gpu=on_gpu,
        )
        with torch.inference_mode():
            self._decoder = choose_decoder(shape, weights, config, self._device, dtype, self.plan.max_model_len)
        self._kv_shape = KVShape(self.plan.num_blocks + 1, shape.num_kv_heads, config.block_size, shape.head_dim)
        self._kv = _allocate_kv(shape.num_layers, self._kv_shape, dtype, self._device)
        self._moves = choose_moves(self._decoder)
        self._host = HostCache(self._kv, self.plan.num_host_blocks, self._moves) if self.plan.num_host_blocks else None
        self.swap_time = self._host.measure() if self._host is not None else SwapTime()
        self.node_cost = USUAL_NODE_COST
        if config.shared_attention == "auto" and not on_gpu and config.kernels != "triton":
            folder = find_kernels_dir(config)
            self.node_cost = ensure_node_cost(self._decoder, shape, self._kv_shape, folder)
        self._pages = PagesAhead(self._kv, self._decoder.touch) if isinstance(self._decoder, PackedDecoder) else None
        if self._pages is not None:
            self._pages.use(0)
        self._sampler = Sampler(choose_draw(self._decoder))
        self._steady: SteadyDecode | None = None
        self.identity = (dtype_name, repr(shape.rope))
        """What keys and values depend on beside the fingerprint, which covers weights, configuration and tokenizer."""
        self.info = EngineInfo(
            model_name=model.manifest.name,
            fingerprint=model.manifest.fingerprint,
            vocab_size=shape.vocab_size,
            max_model_len=self.plan.max_model_len,
            block_size=config.block_size,
            num_blocks=self.plan.num_blocks,
            kv_bytes_per_token=shape.kv_bytes_per_token(dtype.itemsize),
            num_host_blocks=self.plan.num_host_blocks,
        )

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Moves blocks, computes the new tokens of every sequence and draws the next token where one is due."""
        self._move_blocks(batch.transfers)
        if not batch.sequences:
            return StepResult([])
        tensors, hidden = self._forward(batch)
        tokens = []
        if tensors.sampled:
            rows = hidden if tensors.sample_rows is None else hidden[tensors.sample_rows]
            tokens = self._draw(rows, tensors.sampled)
        prompt_logprobs = {
            rows.sequence.request_id: self._prompt_logprobs(hidden, rows) for rows in tensors.prompt_rows
        }
        return StepResult(tokens, prompt_logprobs)

    def _draw(self, hidden: torch.Tensor, sequences: list[Sequence]) -> list[SampledToken]:
        if isinstance(self._decoder, PackedDecoder) and self._sampler.takes_largest(sequences):
            ids = self._decoder.greedy(hidden)
            pairs = zip(ids, sequences, strict=True)
            return [SampledToken(token_id) if token_id >= 0 else not_finite(sequence) for token_id, sequence in pairs]
        return self._sampler.sample(self._decoder.logits(hidden), sequences)

    @torch.inference_mode()
    def logits(self, batch: ScheduledBatch) -> torch.Tensor:
        """The logits of every row of the batch, fp32 [rows, vocab_size], K and V written as by `execute`."""
        return self._decoder.logits(self._forward(batch)[1]).clone()

    def _forward(self, batch: ScheduledBatch) -> tuple[BatchTensors, torch.Tensor]:
        """The rows of the batch, and their residual stream behind the last layer."""
        steady, self._steady = self._steady, None  # a step that fails leaves nothing to go on from
        if steady is not None and steady.try_advance(batch):
            tensors, plan = steady.tensors, steady.plan
        else:
            tensors = BatchTensors.build(batch, self._kv_shape.block_size)
            plan = self._decoder.plan(tensors.attention, self._kv_shape)
            if self._pages is not None and isinstance(plan, StepArrays):
                self._pages.use(plan.highest_block_id)
            is_steady = isinstance(plan, StepArrays) and SteadyDecode.fits(batch, tensors)
            steady = SteadyDecode(batch, tensors, plan, self._kv_shape.block_size) if is_steady else None
        hidden = self._decoder.forward(tensors.token_ids, tensors.positions, self._kv, plan, batch.num_decodes)
        self._steady = steady
        return tensors, hidden

    def _move_blocks(self, transfers: Transfers) -> None:
        if transfers.swap_outs or transfers.swap_ins:
            assert self._host is not None, f"{transfers} without a host tier"
            if transfers.swap_outs:
                self._host.swap_out(transfers.swap_outs)
            if transfers.swap_ins:
                self._host.swap_in(transfers.swap_ins)
        if transfers.copies:
            self._copy_blocks(transfers.copies)

    def _copy_blocks(self, copies: tuple[BlockCopy, ...]) -> None:
        sources, targets = [copy.source for copy in copies], [copy.target for copy in copies]
        self._moves.copy_blocks(self._kv, sources, targets)

    def _prompt_logprobs(self, hidden: torch.Tensor, rows: PromptRows) -> list[TokenLogprobs]:
        entries: list[TokenLogprobs] = []
        num_top = rows.sequence.params.prompt_logprobs or 0
        for start in range(0, len(rows.next_ids), logprobs.ROWS_AT_A_TIME):
            next_ids = rows.next_ids[start : start + logprobs.ROWS_AT_A_TIME]
            first = rows.first_row + start
            logits = self._decoder.logits(hidden[first : first + len(next_ids)])
            entries += logprobs.token_logprobs(logits, next_ids, [num_top] * len(next_ids))
        return entries


def _choose_dtype(model: PreparedModel, dtype: str, device: torch.device) -> str:
    """auto: the device's own, else what the model was prepared in, as preparing may have expected another device."""
    wanted = resolve_dtype(dtype, device.type)
    if dtype == "auto" and not model.weights_path(wanted).exists():
        return next((name for name in DTYPES if model.weights_path(name).exists()), wanted)
    return wanted


def resolve_device(device: str) -> torch.device:
    """auto: cuda where there is one. Raises ModelNotSupported if cuda was asked for and is not there."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelNotSupported("device cuda was asked for, but torch finds no CUDA device")
    return torch.device(device)


def _available_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return available_memory_bytes()


def _allocate_kv(num_layers: int, shape: KVShape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]."""
    sizes = (num_layers, 2, shape.num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
    return allocate_blocks(sizes, dtype, device)
