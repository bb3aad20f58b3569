"""What attention refuses: arguments that do not fit together, and what cuDNN's implementation can't honour."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
        ({"q_segment_ids_BT": jnp.ones((2, 4))}, "segment ids are float32 and int32; they must be integers"),
        ({"kv_segment_ids_BS": jnp.ones((2, 6), bool)}, "segment ids are int32 and bool; they must be integers"),
        ({"k_BSKH": jnp.zeros((2, 0, 2, 8)), "v_BSKH": jnp.zeros((2, 0, 2, 8))}, "or one is empty"),
        ({"q_offset": 1.0}, "q_offset=1.0; it must be an int or an int scalar"),
        ({"q_offset": jnp.zeros(2, jnp.int32)}, "q_offset=.*; it must be an int or an int scalar"),
        ({"sinks_N": jnp.zeros(2)}, r"sinks float32\(2,\) should be \(4,\)"),
        ({"sinks_N": jnp.zeros(())}, r"sinks float32\(\) should be \(4,\)"),
        ({"sinks_N": jnp.zeros((1, 4))}, r"sinks float32\(1, 4\) should be \(4,\)"),
        ({"sinks_N": jnp.zeros(4, jnp.int32)}, r"sinks int32\(4,\) should be \(4,\), float32, bfloat16 or float16"),
        ({"sinks_N": np.zeros(4)}, r"sinks float64\(4,\) should be"),
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
    "window",
    [0, -3, True, 2.0, "4", (), (3,), (1, 2, 3), (-1, None), (0, -1), (1.0, 2), (None, False), [1, 2], np.array(3)],
    ids=str,
)
@pytest.mark.parametrize("causal", [True, False])
def test_what_is_no_window_is_refused(window, causal):
    with pytest.raises(ValueError, match=r"flash_attention: window=.*; it must be None, an int of at least 1") as error:
        flash_attention(**good_arguments(), window=window, causal=causal)
    assert "\n" not in str(error.value)


def test_a_window_counts_from_the_query_and_causal_bounds_it_on_the_right():
    assert Mask.of(False, None) == Mask(None, None)
    assert Mask.of(True, None) == Mask(None, 0)
    assert Mask.of(True, 4) == Mask.of(True, (3, None)) == Mask.of(True, (3, 9)) == Mask(3, 0)
    assert Mask.of(False, 4) == Mask.of(False, np.int32(4)) == Mask(3, 3)
    assert Mask.of(False, (None, 2)) == Mask(None, 2)


@pytest.mark.parametrize("implementation", ["reference", "xla", "cudnn"])
def test_float64_is_refused(implementation):
    with jax.enable_x64(True):
        x = jnp.zeros((2, 4, 2, 8), jnp.float64)
        with pytest.raises(ValueError, match="float32, bfloat16 or float16; got float64, float64, float64"):
            flash_attention(x, x, x, implementation=implementation)


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
        (jnp.bfloat16, 64, {"window": (2, None), "causal": False}, "a window without a causal mask"),
        (jnp.bfloat16, 64, {"window": (None, 2), "causal": False}, "a window without a causal mask"),
        (jnp.bfloat16, 64, {"sinks_N": jnp.zeros(2)}, "sinks"),
        (jnp.bfloat16, 64, {"return_lse": True}, "return_lse"),
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
    for mask in (Mask(None, 0), Mask(2, 0), Mask(0, 0), Mask(None, None)):
        assert cudnn_can_run(x, x, x, None, 0, mask, None) == ""
