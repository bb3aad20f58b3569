"""The border to pallas_kernels: which implementation runs, and what is refused there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_train import ops
from tpu_train.config import UserError
from tpu_train.precision import Compute


def attention(num_queries: int, head_dim: int, implementation: str) -> str:
    """The traced program."""
    compute = Compute(jnp.dtype(jnp.bfloat16), implementation, "tpu")
    q, k = (
        jax.ShapeDtypeStruct((1, n, 2, head_dim), jnp.bfloat16, sharding=ops.SPECS["BTNH"]) for n in (num_queries, 128)
    )

    def run(q, k):
        offset = 128 - num_queries
        return ops.attention(q, k, k, None, window=0, soft_cap=None, q_offset=offset, compute=compute)

    return str(jax.make_jaxpr(run)(q, k))


def test_kernels_take_whole_blocks_of_queries_and_xla_takes_decoding():
    assert "pallas_call" in attention(128, 64, "pallas")
    assert "pallas_call" not in attention(1, 64, "pallas")
    assert "pallas_call" not in attention(128, 64, "xla")


def test_the_grouped_kernel_takes_whole_tiles_of_rows_and_xla_the_rest():
    def program(rows: int, implementation: str) -> str:
        compute = Compute(jnp.dtype(jnp.bfloat16), implementation, "tpu")
        shapes = ((rows, 8), jnp.bfloat16), ((3, 8, 16), jnp.bfloat16), ((3,), jnp.int32)
        everywhere = jax.shard_map(
            functools.partial(ops.grouped_matmul, compute=compute), in_specs=ops.P(), out_specs=ops.P()
        )
        return str(jax.make_jaxpr(everywhere)(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)))

    assert "pallas_call" in program(128, "pallas")
    assert "pallas_call" not in program(127, "pallas")
    assert "pallas_call" not in program(128, "xla")


def test_a_head_too_wide_for_the_kernel_names_the_way_out():
    with pytest.raises(UserError, match=r"model\.head_dim=320: .* at most 256; set run\.implementation=xla"):
        attention(128, 320, "pallas")


def test_the_gated_kernel_takes_whole_blocks_of_tokens_and_xla_the_rest():
    def takes(tokens: int, implementation: str) -> bool:
        x = jax.ShapeDtypeStruct((1, tokens, 8), jnp.bfloat16)
        return ops.takes_gated_mlp(x, Compute(jnp.dtype(jnp.bfloat16), implementation, "tpu"))

    assert takes(128, "pallas")
    assert not takes(127, "pallas")
    assert not takes(128, "xla")


@pytest.mark.slow
def test_the_gated_kernel_gathers_its_weights_and_scatters_their_gradients(mesh_of, simulated_tpu):
    rng = np.random.default_rng(0)
    x, gate, up = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 128, 8), (8, 12), (8, 12)))

    def gradients(shape, op):
        mesh = mesh_of(*shape)
        specs = (ops.SPECS["BTD"], ops.SPECS["DF"], ops.SPECS["DF"])
        placed = [jax.device_put(a, jax.NamedSharding(mesh, s)) for a, s in zip((x, gate, up), specs, strict=True)]
        return jax.jit(jax.grad(lambda *a: jnp.sum(jnp.square(op(*a))), (0, 1, 2)))(*placed)

    def plainly(x, gate, up):
        products = [jnp.einsum("BTD,DF->BTF", x, w, precision="highest") for w in (gate, up)]
        return jax.nn.silu(products[0]) * products[1]

    compute = Compute(jnp.dtype(jnp.float32), "pallas", "tpu")
    wanted = gradients((1, 1, 1), plainly)
    with simulated_tpu():
        got = gradients((1, 2, 2), functools.partial(ops.gated_mlp, activation="silu", compute=compute))
        for mine, right in zip(got, wanted, strict=True):
            np.testing.assert_allclose(mine, right, rtol=1e-4, atol=1e-4 * np.abs(right).max())
