"""The matmul kernels on the real TPU compiler, forward and backward, for every generation."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.aot

COMPILE = """
import functools
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import PartitionSpec as P
from pallas_kernels import fused_matmul, gated_mlp

devices = topologies.get_topology_desc(platform="tpu", topology_name="{topology}").devices
mesh = jax.sharding.Mesh(devices[:1], ("data",), axis_types=(jax.sharding.AxisType.Auto,))
everywhere = jax.sharding.NamedSharding(mesh, P())

def compiled(op, *arrays, **options):
    run = functools.partial(op, implementation="pallas", **options)
    def loss(*arrays):
        return jnp.sum(run(*arrays).astype(jnp.float32))
    local = jax.shard_map(jax.grad(loss, tuple(range(len(arrays)))), mesh=mesh, in_specs=P(), out_specs=P())
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere) for x in arrays]
    assert jax.jit(local).lower(*args).compile().as_text().count("tpu_custom_call") == 3

def fused(x, w, bias, residual, **options):
    return fused_matmul(x, w, bias_F=bias, residual_TF=residual, **options)

def array(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)

def gated(T, D, F, dtype=jnp.bfloat16, **options):
    compiled(gated_mlp, array(T, D, dtype=dtype), *[array(D, F, dtype=dtype)] * 2, **options)

{calls}
"""

ODD = """
gated(300, 400, 600, activation="gelu")
gated(150, 140, 130, dtype=jnp.float32, activation="gelu_tanh")
x, w, bias, residual = array(200, 600), array(600, 300), array(300), array(200, 300)
compiled(fused, x, w, bias, residual, activation="relu_squared", out_dtype=jnp.float32)
"""
REAL = """
gated(4096, 4096, 14336)
"""

TOPOLOGIES = {"v4": "v4:1x1x1", "v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}


@pytest.mark.slow
@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_forward_and_backward_compile(generation):
    code = COMPILE.replace("{topology}", TOPOLOGIES[generation])
    code = code.replace("{calls}", REAL if generation in ("v5p", "v6e") else ODD)
    settings = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
