"""FLOPs of a traced step on one device, recomputation included: matrix products, as often as their loops run.

The compiler's own count takes a loop's body once. Products inside shard_map have one device's shapes; those outside are
taken to be split over all devices. What a Pallas kernel computes is not in its operands' types: it states it, or is
named here.
"""

import math
from collections.abc import Iterator
from typing import Any

from tpu_train.config import ModelConfig

# Products of a kernel on the scores that its mask lets through, each 2 H FLOPs a score; by the start of its name.
ATTENTION_PRODUCTS = {"flash_attention_forward": 2, "flash_attention_backward": 5}


def count(jaxpr: Any, devices: int, model: ModelConfig) -> dict[str, Any]:
    """{"xla_flops": of dot_general, "kernel_flops": of the Pallas kernels, "kernels": {name: runs}}.

    A kernel that ATTENTION_PRODUCTS does not name and that has no cost estimate makes kernel_flops None: no guess.
    """
    xla, kernel = 0.0, 0.0
    kernels: dict[str, float] = {}
    unknown = False
    for name, runs, equation, share in _walk(jaxpr, 1.0, 1.0 / devices):
        if name == "dot_general":
            xla += runs * share * _dot(equation)
            continue
        kernels[name] = kernels.get(name, 0.0) + runs
        if name in ATTENTION_PRODUCTS:
            kernel += runs * ATTENTION_PRODUCTS[name] * _scores(model, [x.aval.shape for x in equation.invars])
        elif stated := equation.params["cost_estimate"]:
            kernel += runs * stated.flops
        else:
            unknown = True
    return {"xla_flops": xla, "kernel_flops": None if unknown else kernel, "kernels": kernels}


def _walk(jaxpr: Any, runs: float, share: float) -> Iterator[tuple[str, float, Any, float]]:
    """(name, runs, the equation, share of one device) of each product and each kernel."""
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            yield name, runs, equation, share
        elif name == "pallas_call":
            yield params["name"], runs, equation, share
        else:
            times = runs * (params["length"] if name == "scan" else 1)
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


def _scores(model: ModelConfig, operands: list[tuple[int, ...]]) -> float:
    """2 H times the scores that causal masks let through, over all heads; the mean over the window pattern."""
    B, N, T, H = next(shape for shape in operands if len(shape) == 4 and shape[3] != 1)
    widths = [min(window or T, T) for window in model.window_pattern]
    seen = sum(w * (w + 1) / 2 + (T - w) * w for w in widths) / len(widths)
    return 2.0 * H * B * N * seen
