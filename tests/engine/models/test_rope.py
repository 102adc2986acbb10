"""Frequencies and tables against transformers' own."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.config import RopeConfig
from engine.models.rope import inverse_frequencies, rope_table

KINDS = {
    "default": RopeConfig(theta=100000.0),
    "linear": RopeConfig(theta=10000.0, kind="linear", factor=2.5),
    "llama3": RopeConfig(theta=500000.0, kind="llama3", factor=8.0, original_max_position_embeddings=8192),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_tables_equal_transformers(kind: str, head_dim: int) -> None:
    rope = KINDS[kind]
    parameters = {"rope_type": kind, "rope_theta": rope.theta}
    if kind != "default":
        parameters["factor"] = rope.factor
    if kind == "llama3":
        parameters.update(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    config = LlamaConfig(head_dim=head_dim, rope_parameters=parameters, max_position_embeddings=131072)
    theirs = LlamaRotaryEmbedding(config)
    torch.testing.assert_close(inverse_frequencies(rope, head_dim), theirs.inv_freq, rtol=1e-6, atol=0)
    cosines, sines = rope_table(rope, head_dim, 300)
    their_cosines, their_sines = theirs(torch.empty(1), torch.arange(300)[None])
    torch.testing.assert_close(cosines, their_cosines[0], atol=1e-4, rtol=0)
    signs = torch.cat((-torch.ones(head_dim // 2), torch.ones(head_dim // 2)))
    torch.testing.assert_close(sines * signs, their_sines[0], atol=1e-4, rtol=0)
