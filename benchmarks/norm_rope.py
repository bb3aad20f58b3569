"""What XLA makes of norms and rotary positions on absent TPUs; needs libtpu, not a TPU.

    python benchmarks/norm_rope.py --what=rope
    python benchmarks/norm_rope.py --what=step --topologies=v5e:1x1

rope: q's projection, its rotation and its heads' way to the attention kernel's layout, forward and backward, with no
rotation, with halves cut and put together again, and by a product with a matrix of 0, 1 and -1. step: the real train
step of two layers of configs/llama3_8b.py's width, 4,096 tokens, on one chip: everything scheduled that computes some
of a norm or of rope. Cycles are XLA's estimates, bytes its arguments and results: a fusion that has more in it
(`dot` where a product is) has that in its figures too.
"""

import argparse
import functools
import json
import os
import subprocess
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from pallas_kernels import apply_rope, hlo_cost, schedule
from tpu_train import config as config_lib
from tpu_train import mesh as mesh_lib
from tpu_train import precision
from tpu_train.train_step import trace_step

B, T, D, N, H = 2, 2048, 4096, 32, 128


@jax.custom_vjp
def by_product(x_BTNH, cos_BTR, sin_BTR):
    """`apply_rope` with its halves exchanged by the matrix unit."""
    half = x_BTNH.shape[-1] // 2
    eye, zero = np.eye(half), np.zeros((half, half))
    exchange_HH = jnp.asarray(np.block([[zero, eye], [-eye, zero]]), x_BTNH.dtype)
    other = jnp.einsum("BTNH,HG->BTNG", x_BTNH, exchange_HH, preferred_element_type=jnp.float32)
    cos, sin = (jnp.concatenate([angle, angle], axis=-1)[:, :, None, :] for angle in (cos_BTR, sin_BTR))
    return (x_BTNH.astype(jnp.float32) * cos + other * sin).astype(x_BTNH.dtype)


by_product.defvjp(
    lambda x, cos, sin: (by_product(x, cos, sin), (cos, sin)),
    lambda angles, g: (by_product(g, angles[0], -angles[1]), None, None),
)
ROPES = {"none": lambda x, cos, sin: x, "halves": apply_rope, "product": by_product}
STEP = ["model.num_layers=2", "model.remat=none", "model.vocab_size=8192", f"data.batch_size={B}", "mesh.fsdp=1"]


def rope_programs(device) -> list[str]:
    there = jax.sharding.SingleDeviceSharding(device)

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=there)

    def train(rope, x, w, cos, sin, dy):
        def heads(x, w):
            return jnp.swapaxes(rope((x.reshape(-1, D) @ w).reshape(B, T, N, H), cos, sin), 1, 2)

        y, vjp = jax.vjp(heads, x, w)
        return y, vjp(dy)

    angles = array(B, T, H // 2, dtype=jnp.float32)
    args = array(B, T, D), array(D, N * H), angles, angles, array(B, N, T, H)
    rows = []
    for name, rope in ROPES.items():
        compiled = jax.jit(functools.partial(train, rope)).lower(*args).compile()
        cycles = hlo_cost.parse(compiled.as_text()).total_cycles
        rows.append(f"{name} | {cycles / 1e6:.2f} M | {compiled.cost_analysis()['bytes accessed'] / 1e6:,.0f} MB")
    return rows


def step_program(device) -> list[str]:
    config = config_lib.load("configs/llama3_8b.py", STEP)
    mesh = mesh_lib.make_mesh(config.mesh, [device])
    compute = precision.resolve(config.run, "tpu")
    module = hlo_cost.parse(trace_step(config, compute, mesh).lower().compile().as_text())
    known = {i.name: i for body in module.computations.values() for i in body}
    rows, totals = [], {"norm": 0.0, "rope": 0.0}
    for runs, _, _, instruction in module.walk():
        inside = within(module, instruction)
        names = [module.operation(each) for each in inside]
        found = [scope for scope in totals if any(f"/{scope}/" in name for name in names)]
        if not found or not instruction.cycles:
            continue
        totals[found[0]] += runs * instruction.cycles
        dot = " dot" if any(each.op in ("convolution", "dot") for each in inside) else ""
        back = " backward" if any("transpose" in name for name in names) else ""
        read = sum(a.content_bytes for o in set(instruction.operands) if o in known for a in known[o].arrays)
        written = sum(a.content_bytes for a in instruction.arrays)
        row = f"{'+'.join(found)}{dot}{back} | {runs} x {instruction.cycles:,}"
        rows.append(
            f"{row} | {read / 1e6:,.0f} + {written / 1e6:,.0f} MB | {', '.join(map(str, instruction.arrays))[:60]}"
        )
    rows += [
        f"all of {scope} | {cycles / 1e6:.2f} M of {module.total_cycles / 1e6:.1f} M"
        for scope, cycles in totals.items()
    ]
    return rows


def within(module: hlo_cost.Module, instruction: hlo_cost.Instruction) -> list[hlo_cost.Instruction]:
    """The instruction and, of a fusion, all that it is made of."""
    inner = module.computations[instruction.attribute("calls") or ""] if instruction.op == "fusion" else ()
    return [instruction, *(each for one in inner for each in within(module, one))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=["rope", "step"], default="rope")
    parser.add_argument("--topologies", default="v5e:1x1,v6e:1x1")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        device = topologies.get_topology_desc(platform="tpu", topology_name=flags.child).devices[0]
        print(json.dumps(rope_programs(device) if flags.what == "rope" else step_program(device)))
        return
    for topology in flags.topologies.split(","):
        child = [sys.executable, __file__, f"--what={flags.what}", f"--child={schedule.parse_topology(topology)[1]}"]
        done = subprocess.run(child, env=schedule.compiler_environment(), capture_output=True, text=True, check=True)
        for row in json.loads(done.stdout.splitlines()[-1]):
            print(f"| {topology} | {row} |", flush=True)


if __name__ == "__main__":
    main()
