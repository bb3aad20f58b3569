"""The gradient of attention through some of the keys that its queries saw, from the lse and the output of all of them.

With these the probabilities of any part of the keys are known, so parts may be taken apart and their gradients added.
"""

import jax

from pallas_kernels.attention import vjp, xla


def part_backward(q_BTNH, k_BSKH, v_BSKH, q_ids_BT, kv_ids_BS, whole, *, mask, offset, scale, soft_cap, sizes, how):
    """(dq, dk, dv) of the queries and this part of the keys, `how` being "xla", "pallas" or "interpret".

    `whole`: o_BTNH and lse_BNT of all keys, a sink's part in them, and the cotangents of both.
    """
    operands = q_BTNH, k_BSKH, v_BSKH
    if how != "xla":
        call, segments, offset_1 = vjp.prepare(
            *(*operands, q_ids_BT, kv_ids_BS, offset, mask, scale, soft_cap, sizes, how == "interpret")
        )
        return vjp.attend_backward(call, (*operands, segments, None, offset_1, None, *whole[:2]), whole[2:])[:3]
    options = xla.options_of(q_BTNH, k_BSKH, mask, scale, soft_cap)
    group = q_BTNH.shape[2] // k_BSKH.shape[2]
    (q, k, v), back = jax.vjp(lambda q, k, v: xla.laid_out(options, q, k, v, None, None)[:3], *operands)
    segments = xla.laid_out(options, *operands, q_ids_BT, kv_ids_BS)[3:]
    as_rows = lambda x_BNT: x_BNT.swapaxes(1, 2)[..., None]  # noqa: E731
    o, lse, do, dlse = (xla.query_blocks(options, x if x.ndim == 4 else as_rows(x), group) for x in whole)
    return back(xla.attend_backward(options, (q, k, v, *segments, offset, None, o, lse), (do, dlse))[:3])
