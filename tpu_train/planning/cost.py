"""Chip-hours, energy and money of a token budget, and what the compute could buy."""

import dataclasses
import math

from tpu_train.chips import Fleet
from tpu_train.config import ModelConfig, UserError
from tpu_train.flops import active_params
from tpu_train.planning.roofline import Step

# What Llama 3 reached in bfloat16 on 8,192 to 16,384 H100: 38 to 43 % (arXiv:2407.21783, table 4).
USUAL_MFU = 0.4
TOKENS_PER_PARAM = 20  # arXiv:2203.15556 (Hoffmann et al. 2022), table 3: a hint, fitted on models to 16B parameters


@dataclasses.dataclass(frozen=True)
class Cost:
    """A run of `tokens` at `mfu`. Energy (kWh) is the chips' alone: hosts, network and cooling come on top."""

    tokens: float
    mfu: float
    flops: float
    hours: float
    chip_hours: float
    kwh: float | None
    usd: float | None


def cost(
    step: Step, fleet: Fleet, flops_per_token: float, tokens: float, mfu: float, watts: float | None, usd: float | None
) -> Cost:
    """`watts` and `usd` are of one chip (and hour); None is unknown. The MFU is never more than the roofline allows.

    Raises UserError on numbers out of range.
    """
    for name, value, most in (("mfu", mfu, 1.0), ("tokens", tokens, math.inf)):
        if not 0 < value <= most or not math.isfinite(value):
            raise UserError(f"--{name}={value:g} must be above 0" + (" and at most 1" if most == 1 else ""))
    for name, given in (("watts", watts), ("price", usd)):
        if given is not None and not (0 <= given < math.inf):
            raise UserError(f"--{name}={given:g} must be 0 or more")
    mfu = min(mfu, step.most_mfu)
    flops = tokens * flops_per_token
    hours = flops / (step.peak * fleet.devices * mfu) / 3600
    chip_hours = hours * fleet.chips
    kwh = None if watts is None else chip_hours * watts / 1000
    return Cost(tokens, mfu, flops, hours, chip_hours, kwh, None if usd is None else chip_hours * usd)


@dataclasses.dataclass(frozen=True)
class Optimal:
    """Hints of arXiv:2203.15556: `tokens` for this model, and for the run's compute the best `params` (6 N D FLOPs)."""

    tokens: float
    params: float


def optimal(model: ModelConfig, tokens: float) -> Optimal:
    """With D = 20 N and C = 6 N D, as many FLOPs as `tokens` on this model buy N = sqrt(C / 120) parameters.

    Of a mixture of experts the active ones count: the fit was on dense models.
    """
    size = active_params(model)
    return Optimal(TOKENS_PER_PARAM * size, math.sqrt(size * tokens / TOKENS_PER_PARAM))
