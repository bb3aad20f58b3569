"""Products of operands of eight bits: weights alone, or both as they come. Several implementations with the same
results and the same errors."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.matmul.blocks import Block, BlockSizes
from pallas_kernels.quantized_matmul.calls import Product
from pallas_kernels.quantized_matmul.products import multiply
from pallas_kernels.quantized_matmul.quantize import LARGEST, Quantized, dequantize, quantize
from pallas_kernels.quantized_matmul.vjp import Training, dynamic
from pallas_kernels.runtime import chip_in_use, vary_alike
from pallas_kernels.schedule_dump import CORES

__all__ = ["Quantized", "dequantize", "dynamic_quantized_matmul", "quantize", "quantized_matmul"]

KERNELS = ("pallas", "interpret")
IMPLEMENTATIONS = ("reference", "xla", *KERNELS)
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
FORMATS = {"int8": jnp.int8, "float8": jnp.float8_e4m3fn}


def quantized_matmul(
    x_TD: jax.Array,
    w_DF: Quantized,
    *,
    out_dtype: jnp.dtype | None = None,
    block_sizes: Block | None = None,
    implementation: str = "xla",
) -> jax.Array:
    """x w for weights that are held in eight bits, for inference.

    Args:
      x_TD: float32, bfloat16 or float16.
      w_DF: what `quantize` gives with axis 0, in any of its dtypes; pallas takes blocks that are multiples of 128.
      out_dtype: one of x's dtypes; None is x's.
      block_sizes: of "pallas" and "interpret"; None chooses one for the TPU generation of the mesh in use.
      implementation: "reference", "xla", "pallas" (on a TPU) or "interpret" (the same kernel anywhere, slowly).

    Returns:
      y_TF in `out_dtype`. Values of eight bits are exact in each dtype of x, sums are float32, scales multiply them,
      and the result is rounded once. xla rounds weights with a scale for each block to x's dtype.

    Raises:
      ValueError: shapes or dtypes that do not fit together, an option that `implementation` can't honour; a gradient
      that is asked for.
    """
    out_dtype = jnp.dtype(x_TD.dtype if out_dtype is None else out_dtype)
    _check_implementation("quantized_matmul", implementation, block_sizes)
    _check_held(x_TD, w_DF, out_dtype)
    if implementation in KERNELS and (w_DF.block or 128) % 128:
        raise ValueError(
            f"quantized_matmul: {implementation} takes blocks of scales that are multiples of 128, not of "
            f"{w_DF.block}; use implementation='xla'"
        )
    x_TD, values, scales = vary_alike(x_TD, w_DF.values, w_DF.scales)
    product = Product("quantized_matmul", out_dtype, scale_block=w_DF.block)
    return _held(product, implementation, block_sizes, x_TD, Quantized(values, scales, 0, w_DF.block))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _held(product, implementation, block, x_TD, w_DF):
    return multiply(product, x_TD, w_DF, implementation=implementation, block=block)


def _no_gradient(*_):
    raise ValueError(
        "quantized_matmul has no gradient: its weights are held in eight bits; train with dynamic_quantized_matmul"
    )


_held.defvjp(_no_gradient, _no_gradient)


def dynamic_quantized_matmul(
    x_TD: jax.Array,
    w_DF: jax.Array,
    *,
    values: str = "int8",
    quantized_backward: bool = True,
    key: jax.Array | None = None,
    block_sizes: BlockSizes | None = None,
    implementation: str = "xla",
) -> jax.Array:
    """x w for training: both operands are quantised as they come, a scale for each row of x and column of w.

    Args:
      x_TD: float32, bfloat16 or float16.
      w_DF: of x's dtype.
      values: "int8", or "float8": float8_e4m3fn, and float8_e5m2 for the incoming gradient. On TPUs that only where the
        matrix units take it, and pallas takes int8 only where they do.
      quantized_backward: whether the two products of the gradient are of eight bits too. Their operands are quantised
        anew, a scale for each row and column of dx and dw. Else they are XLA's own, of the exact operands.
      key: round the incoming gradient stochastically; None: to nearest. Values and weights are rounded to nearest.
      block_sizes: of "pallas" and "interpret"; None chooses them for the TPU generation of the mesh in use.
      implementation: "reference", "xla", "pallas" (on a TPU) or "interpret" (the same kernels anywhere, slowly).

    Returns:
      y_TF in x's dtype. int8 products are exact; float8 products add up in float32. Gradients are straight through the
      rounding (arXiv:1308.3432), in their operands' dtype. Inside shard_map a scale is of the device's own part.

    Raises:
      ValueError: shapes or dtypes that do not fit together, or an option that `implementation` or the TPU generation
      can't honour.
    """
    _check_implementation("dynamic_quantized_matmul", implementation, block_sizes)
    _check_dynamic(x_TD, w_DF, values, quantized_backward, key)
    _check_generation(values, implementation)
    call = Training(jnp.dtype(FORMATS[values]), quantized_backward, block_sizes or BlockSizes(), implementation)
    return dynamic(call, *vary_alike(x_TD, w_DF), key)


def kernels_pay() -> bool:
    """Whether the TPU generation in use is one that the kernels are for: v4 takes no int8, and is slow to widen it."""
    chip = chip_in_use()
    return chip is None or chip.name != "v4"


def _check_implementation(op, implementation, block_sizes):
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{op} has no implementation {implementation!r}; it has {', '.join(IMPLEMENTATIONS)}")
    if block_sizes is not None and implementation not in KERNELS:
        raise ValueError(f"{op}: {implementation} takes no block_sizes; {' and '.join(KERNELS)} do")


def _check_held(x, w, out_dtype):
    if not isinstance(w, Quantized) or w.values.dtype not in LARGEST:
        raise ValueError("quantized_matmul takes weights that `quantize` gave; dynamic_quantized_matmul takes arrays")
    if x.ndim != 2 or w.values.ndim != 2 or x.shape[1] != w.values.shape[0] or 0 in (*x.shape, *w.values.shape):
        raise ValueError(
            f"quantized_matmul takes x_TD and w_DF, none of them empty; got shapes {x.shape} and {w.values.shape}"
        )
    D, F = w.values.shape
    wanted = (-(-D // (w.block or D)), F)
    if w.axis != 0 or w.scales.shape != wanted or w.scales.dtype != jnp.float32:
        raise ValueError(
            f"quantized_matmul: scales {w.scales.dtype}{w.scales.shape} along axis {w.axis} should be float32{wanted} "
            f"along axis 0, for values_DF {w.values.shape} and block={w.block}"
        )
    for name, dtype in (("x_TD", x.dtype), ("out_dtype", out_dtype)):
        if dtype not in DTYPES:
            raise ValueError(f"quantized_matmul: {name} is {dtype}; it must be float32, bfloat16 or float16")


def _check_dynamic(x, w, values, quantized_backward, key):
    op = "dynamic_quantized_matmul"
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0] or 0 in (*x.shape, *w.shape):
        raise ValueError(f"{op} takes x_TD and w_DF, none of them empty; got shapes {x.shape} and {w.shape}")
    if x.dtype != w.dtype or x.dtype not in DTYPES:
        raise ValueError(f"{op} wants one dtype, float32, bfloat16 or float16; got {x.dtype} and {w.dtype}")
    if values not in FORMATS:
        raise ValueError(f"{op} has no values {values!r}; it has {', '.join(FORMATS)}")
    if key is not None and not quantized_backward:
        raise ValueError(f"{op}: key rounds the gradient, which quantized_backward=False leaves as it is")


def _check_generation(values, implementation):
    """Where the generation is known, and asked for more than the reference's float32."""
    chip = chip_in_use()
    if chip is None or implementation not in ("xla", "pallas"):
        return
    having = [name for name, core in CORES.items() if "f8" in core.fast_8bit]
    if values == "float8" and chip.name not in having:
        raise ValueError(
            f"dynamic_quantized_matmul: the matrix units of {chip.name} take no float8 (those of {', '.join(having)} "
            "do); use int8"
        )
    if implementation == "pallas" and chip.name == "v4":
        raise ValueError(
            "dynamic_quantized_matmul: pallas can't take int8 on v4, only on later TPUs; use implementation='xla'"
        )
