"""FLOPs of a traced step on one device, recomputation included: matrix products, as often as their loops run.

The compiler's own count takes a loop's body once. Products inside shard_map have one device's shapes; those outside are
taken to be split over all devices. What a Pallas kernel computes is not in its operands' types: it states it, or is
named here.
"""

import math
from collections.abc import Iterator
from typing import Any

from tpu_train.config import ModelConfig, UserError
from tpu_train.flops import keys_seen

# Products of a kernel on the scores that its mask lets through, each 2 H FLOPs a score; named "_whole", on all scores.
ATTENTION_PRODUCTS = {"flash_attention_forward": 2, "flash_attention_backward": 5}
# The same by cuDNN on NVIDIA cards, whose operands are [B, T, N, H]: JAX's name for its calls, and ours.
CUDNN = {
    "dot_product_attention_fwd_wrapper": "cudnn_attention_forward",
    "dot_product_attention_bwd_wrapper": "cudnn_attention_backward",
}


def count(jaxpr: Any, devices: int, model: ModelConfig, rows_filled: float = 1.0) -> dict[str, Any]:
    """{"xla_flops": of dot_general, "kernel_flops": of the Pallas kernels, "kernels": {name: runs}, "flops_by_kernel"}.

    `rows_filled`: of the rows that a grouped product has room for, how many come on average. A kernel that
    ATTENTION_PRODUCTS does not name and that has no cost estimate has None, and makes kernel_flops None: no guess.
    Raises UserError where experts' products are loops of XLA's.
    """
    xla = 0.0
    kernels: dict[str, float] = {}
    by_kernel: dict[str, float | None] = {}
    for name, runs, equation, share in _walk(jaxpr, 1.0, 1.0 / devices):
        if name == "dot_general":
            xla += runs * share * _dot(equation)
            continue
        kernels[name] = kernels.get(name, 0.0) + runs
        before, one = by_kernel.get(name, 0.0), _kernel(equation, name, model, rows_filled)
        by_kernel[name] = None if before is None or one is None else before + runs * one
    if model.num_experts and not any(name.startswith("grouped_matmul") for name in kernels):
        raise UserError(
            "the experts' products are XLA's loops over as many rows as come, which compile can't count; set "
            "run.implementation=auto, and 128 tokens or more a device"
        )
    known = [flops for flops in by_kernel.values() if flops is not None]
    total = sum(known) if len(known) == len(by_kernel) else None
    return {"xla_flops": xla, "kernel_flops": total, "kernels": kernels, "flops_by_kernel": by_kernel}


def _kernel(equation: Any, name: str, model: ModelConfig, rows_filled: float) -> float | None:
    """Of one run."""
    if name in CUDNN.values():
        heads = [x.aval.shape for x in equation.invars[:3]]
        return ATTENTION_PRODUCTS[name.replace("cudnn", "flash")] * _scores(
            model, [(B, N, H, T) for B, T, N, H in heads], False
        )
    products = ATTENTION_PRODUCTS.get(name.removesuffix("_whole"))
    if products is not None:
        return products * _scores(model, [x.aval.shape for x in equation.invars], name.endswith("_whole"))
    stated = equation.params["cost_estimate"]
    return stated.flops * (rows_filled if name.startswith("grouped_matmul") else 1.0) if stated else None


def _walk(jaxpr: Any, runs: float, share: float) -> Iterator[tuple[str, float, Any, float]]:
    """(name, runs, the equation, share of one device) of each product and each kernel."""
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            yield name, runs, equation, share
        elif name == "pallas_call":
            yield params["name"], runs, equation, share
        elif name in CUDNN:
            yield CUDNN[name], runs, equation, share
        else:
            times = runs * (params["length"] if name == "scan" else 1)
            if name == "cond":  # a device takes one of them, and which differs between devices
                times /= len(params["branches"])
            for inner in _inner(params):
                yield from _walk(inner, times, 1.0 if name == "shard_map" else share)


def _inner(params: dict[str, Any]) -> list[Any]:
    """The jaxprs among an equation's parameters: a body, or each side of a conditional."""
    values = [one for value in params.values() for one in (value if isinstance(value, tuple | list) else [value])]
    open_ones = [getattr(value, "jaxpr", value) for value in values]
    return [value for value in open_ones if hasattr(value, "eqns")]


def _dot(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    depth = math.prod(equation.invars[0].aval.shape[dim] for dim in contracted)
    return 2.0 * depth * math.prod(equation.outvars[0].aval.shape)


def _scores(model: ModelConfig, operands: list[tuple[int, ...]], whole: bool) -> float:
    """2 H times the scores of all heads: `whole` all, else what causal masks let through, as the window pattern has it.

    Of the operands with four dims the first is q [B, N, H, T] and the last is v [B, K, HV, S]. Fewer
    queries than keys are a part of the row, as far as all parts together are concerned with as many keys each.
    """
    heads = [shape for shape in operands if len(shape) == 4]
    (B, N, H, T), S = heads[0], heads[-1][3]
    seen = sum(keys_seen(S, window) for window in model.window_pattern) / len(model.window_pattern)
    return 2.0 * H * B * N * T * (S if whole else seen)
