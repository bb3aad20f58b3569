"""Hand-written kernels for training transformers on TPUs; needs jax alone.

Every op has `implementation=`: "reference" (plain jnp in float32, the truth), "xla" (memory-linear jnp for any
platform), "pallas" (TPU) and "interpret" (the same kernels anywhere). An implementation that can't honour an argument
raises; none ignores one.
"""

from pallas_kernels.attention import flash_attention
from pallas_kernels.attention.context import context_attention
from pallas_kernels.attention.rotary import apply_rope
from pallas_kernels.collective_matmul import matmul_reduce_scatter, sharded_matmul
from pallas_kernels.cross_entropy import linear_cross_entropy
from pallas_kernels.fused_matmul import fused_matmul
from pallas_kernels.gated_mlp import gated_mlp
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.quantized_matmul import dynamic_quantized_matmul, quantize, quantized_matmul

__all__ = [
    "apply_rope",
    "context_attention",
    "dynamic_quantized_matmul",
    "flash_attention",
    "fused_matmul",
    "gated_mlp",
    "grouped_matmul",
    "linear_cross_entropy",
    "matmul_reduce_scatter",
    "quantize",
    "quantized_matmul",
    "sharded_matmul",
]
