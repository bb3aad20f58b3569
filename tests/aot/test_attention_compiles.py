"""The attention kernels on the real TPU compiler, forward and backward, for every generation."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.aot

COMPILE = """
import jax, jax.numpy as jnp
from jax.experimental import topologies
from pallas_kernels import flash_attention
from pallas_kernels.attention import blocks
from pallas_kernels.runtime import CHIPS

name, topology = "{generation}", "{topology}"
device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
sharding = jax.sharding.SingleDeviceSharding(device)

def shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

def compiled(T, S, H, **options):
    sizes = blocks.choose(T, S, H, H, 2, CHIPS[name])
    def loss(q, k, v, ids, sinks, cos, sin):
        o, lse = flash_attention(q, k, v, q_segment_ids_BT=ids if T == S else None,
            kv_segment_ids_BS=ids if T == S else None, sinks_N=sinks, rotary=(cos, sin) if T == S else None,
            return_lse=True, block_sizes=sizes, implementation="pallas", **options)
        return jnp.sum(o.astype(jnp.float32)) + jnp.sum(lse)
    heads = shape(1, T, 4, H), shape(1, S, 2, H), shape(1, S, 2, H)
    angles = [shape(1, T, H // 2, dtype=jnp.float32)] * 2
    args = *heads, shape(1, T, dtype=jnp.int32), shape(4, dtype=jnp.float32), *angles
    return jax.jit(jax.grad(loss, (0, 1, 2, 4))).lower(*args).compile().as_text().count("tpu_custom_call")

assert compiled({call}) >= 2
"""

TOPOLOGIES = {"v4": "v4:1x1x1", "v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}


@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_forward_and_backward_compile(generation):
    odd = "1000, 1500, 80, window=300, logit_soft_cap=30.0, q_offset=500"
    call = odd if generation in ("v4", "v5p") else "2048, 2048, 128"
    code = (
        COMPILE.replace("{call}", call)
        .replace("{generation}", generation)
        .replace("{topology}", TOPOLOGIES[generation])
    )
    settings = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
