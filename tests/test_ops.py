"""The border to pallas_kernels: which implementation runs, and what is refused there."""

import jax
import jax.numpy as jnp
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
