"""Whether this build of torch still has the unstable operators that the CPU backend is made of, and whether they
compute what they should. Run once at the start of an engine; a few milliseconds."""

import torch
import torch.nn.functional as F

# what a missing operator, another signature or an unsupported dtype raises
_FAULTS = (RuntimeError, AttributeError, NotImplementedError, TypeError, ValueError)
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def packed_linear_works(dtype: torch.dtype) -> bool:
    """`mkldnn::_reorder_linear_weight` and `_linear_pointwise` with the fused epilogues that are used."""
    generator = torch.Generator().manual_seed(0)
    x, weight, other = (torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 48), (96, 48), (5, 96)))
    bias = torch.randn(96, generator=generator).to(dtype)
    product = F.linear(x.float(), weight.float(), bias.float())
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        pointwise = torch.ops.mkldnn._linear_pointwise
        pairs = (
            (pointwise(x, packed, bias, "none", [], ""), product),
            (pointwise(x, packed, bias, "swish", [], ""), F.silu(product)),
            (pointwise.binary(x, other, packed, bias, "add"), product + other.float()),
            (pointwise.binary(x, other, packed, bias, "mul"), product * other.float()),
        )
    except _FAULTS:
        return False
    return all(_close(got, expected, dtype) for got, expected in pairs)


def flash_attention_works(dtype: torch.dtype) -> bool:
    """`_scaled_dot_product_flash_attention_for_cpu`: plain, masked and causal, and its log-sum-exp."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 20, 16, generator=generator).to(dtype) for _ in range(3))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    scores = q.float() @ k.float().transpose(-1, -2) * 16**-0.5
    mask = torch.zeros(1, 1, 1, 20, dtype=dtype)
    mask[..., 13:] = float("-inf")
    causal = torch.ones(20, 20, dtype=torch.bool).tril()
    try:
        results = (
            (flash(q, k, v), scores),
            (flash(q, k, v, attn_mask=mask), scores + mask.float()),
            (flash(q, k, v, 0.0, True), scores.masked_fill(~causal, float("-inf"))),
        )
    except _FAULTS:
        return False
    return all(
        _close(got, expected.softmax(-1) @ v.float(), dtype)
        and _close(lse, expected.logsumexp(-1), dtype)
        and lse.dtype == torch.float32
        for (got, lse), expected in results
    )


def _close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    tolerance = _TOLERANCE[dtype]
    return got.shape == expected.shape and torch.allclose(got.float(), expected, atol=tolerance, rtol=tolerance)
