"""Rotary positions (Su et al., arXiv:2104.09864), in the half-split layout of Llama: pairs are (x[h], x[h + H/2])."""

import jax
import jax.numpy as jnp


@jax.named_scope("rope")
def apply_rope(x_BTNH: jax.Array, cos_BTR: jax.Array, sin_BTR: jax.Array) -> jax.Array:
    """`x_BTNH` with its R = H/2 pairs turned by their angles, in float32; x's dtype out. Angles have no gradient."""
    cos, sin = (jax.lax.stop_gradient(angle)[:, :, None, :] for angle in (cos_BTR, sin_BTR))
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate(turn(first, second, cos, sin), axis=-1).astype(x_BTNH.dtype)


def turn(first, second, cos, sin):
    """Both halves of the pairs, turned; with -sin, turned back."""
    return first * cos - second * sin, second * cos + first * sin


def check(rotary, q_BTNH, k_BSKH) -> None:
    """Raises ValueError for angles that don't fit q and k."""
    B, T, _, H = q_BTNH.shape
    cos, sin = rotary
    if H % 2 or cos.shape != (B, T, H // 2) or sin.shape != cos.shape or k_BSKH.shape[1] != T:
        raise ValueError(
            f"flash_attention: rotary cos {cos.shape} and sin {sin.shape} should be [B, T, H / 2] of q {q_BTNH.shape}, "
            f"and k {k_BSKH.shape} should have q's T; turn q and k with apply_rope where they have not"
        )
    if cos.dtype != jnp.float32 or sin.dtype != jnp.float32:
        raise ValueError(f"flash_attention: rotary cos and sin should be float32; got {cos.dtype} and {sin.dtype}")
