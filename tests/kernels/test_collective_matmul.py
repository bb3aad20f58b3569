"""A weight's gradient scattered round a ring: every implementation beside float64, the kernel in the TPU simulator."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import gated_mlp, matmul_reduce_scatter, sharded_matmul
from pallas_kernels.collective_matmul import blocks, ring
from pallas_kernels.collective_matmul.blocks import Block, Problem
from pallas_kernels.runtime import CHIPS

RING = P("fsdp")


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 128 tokens and columns, so that small arrays take several waves and parts."""
    monkeypatch.setattr(blocks, "_choose", lambda problem, chip: Block(128, 128))


def operands(n, T, D, F, dtype=jnp.float32):
    """x, dy and a factor of n devices, T tokens each, with the sum of x^T (dy factor) in float64."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal((n * T, size)), dtype) for size in (D, F, F)]
    x, dy, factor = (np.asarray(array, np.float64) for array in arrays)
    return arrays, x.T @ dy, x.T @ np.asarray(jnp.asarray(dy * factor, dtype), np.float64)


def scattered(arrays, implementation):
    x, dy, *factor = arrays

    def local(x, dy, *factor):
        return matmul_reduce_scatter(
            x, dy, axis="fsdp", factor_TF=factor[0] if factor else None, implementation=implementation
        )

    run = jax.shard_map(local, in_specs=(RING,) * len(arrays), out_specs=RING)
    placed = (jax.reshard(array, RING) for array in (x, dy, *factor))
    return np.asarray(jax.jit(run)(*placed), np.float64)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("n", [2, 8])
def test_sum_over_the_axis_is_scattered(implementation, n, mesh_of):
    mesh_of(1, n, 1)
    arrays, plain, factored = operands(n, 6, 8 * n, 10)
    np.testing.assert_allclose(scattered(arrays[:2], implementation), plain, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(scattered(arrays, implementation), factored, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "T", "F", "factor"), [(2, 128, 256, False), (3, 128, 384, True), (4, 256, 128, True)])
def test_kernel_sends_without_races(n, T, F, factor, mesh_of, simulated_tpu, small_blocks):
    mesh_of(1, n, 1)
    arrays, plain, factored = operands(n, T, 128 * n, F)
    with simulated_tpu():
        got = scattered(arrays if factor else arrays[:2], "pallas")
    np.testing.assert_allclose(got, factored if factor else plain, rtol=1e-5, atol=2e-3)


@pytest.mark.slow
def test_neighbours_are_of_the_axis_where_the_mesh_has_others(mesh_of, simulated_tpu, small_blocks):
    mesh_of(2, 2, 1)
    arrays, *_ = operands(4, 128, 256, 128)
    rows = P(("data", "fsdp"))

    def run(implementation):
        def local(x, dy):
            return matmul_reduce_scatter(x, dy, axis="fsdp", implementation=implementation)[None]

        out_specs = P("data", "fsdp")
        placed = (jax.reshard(array, rows) for array in arrays[:2])
        return np.asarray(jax.jit(jax.shard_map(local, in_specs=(rows, rows), out_specs=out_specs))(*placed))

    wanted = run("reference")
    with simulated_tpu():
        got = run("pallas")
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=2e-3)


@pytest.mark.slow
def test_bfloat16_errs_at_most_twice_as_much_as_xla(mesh_of, simulated_tpu, small_blocks):
    mesh_of(1, 4, 1)
    arrays, plain, _ = operands(4, 128, 512, 128, jnp.bfloat16)
    with simulated_tpu():
        got = scattered(arrays[:2], "pallas")
    error, usual = (np.sqrt(np.mean((x - plain) ** 2)) for x in (got, scattered(arrays[:2], "xla")))
    assert 0 < error <= 2 * usual


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("implementation", ["reference", "xla", pytest.param("interpret", marks=pytest.mark.slow)])
def test_product_of_a_split_weight_has_the_whole_one_s_gradients(dim, implementation, mesh_of, small_blocks):
    mesh_of(1, 2, 1)
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(shape).astype(np.float32) for shape in ((256, 256), (256, 256), (256, 256)))
    spec = P(*(None,) * dim, "fsdp")

    def sharded(x, w):
        def local(x, w):
            return sharded_matmul(x, w, axis="fsdp", dim=dim, implementation=implementation)

        return jax.shard_map(local, in_specs=(RING, spec), out_specs=RING)(x, w)

    placed = jax.reshard(x, RING), jax.reshard(w, spec)
    y, vjp = jax.vjp(jax.jit(sharded), *placed)
    dx, dw = vjp(jax.reshard(dy, RING))
    for got, wanted in ((y, x @ w), (dx, dy @ w.T), (dw, x.T @ dy)):
        np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_gated_mlp_of_split_weights_has_the_whole_ones_gradients(recompute, mesh_of, simulated_tpu, small_blocks):
    mesh_of(1, 2, 1)
    rng = np.random.default_rng(0)
    x, gate, up, dh = (rng.standard_normal(shape).astype(np.float32) * 0.1 for shape in ((256, 256), *[(256, 128)] * 3))

    def both(run, specs):
        placed = [jax.reshard(array, spec) for array, spec in zip((x, gate, up), specs, strict=True)]
        h, vjp = jax.vjp(jax.jit(jax.shard_map(run, in_specs=specs, out_specs=RING)), *placed)
        return [np.asarray(value) for value in (h, *vjp(jax.reshard(dh, RING)))]

    wanted = both(lambda *arrays: gated_mlp(*arrays, implementation="reference"), (RING, P(), P()))
    with simulated_tpu():
        got = both(
            lambda *arrays: gated_mlp(*arrays, recompute=recompute, sharded_over="fsdp", implementation="pallas"),
            (RING, RING, RING),
        )
    for mine, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", range(2, 18))
def test_every_block_is_met_once_by_every_device(n, mesh_of):
    """The plan for all places on a ring of n: blocks of a device, and that a neighbour's next block is the one sent."""
    table = [[(me + step) % n for step in ring.steps(n)] for me in range(n)]
    assert all(sorted(row) == list(range(n)) for row in table)
    assert [row[-1] for row in table] == list(range(n))
    for me in range(n):
        for turn in range(n - 1):
            way = 1 if turn % 2 == 0 else -1
            last = turn + 2 >= n - (0 if (turn + 2) % 2 == turn % 2 else 1)
            there = table[(me + way) % n]
            assert table[me][turn] == (there[n - 1] if last else there[turn + 2])


@pytest.mark.parametrize("generation", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_blocks_fit_into_vmem_and_divide(generation):
    chip = CHIPS[generation]
    problem = Problem(2048, 4096, 14336, 16, 2, True)
    block = blocks.choose(problem, chip)
    assert blocks.vmem_bytes(problem, block, chip) <= blocks.SHARE * chip.vmem_bytes
    assert problem.T % block.T == problem.F % block.F == 0
    with pytest.raises(ValueError, match=r"blocks of 65536 rows need .* MiB of VMEM; .* about \d+ rows fit: more dev"):
        blocks.choose(dataclasses.replace(problem, D=65536 * 16), chip)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "palas"}, "has no implementation 'palas'; it has reference, xla, pallas, interpret"),
        ({"shapes": ((4, 6), (4, 8), (4, 8))}, "D=6 does not divide over the 4 devices of mesh axis 'fsdp'"),
        ({"shapes": ((4, 8), (2, 8), (2, 8))}, "takes x_TD and dy_TF"),
        ({"shapes": ((4, 8), (4, 8), (4, 4))}, "factor_TF float32(4, 4) should be as dy_TF, float32(4, 8)"),
        ({"dtype": jnp.int32}, "wants one dtype, float32, bfloat16 or float16; got int32 and int32"),
        ({"axis": "data"}, "the mesh axis 'data' has one device, so there is nothing to send"),
        ({"axis": "rows"}, "runs inside jax.shard_map over all mesh axes, of which 'rows' must be one"),
        ({"implementation": "pallas", "dtype": jnp.float16}, "pallas can't take float16"),
        ({"implementation": "pallas"}, "pallas wants T=4 to be a multiple of 128; use implementation='xla'"),
    ],
)
def test_refuses_in_one_line(change, message, mesh_of):
    mesh_of(1, 4, 1)
    shapes, dtype = change.get("shapes", ((4, 8), (4, 8), (4, 8))), change.get("dtype", jnp.float32)

    def local():
        x, dy, factor = (jnp.zeros(shape, dtype) for shape in shapes)
        options = {"axis": change.get("axis", "fsdp"), "implementation": change.get("implementation", "xla")}
        return matmul_reduce_scatter(x, dy, factor_TF=factor, **options)

    with pytest.raises(ValueError, match="matmul_reduce_scatter") as error:
        jax.eval_shape(jax.shard_map(local, in_specs=(), out_specs=RING))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
