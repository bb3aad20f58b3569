"""The linear cross entropy kernels on the real TPU compiler, forward and backward, for every generation."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.aot

COMPILE = """
import jax, jax.numpy as jnp
from jax.experimental import topologies
from pallas_kernels import linear_cross_entropy
from pallas_kernels.cross_entropy import blocks
from pallas_kernels.runtime import CHIPS

def compiled(name, topology, allowed, T, D, V, **options):
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    sizes = blocks.choose(blocks.Shape(T, D, V, 2, 4), CHIPS[name])

    def loss(x, w, weights, labels):
        loss, lse, *argmax = linear_cross_entropy(x, w, labels, weights_T=weights, ignore_id=-100, z_loss=1e-4,
            block_sizes=sizes, implementation="pallas", **options)
        return jnp.sum(loss) + jnp.sum(lse), argmax

    shapes = ((T, D), jnp.bfloat16), ((V, D), jnp.float32), ((T,), jnp.float32), ((T,), jnp.int32)
    args = [jax.ShapeDtypeStruct(*shape, sharding=sharding) for shape in shapes]
    lowered = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True)).lower(*args)
    assert lowered.as_text().count("@tpu_custom_call") == 2, name
    temporaries = lowered.compile().memory_analysis().temp_size_in_bytes
    assert temporaries <= allowed, (name, temporaries)
    print(name)

for name, topology in {topologies}:
    if name == "v5p":
        compiled(name, topology, 5 * 10**7, 4096, 2048, 128256)
    else:  # odd sizes, which need a padded copy of the head
        options = dict(logit_soft_cap=30.0, label_smoothing=0.1, return_argmax=True)
        compiled(name, topology, 2**28, 1000, 200, 50257, **options)
"""

LOWER = """
import jax, jax.numpy as jnp
from jax.experimental import topologies
from tpu_train import ops
from tpu_train.config import MeshConfig
from tpu_train.mesh import make_mesh
from tpu_train.precision import Compute
from tpu_train.sharding import SPECS

devices = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices
mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=2), devices)

def shape(name, dims, dtype):
    return jax.ShapeDtypeStruct(dims, dtype, sharding=jax.NamedSharding(mesh, SPECS[name]))

def loss(x, w, labels):
    compute = Compute(jnp.dtype("bfloat16"), "pallas", "tpu")
    return jnp.sum(ops.linear_cross_entropy(x, w, labels, z_loss=1e-4, soft_cap=None, compute=compute)[0])

for tokens in (1024, 16):
    args = shape("BTD", (4, tokens, 4096), jnp.bfloat16), shape("VD", (128256, 4096), jnp.float32)
    lowered = jax.jit(jax.grad(loss, (0, 1))).lower(*args, shape("BT", (4, tokens), jnp.int32)).as_text()
    print(tokens, "tokens:", lowered.count("@tpu_custom_call"), "kernels")
"""

TOPOLOGIES = {"v4": "v4:1x1x1", "v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}


@pytest.mark.slow
def test_forward_and_backward_compile_for_every_generation_and_keep_no_logits():
    """In one process, since to start it takes seconds. The schedule budget compiles other generations' real sizes."""
    assert run(COMPILE.replace("{topologies}", repr(list(TOPOLOGIES.items())))).split()[-5:] == list(TOPOLOGIES)


def test_training_takes_the_kernels_where_they_pay():
    assert run(LOWER).splitlines()[-2:] == ["1024 tokens: 2 kernels", "16 tokens: 0 kernels"]


def run(code: str) -> str:
    settings = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
