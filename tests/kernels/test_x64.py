"""Every op in x64 mode, forward and backward: the same bits and dtypes interpreted, and still lowered for a TPU.

What a user's x64 mode widens comes wide: ids, labels, offsets and scalars.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import (
    dynamic_quantized_matmul,
    flash_attention,
    fused_matmul,
    gated_mlp,
    grouped_matmul,
    linear_cross_entropy,
    quantize,
    quantized_matmul,
)
from pallas_kernels.attention.blocks import BlockSizes as AttentionBlocks
from pallas_kernels.attention.blocks import Cut

T, S = 200, 300
DTYPES = (jnp.bfloat16, jnp.float32)
SMALL = AttentionBlocks(128, 128, 128, Cut(128, 128, 1), Cut(128, 128, 1))


def normal(dtype, *dims):
    return jnp.asarray(np.random.default_rng(sum(dims)).normal(size=dims), dtype)


def integers(low, high, *dims):
    """int64 in x64 mode, else int32."""
    return jnp.asarray(np.random.default_rng(0).integers(low, high, dims))


def attention(dtype, offset=0, rotary=False, **options):
    """Its gradients too, by o and by lse; documents, a window, sinks and a cap, over several blocks."""
    queries = S if rotary else T
    angle_BTR = np.random.default_rng(0).uniform(0, 7, (2, S, 16)).astype(np.float32)

    def op(q, k, v, sinks):
        ids = {"q_segment_ids_BT": integers(0, 3, 2, queries), "kv_segment_ids_BS": integers(0, 3, 2, S)}
        ids = {name: jnp.sort(x) for name, x in ids.items()}
        angles = (jnp.cos(angle_BTR), jnp.sin(angle_BTR)) if rotary else None
        scalars = {"scale": np.float64(0.3), "logit_soft_cap": np.float64(3.0)}
        scalars["q_offset"] = jnp.asarray(40) if offset is None else offset
        return flash_attention(
            q, k, v, sinks_N=sinks, window=180, rotary=angles, return_lse=True, **ids, **scalars, **options
        )

    k = normal(dtype, 2, S, 1, 32)
    return op, (normal(dtype, 2, queries, 2, 32), k, k[:, ::-1], normal(jnp.float32, 2))


def entropy(dtype, **options):
    def op(x, w):
        return linear_cross_entropy(x, w, integers(0, 140, 130), z_loss=np.float64(0.1), **options)

    return op, (normal(dtype, 130, 20), normal(dtype, 140, 20))


def grouped(dtype, **options):
    def op(x, w):
        return grouped_matmul(x, w, jnp.asarray([50, 0, 80], jnp.int32), **options)

    return op, (normal(dtype, 140, 20), normal(dtype, 3, 20, 30))


def matmul(op, dtype, weights=1, **options):
    return functools.partial(op, **options), (normal(dtype, 130, 20), *[normal(dtype, 20, 140)] * weights)


def held(dtype, **options):
    """It has no gradient."""
    w = np.random.default_rng(0).normal(size=(20, 140)).astype(np.float32)

    def op(x):
        return quantized_matmul(jax.lax.stop_gradient(x), quantize(jnp.asarray(w)), **options)

    return op, (normal(dtype, 130, 20),)


OPS: dict[str, Any] = {
    "attention": functools.partial(attention, block_sizes=SMALL),
    "attention_rotary": functools.partial(attention, rotary=True, block_sizes=SMALL),
    "attention_of_an_offset_known_at_run_time": functools.partial(attention, offset=None, block_sizes=SMALL),
    "cross_entropy": entropy,
    "grouped_matmul": grouped,
    "gated_mlp": functools.partial(matmul, gated_mlp, weights=2),
    "fused_matmul": functools.partial(matmul, fused_matmul, activation="gelu_tanh"),
    "quantized_matmul": held,
    "dynamic_quantized_matmul": functools.partial(matmul, dynamic_quantized_matmul),
}


def value_and_gradients(make, dtype, implementation):
    """(a function of the op's float arrays to its results and their gradients, those arrays)."""
    op, arrays = make(dtype, implementation=implementation)

    @functools.partial(jax.shard_map, in_specs=P(), out_specs=P())
    def run(*arrays):
        results, vjp = jax.vjp(op, *arrays)
        return results, vjp(jax.tree.map(lambda x: jnp.cos(x).astype(x.dtype), results))

    return jax.jit(run), arrays


def computed(make, dtype, implementation):
    run, arrays = value_and_gradients(make, dtype, implementation)
    return jax.tree.map(np.asarray, run(*arrays))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("name", OPS)
def test_interpreted_kernels_give_the_same_bits(name, dtype):
    wanted = computed(OPS[name], dtype, "interpret")
    with jax.enable_x64(True):
        got = computed(OPS[name], dtype, "interpret")
    for x, right in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == right.dtype
        np.testing.assert_array_equal(x, right)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_attention_without_kernels_gives_the_same_numbers(implementation, dtype):
    for offset in (40, None):
        make = functools.partial(attention, offset=offset)
        wanted = computed(make, dtype, implementation)
        with jax.enable_x64(True):
            got = computed(make, dtype, implementation)
        for x, right in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            assert x.dtype == right.dtype
            tolerance = 2**-7 if x.dtype == jnp.bfloat16 else 2e-5
            np.testing.assert_allclose(x.astype(np.float32), right.astype(np.float32), tolerance, tolerance)


@pytest.mark.parametrize("name", OPS)
def test_kernels_lower_for_a_tpu(name):
    with jax.enable_x64(True):
        run, arrays = value_and_gradients(OPS[name], jnp.bfloat16, "pallas")
        exported = jax.export.export(run, platforms=["tpu"])(*arrays)
    assert "tpu_custom_call" in exported.mlir_module()
    assert not [x for x in exported.out_avals if x.dtype.itemsize > 4]
