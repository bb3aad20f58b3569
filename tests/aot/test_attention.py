"""The attention kernels on the real TPU compiler, forward and backward, for every generation."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import flash_attention, schedule
from pallas_kernels.attention import blocks
from pallas_kernels.runtime import CHIPS

pytestmark = pytest.mark.aot

# Bundles that one block of 1024 x 1024 may take, head dim 128, full mask: (forward, backward); 5% over what it takes.
MOST = {"v4": None, "v5e": (4250, 9900), "v5p": None, "v6e": (2600, 4300), "7x": (2600, 4650)}


@pytest.mark.parametrize("generation", MOST)
def test_forward_and_backward_compile_within_budget(generation):
    heads = jax.ShapeDtypeStruct((1, 2048, 4, 128), jnp.bfloat16)
    keys = jax.ShapeDtypeStruct((1, 2048, 2, 128), jnp.bfloat16)
    sizes = blocks.choose(2048, 2048, 128, 128, 2, CHIPS[generation])

    def loss(q, k, v):
        o = flash_attention(q, k, v, causal=False, block_sizes=sizes, implementation="pallas")
        return jnp.sum(o.astype(jnp.float32) ** 2)

    report = schedule.measure(jax.grad(loss, (0, 1, 2)), heads, keys, keys, topology=generation)
    bundles = {kernel.name: max(region.bundles for region in kernel.regions) for kernel in report.kernels}
    assert set(bundles) == {"flash_attention_forward", "flash_attention_backward"}
    if most := MOST[generation]:
        assert (sizes.q, sizes.k) == (1024, 1024)
        got = bundles["flash_attention_forward"], bundles["flash_attention_backward"]
        assert got[0] <= most[0] and got[1] <= most[1], got
