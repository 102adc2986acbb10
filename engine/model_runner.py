"""The device side of the engine: weights, the KV cache, and one step of the model over a scheduled batch."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import get_args

import torch

from engine import logprobs
from engine.attention_timing import ensure_node_cost
from engine.batch_tensors import BatchTensors, PromptRows
from engine.config import DTYPES, EngineConfig
from engine.core import EngineCore
from engine.decode_graphs import DecodeGraphs, find_row_counts
from engine.device import available_bytes, check_devices, resolve_device, take_device
from engine.errors import EngineDeadError, EngineError
from engine.graph_capture import CudaGraphCapture, GraphCapture
from engine.kv_tensors import KVTensors
from engine.machine import available_memory_bytes
from engine.memory_plan import MemoryPlan, check_weights_fit, plan_memory
from engine.models.choose import choose_decoder, choose_draw, choose_moves, find_kernels_dir
from engine.models.decoder import Decoder
from engine.models.fingerprint import resolve_dtype
from engine.models.packed_decoder import PackedDecoder
from engine.models.shard import WHOLE, split_config
from engine.models.weights import Weights
from engine.pages_ahead import PagesAhead
from engine.prepared import PreparedModel
from engine.protocol import EngineInfo, TokenLogprobs
from engine.rank_leader import RankLeader
from engine.sampler import Sampler, not_finite
from engine.scheduled_batch import SampledToken, ScheduledBatch, StepResult
from engine.sequence import Sequence
from engine.shared_attention import USUAL_NODE_COST
from engine.steady_decode import SteadyDecode
from engine.step_ahead import StepAhead
from engine.swap_cost import SwapTime
from engine.warm_up import compile_kernels
from kernels.batch import KVQuantisation, KVShape
from kernels.cpu.native import StepArrays
from kernels.kv_format import token_bytes


class ModelRunner:
    """Loads a prepared model and computes steps. With `tensor_parallel` it is the first rank, and starts the others.

    Raises ModelNotSupported and NotEnoughMemory while loading; nothing of it depends on the scheduler.
    """

    def __init__(self, model: PreparedModel, config: EngineConfig, capture: GraphCapture | None = None) -> None:
        """capture: in place of the device's own, which a CPU has none of."""
        with ExitStack() as stack:
            self._load(model, config, stack)
            self._graphs = self._prepare_launches(config, capture)
            self._at_end = stack.pop_all()

    def _load(self, model: PreparedModel, config: EngineConfig, stack: ExitStack) -> None:
        self._config = config
        num_ranks = config.tensor_parallel
        _check_config(config)
        whole = model.manifest.config
        shape = split_config(whole, num_ranks)
        kind = resolve_device(config.device)
        on_gpu = kind.type == "cuda"
        check_devices(kind, num_ranks)
        dtype_name = _choose_dtype(model, config.dtype, kind)
        dtype: torch.dtype = getattr(torch, dtype_name)
        device = take_device(kind.type, config.threads, num_ranks=num_ranks)
        self._ranks: RankLeader | None = None
        if num_ranks > 1:
            self._ranks = RankLeader(model.path, config, dtype_name, device)
            stack.callback(self._ranks.close)

        shard = WHOLE if self._ranks is None else self._ranks.shard
        weights = Weights(model.weights_path(dtype_name), whole, shard)
        # a tied head is packed in its own layout beside the embedding
        head_bytes = whole.vocab_size * whole.hidden_size * dtype.itemsize if whole.tie_word_embeddings else 0
        weights_bytes = weights.num_bytes + head_bytes
        available = available_bytes(device, num_ranks)
        check_weights_fit(weights_bytes, available)
        left_bytes = available - weights_bytes
        if self._ranks is not None:
            left_bytes = self._ranks.find_least_memory(left_bytes)
        kv_head_bytes = token_bytes(config.kv_quantisation, shape.head_dim, dtype)
        self.plan: MemoryPlan = plan_memory(
            shape,
            config,
            kv_head_bytes=kv_head_bytes,
            weights_bytes=weights_bytes,
            available_bytes=left_bytes,
            available_host_bytes=available_memory_bytes() // num_ranks if on_gpu else left_bytes,
            on_gpu=on_gpu,
        )
        if self._ranks is not None:
            self._ranks.load(self.plan)
        with torch.inference_mode():
            self._decoder = choose_decoder(shape, weights, config, device, dtype, self.plan.max_model_len)
        self._kv_shape = KVShape(
            self.plan.num_blocks + 1, shape.num_kv_heads, config.block_size, shape.head_dim, config.kv_quantisation
        )
        moves = choose_moves(self._decoder)
        self._blocks = KVTensors(shape.num_layers, self._kv_shape, dtype, device, moves, self.plan.num_host_blocks)
        self._kv = self._blocks.kv
        self.swap_time = SwapTime() if self._blocks.host is None else self._blocks.host.measure()
        self.node_cost = USUAL_NODE_COST
        if config.shared_attention == "auto" and not on_gpu and config.kernels != "triton":
            folder = find_kernels_dir(config)
            self.node_cost = ensure_node_cost(self._decoder, shape, self._kv_shape, folder)
        self._pages = PagesAhead(self._kv, self._decoder.touch) if isinstance(self._decoder, PackedDecoder) else None
        if self._pages is not None:
            self._pages.use(0)
        self._sampler = Sampler(choose_draw(self._decoder))
        self._steady: SteadyDecode | None = None
        self._ahead: StepAhead | None = None
        self.identity = (dtype_name, repr(shape.rope), config.kv_dtype)
        """What keys and values depend on beside the fingerprint, which covers weights, configuration and tokenizer."""
        self.info = EngineInfo(
            model_name=model.manifest.name,
            fingerprint=model.manifest.fingerprint,
            vocab_size=whole.vocab_size,
            max_model_len=self.plan.max_model_len,
            block_size=config.block_size,
            num_blocks=self.plan.num_blocks,
            kv_bytes_per_token=whole.kv_bytes_per_token(kv_head_bytes),
            kv_dtype=config.kv_quantisation or dtype_name,
            num_host_blocks=self.plan.num_host_blocks,
        )
        if self._ranks is not None:
            self._ranks.wait_loaded()

    @torch.inference_mode()
    def _prepare_launches(self, config: EngineConfig, capture: GraphCapture | None) -> DecodeGraphs | None:
        """Compiles what has to be, and captures what can be."""
        decoder, kv, max_rows = self._decoder, self._kv, config.max_num_seqs
        if not isinstance(decoder, Decoder):
            return None
        if kv.is_cuda and self._ranks is None:
            compile_kernels(decoder, self._blocks, choose_draw(decoder), max_rows)
            capture = capture or CudaGraphCapture()
        if capture is None or config.enforce_eager:
            return None
        counts, max_tokens = find_row_counts(max_rows), self.plan.max_model_len
        graphs = DecodeGraphs(decoder, kv, self._kv_shape, capture, row_counts=counts, max_tokens=max_tokens)
        return graphs if graphs.num_graphs else None

    def make_core(self) -> EngineCore:
        """Over this runner, which may have one."""
        return EngineCore(
            self._config,
            self.info,
            self,
            self.identity,
            self.swap_time,
            node_cost=self.node_cost,
            runs_ahead=self.runs_ahead,
        )

    def listen(self, listener: Callable[[EngineDeadError], None]) -> None:
        """Called once, from another thread, when a rank has ended and no further step can work."""
        if self._ranks is not None:
            self._ranks.listen(listener)

    def close(self) -> None:
        """Ends the other ranks. Without this they end when nobody holds the runner any more, or with this process."""
        self._at_end.close()

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Moves blocks, computes the new tokens of every sequence and draws the next token where one is due."""
        if not batch.sequences:
            with self._together(batch):
                self._blocks.move(batch.transfers)
            return StepResult([])
        ahead, self._ahead = self._ahead, None  # what this step has no use for is of no use to any other
        if self._graphs is not None and batch.num_decodes == len(batch.sequences):
            result = self._try_graph(self._graphs, batch, ahead)
            if result is not None:
                return result
        tensors, hidden = self._forward(batch)
        tokens = []
        if tensors.sampled:
            rows = hidden if tensors.sample_rows is None else hidden[tensors.sample_rows]
            tokens = self._draw(rows, tensors.sampled)
        prompt_logprobs = {
            rows.sequence.request_id: self._prompt_logprobs(hidden, rows) for rows in tensors.prompt_rows
        }
        return StepResult(tokens, prompt_logprobs)

    @property
    def runs_ahead(self) -> bool:
        """Whether steps are faster if rows have a slot for the token behind the next one."""
        return self._graphs is not None

    def _try_graph(self, graphs: DecodeGraphs, batch: ScheduledBatch, ahead: StepAhead | None) -> StepResult | None:
        """The step as one launch, or as it was launched ahead; None, and nothing is done, if there is no graph for it.

        What may come behind it is launched before its ids are waited for.
        """
        block_size = self._kv_shape.block_size
        rows = None if ahead is None else ahead.find_rows(batch, block_size)
        if ahead is not None and rows is not None:
            step, tensors, draw = ahead.step, ahead.tensors, ahead.draw
            is_whole = rows == list(range(len(tensors.sampled)))
        else:
            rows, is_whole = list(range(len(batch.sequences))), True
            tensors = BatchTensors.build(batch, block_size)
            if tensors.prompt_rows:
                return None
            draw = self._sampler.draw_batch(tensors.sampled)
            written = graphs.try_write(tensors.token_ids, tensors.positions, tensors.attention, draw)
            if written is None:
                return None
            step = written
            self._blocks.move(batch.transfers)
            step.launch()
        if batch.may_come_again and is_whole and not self._sampler.needs_logits(tensors.sampled):
            self._ahead = StepAhead.launch(graphs, tensors, draw, block_size)
        tokens = self._sampler.take(step, tensors.sampled)
        return StepResult([tokens[row] for row in rows])

    def _draw(self, hidden: torch.Tensor, sequences: list[Sequence]) -> list[SampledToken]:
        if isinstance(self._decoder, PackedDecoder) and self._sampler.takes_largest(sequences):
            ids = self._decoder.greedy(hidden)
            pairs = zip(ids, sequences, strict=True)
            return [SampledToken(token_id) if token_id >= 0 else not_finite(sequence) for token_id, sequence in pairs]
        return self._sampler.sample(self._decoder.logits(hidden), sequences)

    @torch.inference_mode()
    def logits(self, batch: ScheduledBatch) -> torch.Tensor:
        """The logits of every row of the batch, fp32 [rows, vocab_size], K and V written as by `execute`."""
        return self._decoder.logits(self._forward(batch, all_rows=True)[1]).clone()

    def _forward(self, batch: ScheduledBatch, *, all_rows: bool = False) -> tuple[BatchTensors, torch.Tensor]:
        """Moves blocks and computes the rows of the batch; also gives their residual stream behind the last layer, with
        anything in rows that nobody needs unless `all_rows`."""
        steady, self._steady = self._steady, None  # a step that fails leaves nothing to go on from
        if steady is not None and steady.try_advance(batch):
            tensors, plan = steady.tensors, steady.plan
            self._blocks.move(batch.transfers)
            hidden = self._decoder.forward(tensors.token_ids, tensors.positions, self._kv, plan, batch.num_decodes)
        else:
            tensors = BatchTensors.build(batch, self._kv_shape.block_size, all_rows=all_rows)
            with self._together(batch, tensors):
                self._blocks.move(batch.transfers)
                plan = self._decoder.plan(tensors.attention, self._kv_shape)
                if self._pages is not None and isinstance(plan, StepArrays):
                    self._pages.use(plan.highest_block_id)
                hidden = self._decoder.forward(tensors.token_ids, tensors.positions, self._kv, plan, batch.num_decodes)
            is_steady = isinstance(plan, StepArrays) and SteadyDecode.fits(batch, tensors)
            steady = SteadyDecode(batch, tensors, plan, self._kv_shape.block_size) if is_steady else None
        self._steady = steady
        return tensors, hidden

    def _together(self, batch: ScheduledBatch, tensors: BatchTensors | None = None) -> AbstractContextManager[None]:
        """The other ranks, if there are any, do what is done within."""
        return nullcontext() if self._ranks is None else self._ranks.step(batch, tensors)

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


def _check_config(config: EngineConfig) -> None:
    """Raises EngineError for what can never work."""
    if config.kv_dtype not in (*get_args(KVQuantisation), "auto"):
        raise EngineError(f"kv_dtype must be auto, int8 or fp8, got {config.kv_dtype!r}")
    if config.tensor_parallel < 1:
        raise EngineError(f"tensor_parallel must be at least 1, got {config.tensor_parallel}")
    if config.tensor_parallel > 1 and config.deterministic:
        raise EngineError("deterministic mode needs the C++ decoder, which is not split: tensor parallel excludes it")
