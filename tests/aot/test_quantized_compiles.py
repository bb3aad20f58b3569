"""The kernel for operands of eight bits on the real TPU compiler, for every generation, and what it is predicted to
take."""

import pytest

from pallas_kernels import schedule
from pallas_kernels.matmul.blocks import RATES
from pallas_kernels.quantized_matmul.cases import held, trained

pytestmark = pytest.mark.aot

TOPOLOGIES = {"v4": "v4:1x1x1", "v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1"}
T, D, F = 40, 4096, 14336


@pytest.mark.slow
def test_real_sizes_compile_and_wait_for_hbm_alone():
    """A product of few rows takes as long as HBM gives its weights, of eight bits, and so half as long as of bf16."""
    cases = [(held(T, D, F), name) for name in TOPOLOGIES]
    cases += [(held(T, D, F, block=128), "v5e"), (held(T, D, F, dtype="float8_e4m3fn"), "v6e")]
    cases += [(trained(300, 200, 260), "v5e"), (trained(300, 200, 260, "float8"), "tpu7x")]
    reports = schedule.measure_all([case.job(TOPOLOGIES[name]) for case, name in cases])
    for (case, name), report in zip(cases, reports, strict=True):
        assert not isinstance(report, schedule.ScheduleError), f"{case.name} on {name}: {report}"
        # v4 widens int8 slowly (ops takes XLA's product there), and v6e float8.
        if "held" in case.name and name != "v4" and "float8" not in case.name:
            rate, per_byte, cores = RATES[name]
            assert report.cycles < 1.2 * D * F * per_byte / rate / cores, f"{case.name} on {name}"
            # XLA adds nothing around it.
            assert not report.xla_cycles
