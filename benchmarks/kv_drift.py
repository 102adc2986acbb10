"""What a quantised KV cache does to a model's predictions: each token of a text, given all before it.

    python -m benchmarks.kv_drift PREPARED_MODEL [TEXT ...] [--dtype auto] [--kv-dtypes auto int8 fp8]
        [--output benchmarks/results/NAME.json]

Every position's logits come from the engine's own steps, 512 tokens of a text at a time, so that all attention reads
K and V from the cache. Of each kv dtype: perplexity, its ratio to that of the first one, the share of positions at
which both name the same next token, and the mean KL divergence from it, in nats.
"""

import argparse
import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.document import Document, new_document, write
from engine.config import EngineConfig
from engine.model_runner import ModelRunner
from engine.prepared import PreparedModel
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import ScheduledBatch, ScheduledSequence
from engine.sequence import Sequence
from engine.text.tokenizer import Tokenizer

TEXTS = [Path("tests/data/harbour_line.txt")]
CHUNK_TOKENS = 512
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Drift:
    """Of one kv dtype over a text, against another."""

    perplexity: float
    ratio: float
    top1_agreement: float
    kl_nats: float

    @classmethod
    def between(cls, logits: torch.Tensor, base: torch.Tensor, next_ids: torch.Tensor) -> "Drift":
        """Logits [tokens, vocab_size] and the tokens that follow, [tokens]."""
        mine, theirs = logits.log_softmax(-1), base.log_softmax(-1)
        perplexity, base_perplexity = (_perplexity(x, next_ids) for x in (mine, theirs))
        return cls(
            perplexity,
            perplexity / base_perplexity,
            (logits.argmax(-1) == base.argmax(-1)).double().mean().item(),
            (theirs.exp() * (theirs - mine)).sum(-1).double().mean().item(),
        )


def _perplexity(log_probs: torch.Tensor, next_ids: torch.Tensor) -> float:
    return math.exp(-log_probs.gather(1, next_ids[:, None]).double().mean().item())


def text_logits(runner: ModelRunner, token_ids: list[int]) -> torch.Tensor:
    """fp32 [tokens, vocab_size]. Raises RuntimeError for a text that the runner's context or cache does not hold."""
    block_size = runner.info.block_size
    if len(token_ids) > runner.info.max_sequence_tokens:
        raise RuntimeError(f"{len(token_ids)} tokens are more than the {runner.info.max_sequence_tokens} that fit")
    sequence = Sequence("text", token_ids, GREEDY, (), 0, 1)
    sequence.block_table = list(range(1, 2 + len(token_ids) // block_size))
    logits = []
    while num_new := min(sequence.num_uncomputed_tokens, CHUNK_TOKENS):
        logits.append(runner.logits(ScheduledBatch((ScheduledSequence(sequence, num_new, False),))))
        sequence.num_computed_tokens += num_new
    return torch.cat(logits)


def measure(model: PreparedModel, texts: Rows[Path], config: EngineConfig, kv_dtypes: Rows[str]) -> Document:
    """By text and kv dtype; the first kv dtype is what the others are compared with."""
    tokenizer = Tokenizer.load(model)
    token_ids = {text.name: tokenizer.encode(text.read_text()) for text in texts}
    base: dict[str, torch.Tensor] = {}
    figures: Document = {name: {"tokens": len(ids)} for name, ids in token_ids.items()}
    for kv_dtype in kv_dtypes:
        runner = ModelRunner(model, config.replace(kv_dtype=kv_dtype))
        for name, ids in token_ids.items():
            logits = text_logits(runner, ids)[:-1]
            drift = Drift.between(logits, base.setdefault(name, logits), torch.tensor(ids[1:]))
            print(
                f"{name:24} {kv_dtype:5} perplexity {drift.perplexity:8.3f} ({drift.ratio:.4f}x)  "
                f"top-1 {drift.top1_agreement:6.1%}  KL {drift.kl_nats:.2e}  "
                f"{runner.info.kv_bytes_per_token:,} bytes a token",
                flush=True,
            )
            figures[name][kv_dtype] = {field: getattr(drift, field) for field in Drift.__slots__}
            figures[name][kv_dtype]["kv_bytes_per_token"] = runner.info.kv_bytes_per_token
        runner.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, nargs="*", default=TEXTS)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-dtypes", nargs="+", default=["auto", "int8", "fp8"])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    model = PreparedModel.load(options.model)
    config = EngineConfig(model_dir=str(options.model), dtype=options.dtype, shared_attention="never")
    document = new_document()
    document |= {"model": model.manifest.name, "dtype": options.dtype}
    document["texts"] = measure(model, options.texts, config, options.kv_dtypes)
    write(document, options.output)


if __name__ == "__main__":
    main()
