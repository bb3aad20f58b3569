"""What attention refuses: arguments that do not fit together, and what cuDNN's implementation can't honour."""

from typing import Any

import jax.numpy as jnp
import pytest

from pallas_kernels import flash_attention
from pallas_kernels.attention.mask import Mask
from pallas_kernels.attention.xla import cudnn_can_run


def good_arguments() -> dict[str, Any]:
    q, kv, ids = jnp.zeros((2, 4, 4, 8)), jnp.zeros((2, 6, 2, 8)), jnp.ones((2, 6), jnp.int32)
    return {"q_BTNH": q, "k_BSKH": kv, "v_BSKH": kv, "q_segment_ids_BT": ids[:, :4], "kv_segment_ids_BS": ids}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_BTNH": jnp.zeros((4, 4, 8))}, "takes q_BTNH, k_BSKH, v_BSKH; got shapes"),
        ({"k_BSKH": jnp.zeros((6, 2, 8))}, "takes q_BTNH, k_BSKH, v_BSKH; got shapes"),
        ({"v_BSKH": jnp.zeros((2, 6, 2))}, "takes q_BTNH, k_BSKH, v_BSKH; got shapes"),
        ({"k_BSKH": jnp.zeros((3, 6, 2, 8))}, "do not fit q"),
        ({"k_BSKH": jnp.zeros((2, 6, 2, 4))}, "do not fit q"),
        ({"v_BSKH": jnp.zeros((2, 5, 2, 8))}, "do not fit q"),
        ({"v_BSKH": jnp.zeros((2, 6, 1, 8))}, "do not fit q"),
        (
            {"k_BSKH": jnp.zeros((2, 6, 3, 8)), "v_BSKH": jnp.zeros((2, 6, 3, 8))},
            "4 query heads are not a multiple of 3",
        ),
        (
            {"v_BSKH": jnp.zeros((2, 6, 2, 8), jnp.bfloat16)},
            "one dtype, float32, bfloat16 or float16; got float32, float32, bfloat16",
        ),
        (
            {name: jnp.zeros((2, 4, 2, 8), int) for name in ("q_BTNH", "k_BSKH", "v_BSKH")},
            "one dtype, float32, bfloat16 or float16; got int",
        ),
        ({"q_segment_ids_BT": None}, "segment ids of both the queries and the keys, or of neither"),
        ({"kv_segment_ids_BS": None}, "segment ids of both the queries and the keys, or of neither"),
        ({"q_segment_ids_BT": jnp.ones((2, 6), jnp.int32)}, r"should be \(2, 4\) and \(2, 6\)"),
        ({"kv_segment_ids_BS": jnp.ones((2, 4), jnp.int32)}, r"should be \(2, 4\) and \(2, 6\)"),
        ({"window": 0}, "window=0; it must be None, an int of at least 1"),
        ({"window": -3}, "window=-3; it must be None, an int of at least 1"),
        ({"logit_soft_cap": 0.0}, "logit_soft_cap=0.0; it must be above 0"),
        ({"logit_soft_cap": -1.0}, "logit_soft_cap=-1.0; it must be above 0"),
        ({"implementation": "flash"}, "no implementation 'flash'; it has reference, xla, cudnn"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes, message):
    arguments = good_arguments()
    assert flash_attention(**arguments).shape == (2, 4, 4, 8)
    with pytest.raises(ValueError, match=message):
        flash_attention(**(arguments | changes))


@pytest.mark.parametrize(
    ("dtype", "width", "options", "reason"),
    [
        (jnp.float32, 64, {}, "float32"),
        (jnp.bfloat16, 36, {}, "head dims 36 and 36"),
        (jnp.bfloat16, 256, {}, "head dims 256 and 256"),
        (jnp.bfloat16, 64, {"logit_soft_cap": 30.0}, "a logit soft cap"),
        (jnp.bfloat16, 64, {"q_offset": 1}, "a query offset"),
        (jnp.bfloat16, 64, {"q_offset": jnp.int32(0)}, "a query offset"),
        (jnp.bfloat16, 64, {"window": 2, "causal": False}, "a window without a causal mask"),
        (jnp.bfloat16, 64, {"segments": True}, "segment ids"),
    ],
)
def test_cudnn_refuses_what_it_cannot_honour(dtype, width, options, reason):
    x, ids = jnp.zeros((2, 4, 2, width), dtype), jnp.ones((2, 4), jnp.int32)
    options = dict(options)
    if options.pop("segments", False):
        options |= {"q_segment_ids_BT": ids, "kv_segment_ids_BS": ids}
    with pytest.raises(ValueError, match=f"cudnn can't take .*{reason}.*use implementation='xla'"):
        flash_attention(x, x, x, **options, implementation="cudnn")


def test_cudnn_refuses_values_of_another_width_and_keys_of_another_length():
    q, v, k = (jnp.zeros(shape, jnp.bfloat16) for shape in ((2, 4, 2, 64), (2, 4, 2, 32), (2, 6, 2, 64)))
    for keys, values, reason in ((q, v, "head dims 64 and 32"), (k, k, "4 queries with . keys")):
        with pytest.raises(ValueError, match=reason):
            flash_attention(q, keys, values, implementation="cudnn")


def test_cudnn_finds_nothing_wrong_with_what_it_can_run():
    x = jnp.zeros((2, 4, 2, 64), jnp.bfloat16)
    for mask in (Mask(None, 0), Mask(2, 0), Mask(None, None)):
        assert cudnn_can_run(x, x, x, None, 0, mask, None) == ""
