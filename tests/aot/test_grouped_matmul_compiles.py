"""The grouped kernels on the real TPU compiler, forward and backward, for every generation."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.aot

# In one process, since to start it takes seconds.
COMPILE = """
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import PartitionSpec as P
from pallas_kernels import grouped_matmul

def loss(x_TD, w_EDF, group_sizes):
    return jnp.sum(grouped_matmul(x_TD, w_EDF, group_sizes, implementation="pallas").astype(jnp.float32))

def compiled(topology, T, D, F, E, dtype=jnp.bfloat16):
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = jax.sharding.Mesh(devices[:1], ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = jax.sharding.NamedSharding(mesh, P())
    local = jax.shard_map(jax.grad(loss, (0, 1)), mesh=mesh, in_specs=P(), out_specs=P())
    shapes = ((T, D), dtype), ((E, D, F), dtype), ((E,), jnp.int32)
    args = [jax.ShapeDtypeStruct(*shape, sharding=everywhere) for shape in shapes]
    # The loss needs no y, so its kernel is not among them: it is compiled alone.
    assert jax.jit(local).lower(*args).compile().as_text().count("tpu_custom_call") == 2
    forward = jax.shard_map(loss, mesh=mesh, in_specs=P(), out_specs=P())
    assert jax.jit(forward).lower(*args).compile().as_text().count("tpu_custom_call") == 1

for name, topology in {topologies}:
    compiled(topology, 300, 200, 150, 5, jnp.float32)
    compiled(topology, 1000, 2048, 700, 100)
    if name in ("v4", "v5p"):  # contractions in several steps, for want of VMEM
        compiled(topology, 8192, 4096, 14336, 8)
    print(name)
"""
TOPOLOGIES = {"v4": "v4:1x1x1", "v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}


@pytest.mark.slow
def test_forward_and_backward_compile_for_every_generation():
    settings = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "XLA_FLAGS": ""}
    code = COMPILE.replace("{topologies}", repr(list(TOPOLOGIES.items())))
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-5:] == list(TOPOLOGIES)
