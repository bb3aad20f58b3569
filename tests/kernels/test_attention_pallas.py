"""The Pallas kernels, interpreted, over several blocks and parts; what they refuse."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, assert_close, attend, run
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from pallas_kernels import flash_attention
from pallas_kernels.attention import blocks
from pallas_kernels.attention.blocks import BlockSizes, Cut
from pallas_kernels.attention.mask import Mask
from pallas_kernels.attention.rotary import apply_rope
from pallas_kernels.attention.visits import Visits
from pallas_kernels.runtime import CHIPS

SMALL = BlockSizes(128, 128, 128, Cut(128, 128, 1), Cut(128, 128, 1))  # parts of one block, one task a pair
TASKS = BlockSizes(256, 256, 256, Cut(128, 128, 2), Cut(128, 128, 1))  # four tasks a pair
UNEVEN = BlockSizes(128, 256, 512, Cut(128, 128, 1), Cut(128, 256, 0))


@pytest.fixture
def value_and_grads(mesh_of):
    """What `attention_cases.run` returns, from the interpreted kernels with block sizes of our own."""
    mesh = mesh_of(1, 1, 1)

    def compute(case: Case, arrays, q_offset, block_sizes):
        how = {"block_sizes": block_sizes}

        @jax.jit
        @functools.partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P())
        def go(arrays, traced_offset):
            how["q_offset"] = q_offset if traced_offset is None else traced_offset
            inputs = {name: x for name, x in arrays.items() if name in ("q", "k", "v", "sinks")}
            (o, lse), vjp = jax.vjp(lambda inputs: attend(case, arrays | inputs, "interpret", **how), inputs)
            (grads,) = vjp((arrays["do"], arrays["dlse"]))
            return {"o": o, "lse": lse} | {"d" + name: x for name, x in grads.items()}

        return {name: np.asarray(x) for name, x in go(arrays, None if isinstance(q_offset, int) else q_offset).items()}

    return compute


CASES = {
    "causal": (Case(B=1, T=600, S=600, K=1, G=1), TASKS),
    "causal_in_one_block": (Case(B=1, T=200, S=200, K=1), None),
    "causal_uneven_blocks": (Case(B=1, T=520, S=600, K=1, G=1, q_offset=70), UNEVEN),
    "full_with_a_tail": (Case(B=1, T=300, S=300, K=1, causal=False, HV=16), SMALL),
    "window": (Case(B=1, T=400, S=400, K=1, window=100), SMALL),
    "window_of_blocks": (Case(B=1, T=400, S=400, K=1, window=129), SMALL),
    "window_both_ways": (Case(B=1, T=300, S=300, K=1, causal=False, window=(150, 20)), UNEVEN),
    "looks_ahead_only": (Case(B=1, T=300, S=520, K=1, causal=False, window=(0, None)), SMALL),
    "queries_past_the_keys": (Case(B=1, T=300, S=300, K=1, window=64, q_offset=290), SMALL),
    "queries_before_the_keys": (Case(B=1, T=300, S=300, K=1, q_offset=-200), SMALL),
    "rotary": (Case(B=2, T=300, S=300, K=1, G=2, H=32, HV=16, rotary=True, segments=True, sinks=True), SMALL),
    "rotary_in_one_part": (Case(B=1, T=300, S=300, K=2, G=2, H=64, rotary=True, soft_cap=2.0), UNEVEN),
    "rotary_of_halves_that_fill_no_tile": (Case(B=1, T=200, S=200, K=1, H=20, rotary=True), SMALL),
    "sinks_and_cap": (Case(B=1, T=300, S=300, K=2, sinks=True, soft_cap=2.0), SMALL),
}


@pytest.mark.parametrize("name", CASES)
def test_many_blocks_match_the_reference(name, value_and_grads):
    case, sizes = CASES[name]
    arrays = case.arrays()
    got = value_and_grads(case, arrays, q_offset=case.q_offset, block_sizes=sizes)
    assert_close(got, run(case, "reference", arrays), tolerance=5e-5)


def test_an_offset_known_at_run_time_matches_the_reference(value_and_grads):
    case = Case(B=1, T=300, S=520, K=1, window=200)
    arrays = case.arrays()
    for offset in (-130, 91):
        got = value_and_grads(case, arrays, q_offset=jnp.int32(offset), block_sizes=SMALL)
        wanted = run(dataclasses.replace(case, q_offset=offset), "reference", arrays)
        assert_close(got, wanted, tolerance=5e-5)


@pytest.mark.parametrize("window", [None, 150])
def test_packed_documents_match_the_reference(window, value_and_grads):
    case = Case(B=2, T=300, S=300, K=1, G=1, segments=True, window=window)
    arrays = case.arrays()
    ids = np.sort(np.random.default_rng(1).integers(1, 5, (2, 300)), axis=1).astype(np.int32)
    ids[0, 140:], ids[1, 270:] = 9, 0  # a block of one segment; padding at the end
    arrays["q_segments"] = arrays["kv_segments"] = ids
    got = value_and_grads(case, arrays, q_offset=0, block_sizes=SMALL)
    assert_close(got, run(case, "reference", arrays), tolerance=5e-5)


def test_rows_that_see_nothing_pass_nothing_whatever_their_cotangents(value_and_grads):
    case = Case(B=1, T=300, S=300, K=1, segments=True, sinks=True)
    arrays = case.arrays()
    ids = np.ones((1, 300), np.int32)
    ids[0, :20], ids[0, 128:256], ids[0, 290:] = 0, -1, 0
    arrays["q_segments"] = arrays["kv_segments"] = ids
    wanted = run(case, "reference", arrays)
    blind = ids[0] <= 0
    arrays["k"][:, blind], arrays["v"][:, blind], arrays["q"][:, blind] = -1e15, 1e15, 1e15
    arrays["do"][:, blind], arrays["dlse"][:, :, blind] = np.inf, np.nan
    got = value_and_grads(case, arrays, q_offset=0, block_sizes=SMALL)
    for name in ("o", "dq", "dk", "dv"):
        np.testing.assert_array_equal(got[name][:, blind], 0.0, err_msg=name)
    assert np.isneginf(got["lse"][:, :, blind]).all()
    assert_close(got, wanted, tolerance=5e-5)


def test_any_lengths_and_masks_match_the_reference(value_and_grads):
    @given(
        st.integers(1, 400), st.integers(1, 400), st.booleans(), st.none() | st.integers(1, 400), st.integers(-200, 400)
    )
    @settings(max_examples=4, deadline=None)
    def check(T, S, causal, window, q_offset):
        case = Case(B=1, T=T, S=S, K=1, G=1, causal=causal, window=window, q_offset=q_offset)
        arrays = case.arrays()
        got = value_and_grads(case, arrays, q_offset=q_offset, block_sizes=SMALL)
        assert_close(got, run(case, "reference", arrays), tolerance=5e-5)

    check()


@given(
    left=st.none() | st.integers(0, 900),
    right=st.none() | st.integers(0, 900),
    offset=st.integers(-700, 900),
    num_queries=st.integers(1, 900),
    num_keys=st.integers(1, 900),
    block_q=st.sampled_from([128, 256, 384]),
    block_k=st.sampled_from([128, 256, 384]),
    known=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_every_visible_pair_has_a_body_that_masks_it(
    left, right, offset, num_queries, num_keys, block_q, block_k, known
):
    mask = Mask(left, right)
    visits = Visits(mask, num_queries, num_keys, block_q, block_k, offset if known else None, segmented=False)
    for i in range(-(-num_queries // block_q)):
        low, high = (int(x) for x in visits.key_blocks(jnp.int32(i), jnp.int32(offset)))
        t = offset + np.arange(i * block_q, min((i + 1) * block_q, num_queries))[:, None]
        for j in range(-(-num_keys // block_k)):
            seen = mask.visible(t, np.arange(j * block_k, min((j + 1) * block_k, num_keys))[None, :])
            if not low <= j < high:
                assert not seen.any()
                continue
            delta = offset + i * block_q - j * block_k
            padded = (j + 1) * block_k > num_keys
            if visits.whole(delta) and not (visits.tail and padded):
                assert seen.all()
            else:
                assert visits.tail or visits.deltas is None or delta in visits.deltas


def test_bfloat16_errs_at_most_twice_as_much_as_plain_jax(value_and_grads):
    case = Case(B=1, T=300, S=300, K=1, G=2, H=64, HV=64, rotary=True)
    arrays = case.arrays()
    angles = {name: jnp.asarray(arrays[name]) for name in ("cos", "sin")}
    half = {name: jnp.asarray(arrays[name], jnp.bfloat16) for name in ("q", "k", "v", "do")}
    half |= angles | {"dlse": jnp.zeros((1, 2, 300))}
    truth = run(case, "reference", {name: x.astype(jnp.float32) for name, x in half.items()})
    ours = value_and_grads(case, half, q_offset=0, block_sizes=SMALL)

    @jax.jit
    def plainly(q, k, v, do):
        def attend(q, k, v):
            q, k = (apply_rope(x, *angles.values()) for x in (q, k))
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")

        o, vjp = jax.vjp(attend, q, k, v)
        return dict(zip(("o", "dq", "dk", "dv"), (o, *vjp(do)), strict=True))

    for name, plain in plainly(*(half[x] for x in ("q", "k", "v", "do"))).items():
        errors = [np.sqrt(np.mean((np.asarray(x, np.float64) - truth[name]) ** 2)) for x in (ours[name], plain)]
        assert errors[0] <= 2 * errors[1], name


def test_a_million_tokens_plan_at_once_and_hold_few_bodies():
    visits = Visits(Mask(None, 0), 2**20, 2**20, 1024, 1024, 0, segmented=False)
    assert visits.deltas == (0,)
    sizes = blocks.choose(2**20, 2**20, 128, 128, 2, CHIPS["v5e"])
    assert blocks.fits(sizes, 128, 128, 2, CHIPS["v5e"])
    assert 2**13 <= sizes.resident < 2**20


@pytest.mark.parametrize(
    ("chip", "length", "head_dim"), list(itertools.product(CHIPS, (1, 100, 1000, 8192, 131072), (64, 128, 256)))
)
def test_chosen_sizes_fit_the_chip(chip, length, head_dim):
    sizes = blocks.choose(length, length, head_dim, head_dim, 2, CHIPS[chip])
    blocks.check(sizes, head_dim, head_dim, 2, CHIPS[chip])
    assert blocks.vmem_limit(sizes, head_dim, head_dim, 2, CHIPS[chip]) < CHIPS[chip].vmem_bytes


def test_sizes_that_do_not_fit_name_the_limit_and_some_that_do():
    sizes = BlockSizes(1024, 1024, 2**20, Cut(256, 256, 1), Cut(256, 256, 1))
    with pytest.raises(ValueError, match=r"MiB of VMEM; v5e has 108\.8 MiB for them; q=1024, k=1024, resident=\d+ fit"):
        blocks.check(sizes, 128, 128, 2, CHIPS["v5e"])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dataclasses.replace(SMALL, q=200), "multiples of 128"),
        (dataclasses.replace(SMALL, resident=300), "resident one of k"),
        (dataclasses.replace(SMALL, forward=Cut(512, 128, 1)), "does not divide a block of 128 queries by 128 keys"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        blocks.check(sizes, 8, 8, 4, None)


def test_what_pallas_cannot_take_is_refused(mesh_of):
    half, wide = jnp.zeros((1, 8, 1, 8), jnp.float16), jnp.zeros((1, 8, 1, 264))
    mesh = mesh_of(1, 1, 1)
    attend = functools.partial(flash_attention, implementation="interpret")
    inside = jax.shard_map(attend, mesh=mesh, in_specs=P(), out_specs=P())
    with pytest.raises(ValueError, match="pallas can't take float16"):
        inside(half, half, half)
    with pytest.raises(ValueError, match="pallas can't take head dims 264 and 264, the most is 256"):
        inside(wide, wide, wide)
    mesh_of(8, 1, 1)
    with pytest.raises(ValueError, match=r"under a mesh with Explicit axes pallas runs inside jax\.shard_map only"):
        attend(wide, wide, wide)
    with pytest.raises(ValueError, match="xla takes no block_sizes"):
        flash_attention(wide, wide, wide, block_sizes=SMALL, implementation="xla")
