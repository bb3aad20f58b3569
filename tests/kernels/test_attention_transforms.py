"""Attention under JAX's transformations and modes: checkpoint, vmap, scan, shard_map, x64; and its memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import WAYS, Case, assert_close, attend, numpy_attention, run
from jax.sharding import PartitionSpec as P

from pallas_kernels import flash_attention
from pallas_kernels.attention import short, xla


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 4 rows, so that half a dozen rows make two."""
    monkeypatch.setattr(xla, "BLOCK", 4)
    monkeypatch.setattr(short, "CHUNK", 4)


@pytest.mark.parametrize("offset", [0, jnp.int32(0)], ids=["short", "blocked"])
def test_checkpoint_vmap_and_scan_change_nothing(offset):
    case = Case(T=6, S=6, window=4, sinks=True)
    names = ("q", "k", "v", "sinks", "do", "dlse")
    arrays = tuple(jnp.stack([jnp.asarray(case.arrays(seed)[name]) for seed in range(3)]) for name in names)

    def loss(*arrays):
        named = dict(zip(names, arrays, strict=True))
        o, lse = attend(case, named, "xla", offset)
        return jnp.sum(o * named["do"]) + jnp.sum(lse * named["dlse"])

    def scanned(*arrays):
        return jax.lax.scan(lambda total, x: (total + loss(*x), None), 0.0, arrays)[0]

    def mapped(*arrays):
        return jnp.sum(jax.vmap(jax.checkpoint(loss))(*arrays))

    one = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
    plain = [one(*(x[i] for x in arrays)) for i in range(3)]
    wanted = [jnp.stack(grads) for grads in zip(*plain, strict=True)]
    for f in (scanned, mapped):
        for name, got, right in zip(names[:4], jax.jit(jax.grad(f, (0, 1, 2, 3)))(*arrays), wanted, strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("batch_axes", "K"), [(("data", "fsdp"), 2), (("data",), 1)], ids=["all_split", "an_axis_and_the_key_head_shared"]
)
def test_shard_map_over_batch_and_heads_gives_the_same_gradients(mesh_of, batch_axes, K, way):
    case = Case(B=4, T=6, S=6, K=K, G=4 // K, segments=True, soft_cap=3.0, sinks=True)
    arrays = case.arrays()
    wanted = numpy_attention(case, arrays)
    mesh = mesh_of(2, 2, 2)
    heads, rows = P(batch_axes, None, "tensor", None), P(batch_axes, None)
    key_heads, lse = P(batch_axes, None, "tensor" if K > 1 else None, None), P(batch_axes, "tensor", None)
    specs = {"q": heads, "k": key_heads, "v": key_heads, "sinks": P("tensor")}
    specs |= {"do": heads, "dlse": lse, "q_segments": rows, "kv_segments": rows}

    def local(arrays):
        return attend(case, arrays, WAYS[way]["implementation"], jnp.int32(0) if way == "blocked" else 0)

    @jax.jit
    def both(arrays):
        inputs = {name: arrays[name] for name in ("q", "k", "v", "sinks")}
        rest = {name: arrays[name] for name in ("q_segments", "kv_segments")}
        in_specs = ({name: specs[name] for name in inputs | rest},)
        split = jax.shard_map(local, in_specs=in_specs, out_specs=(heads, lse))
        (o, lse_BNT), vjp = jax.vjp(lambda inputs: split(inputs | rest), inputs)
        return {"o": o, "lse": lse_BNT} | {"d" + name: x for name, x in vjp((arrays["do"], arrays["dlse"]))[0].items()}

    placed = {name: jax.device_put(x, jax.NamedSharding(mesh, specs[name])) for name, x in arrays.items()}
    assert_close(both(placed), wanted)


@pytest.mark.parametrize("way", WAYS)
def test_x64_mode_changes_nothing(way):
    case = Case(T=9, S=7, window=(3, 2), causal=False, segments=True, soft_cap=2.0, sinks=True, scale=np.float64(0.4))
    arrays = case.arrays()
    arrays |= {name: arrays[name].astype(np.int64) for name in ("q_segments", "kv_segments")}
    with jax.enable_x64(True):
        got = run(case, way, arrays)
    assert {x.dtype for x in got.values()} == {np.dtype(np.float32)}
    assert_close(got, numpy_attention(case, arrays))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_results_and_gradients_have_the_dtypes_of_their_arrays(dtype, way):
    q, kv, sinks = (jnp.zeros(shape, dtype) for shape in ((1, 6, 2, 4), (1, 6, 1, 4), (2,)))
    offset = jnp.int32(0) if WAYS[way].get("traced_offset") else 0

    def both(q, k, v, sinks, other_sinks):
        named = {"q": q, "k": k, "v": v, "sinks": sinks}
        o, lse = attend(Case(), named, WAYS[way]["implementation"], offset)
        also = attend(Case(), named | {"sinks": other_sinks}, WAYS[way]["implementation"], offset)[0]
        return jnp.sum(o.astype(jnp.float32)) + jnp.sum(lse) + jnp.sum(also.astype(jnp.float32)), (o, lse)

    grads, (o, lse) = jax.eval_shape(
        jax.grad(both, (0, 1, 2, 3, 4), has_aux=True), q, kv, kv, sinks, sinks.astype(jnp.float32)
    )
    assert (o.dtype, lse.dtype, lse.shape) == (dtype, jnp.float32, (1, 2, 6))
    assert [x.dtype for x in grads] == [dtype] * 4 + [jnp.float32]


def test_memory_grows_linearly_with_the_sequence(monkeypatch):
    monkeypatch.undo()

    def temporary_bytes(T):
        q, kv = (jax.ShapeDtypeStruct((1, T, heads, 8), jnp.float32) for heads in (2, 1))
        loss = lambda q, k, v: jnp.sum(flash_attention(q, k, v))  # noqa: E731
        analysis = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, kv, kv).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    small, large = temporary_bytes(2048), temporary_bytes(4096)
    assert 0 < large < 2.6 * small
    assert large < 4096 * 4096 * 4  # one head's float32 scores
