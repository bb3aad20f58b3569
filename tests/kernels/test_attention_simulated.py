"""The kernels in JAX's TPU simulator: memory full of NaN, races looked for, one device and several."""

import jax
import numpy as np
import pytest
from attention_cases import Case, assert_close, attend, run
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.attention.blocks import BlockSizes, Cut

SMALL = BlockSizes(128, 128, 128, Cut(128, 128, 1), Cut(128, 128, 1))
SPECS = {
    "sinks": P("tensor"),
    "q_segments": P("data"),
    "kv_segments": P("data"),
    "lse": P("data", "tensor"),
    "dlse": P("data", "tensor"),
    "dsinks": P("tensor"),
}
BY_HEADS = P("data", None, "tensor")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "case"),
    [
        ((1, 1, 1), Case(B=1, T=130, S=300, K=1, H=8, HV=16, causal=False, window=(140, 20), segments=True)),
        ((2, 1, 2), Case(B=2, T=150, S=150, K=2, window=140, segments=True, sinks=True, soft_cap=3.0)),
    ],
    ids=["one_device", "batch_and_heads_on_four"],
)
def test_matches_the_reference_where_unwritten_memory_is_nan(shape, case, mesh_of, simulated_tpu):
    arrays = case.arrays()
    for name in ("q_segments", "kv_segments"):
        arrays[name] = np.sort(arrays[name], axis=1)[:, ::-1]  # documents in a row, then padding
    wanted = run(case, "reference", arrays)
    mesh = mesh_of(*shape)

    def gradients(arrays):
        inputs = {name: x for name, x in arrays.items() if name in ("q", "k", "v", "sinks")}

        def local(inputs, others):
            return attend(case, others | inputs, "pallas", 0, block_sizes=SMALL)

        def sharded(inputs):
            specs = tuple({name: SPECS.get(name, BY_HEADS) for name in group} for group in (inputs, arrays))
            return jax.shard_map(local, in_specs=specs, out_specs=(BY_HEADS, SPECS["lse"]))(inputs, arrays)

        (o, lse), vjp = jax.vjp(sharded, inputs)
        (grads,) = vjp((arrays["do"], arrays["dlse"]))
        return {"o": o, "lse": lse} | {"d" + name: x for name, x in grads.items()}

    placed = {name: jax.device_put(x, NamedSharding(mesh, SPECS.get(name, BY_HEADS))) for name, x in arrays.items()}
    with simulated_tpu():
        got = {name: np.asarray(x) for name, x in jax.jit(gradients)(placed).items()}
    assert_close(got, wanted, tolerance=5e-5)
