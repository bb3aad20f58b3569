"""The schedule reader on a matmul whose answer is known, on the real TPU compiler; needs libtpu, not a TPU."""

import jax
import jax.numpy as jnp
import matmul_cases
import pytest

from pallas_kernels import schedule
from pallas_kernels.schedule import Job, ScheduleError

pytestmark = pytest.mark.aot

STEPS, BLOCKS = 16, 4


@pytest.fixture(scope="module")
def v5e():
    (case,) = matmul_cases.cases()
    huge = Job(matmul_cases.too_large, (jax.ShapeDtypeStruct((1024, 1 << 17), jnp.float32),))
    bare = Job(case.fn, case.args)
    wrong_kernel = Job(case.fn, case.args, {"no_kernel": {}})
    wrong_region = Job(case.fn, case.args, {"matmul_kernel": {"loop1/when9": 3}})
    jobs = [case.job("v5e"), bare, huge, wrong_kernel, wrong_region]
    return dict(
        zip(
            ("stated", "bare", "huge", "wrong_kernel", "wrong_region"),
            schedule.measure_all(jobs, topology="v5e"),
            strict=True,
        )
    )


def test_regions_of_a_matmul_are_its_grid_its_product_and_its_two_whens(v5e):
    (kernel,) = v5e["stated"].kernels
    assert (kernel.name, kernel.steps) == ("matmul_kernel", STEPS)
    runs = {region.name: region.runs for region in kernel.regions}
    assert runs == {
        "top": 1,
        "loop1": STEPS,
        "loop1/when1": STEPS,
        "loop1/when1/when1": BLOCKS,
        "loop1/when1/when2": BLOCKS,
    }
    product = kernel.region("loop1/when1")
    assert sum(region.matmuls for region in kernel.regions) == product.matmuls
    # A block's accumulator is 512 x 512 float32: 256 registers of 8 x 128, and one store a bundle on v5e.
    zeroing = kernel.region("loop1/when1/when1")
    assert zeroing.slots["store"] == 256
    assert 256 <= zeroing.bundles < 270


def test_mxu_occupancy_of_a_block_is_its_flops_over_the_peak(v5e):
    report = v5e["stated"]
    product = report.kernels[0].region("loop1/when1")
    assert product.mxu_cycles == 2 * 512**3 // report.core.peak_bf16_flops == 2048
    assert product.matmuls == 512 * 512 * 512 // (16 * 128 * 128)
    assert product.cycles == max(product.bundles, 2048)


def test_total_is_the_sum_over_regions_of_runs_times_cycles(v5e):
    (kernel,) = v5e["stated"].kernels
    by_hand = sum(region.runs * max(region.bundles, region.mxu_cycles) for region in kernel.regions)
    assert v5e["stated"].cycles == kernel.cycles == by_hand
    assert 2048 * STEPS < by_hand < 1.2 * 2048 * STEPS
    assert v5e["stated"].peak_share == pytest.approx(2048 * STEPS / by_hand)


def test_without_counts_all_but_the_top_runs_once_a_grid_step(v5e):
    (kernel,) = v5e["bare"].kernels
    assert {region.runs for region in kernel.regions if region.name != "top"} == {STEPS}


def test_vmem_copies_and_hbm_are_those_of_the_blocks(v5e):
    report = v5e["stated"]
    (kernel,) = report.kernels
    block = 512 * 512
    windows = 2 * 2 * block * 3 + 4 * block  # three windows of bf16, each twice, and the accumulator
    assert windows <= kernel.vmem_bytes < windows + 2**16
    assert kernel.region("loop1").dma_bytes == 2 * 2 * block
    operands = 2 * (1024 * 2048 * 2 + 1024 * 1024)
    assert report.bytes_accessed == operands
    assert report.hbm_bytes == operands


def test_a_kernel_that_does_not_fit_is_refused_in_one_line(v5e):
    error = v5e["huge"]
    assert isinstance(error, ScheduleError)
    assert "vmem" in str(error).lower()
    assert "\n" not in str(error)


def test_counts_of_what_is_not_there_are_refused(v5e):
    assert str(v5e["wrong_kernel"]) == "counts for a kernel 'no_kernel', but the program has matmul_kernel"
    assert "matmul_kernel has no region 'loop1/when9'; it has top, loop1, loop1/when1," in str(v5e["wrong_region"])


def test_table_and_json_say_the_same(v5e):
    report = v5e["stated"]
    table, plain = report.table(), report.as_dict()
    assert f"matmul_kernel on v5e:1x1: {report.cycles:,.0f} predicted cycles" in table
    assert plain["cycles"] == report.cycles
    assert [region["name"] for region in plain["kernels"][0]["regions"]][-1] in table
    assert plain["versions"]["libtpu"] in table


@pytest.mark.parametrize("topology", ["v4", "v5p", "v6e", "7x"])
def test_other_generations_are_read_too(topology):
    (case,) = matmul_cases.cases()
    report = schedule.measure(case.fn, *case.args, topology=topology)
    (kernel,) = report.kernels
    busiest = max(kernel.regions, key=lambda region: region.mxu_cycles)
    assert busiest.mxu_cycles == 2 * 512**3 // report.core.peak_bf16_flops
    assert busiest.runs == STEPS


def test_unknown_topology_names_those_that_exist():
    with pytest.raises(ScheduleError, match="no TPU generation 'v9'; there are v4, v5e, v5p, v6e, tpu7x"):
        schedule.measure(lambda x: x, jnp.zeros(8), topology="v9:1x1")
    with pytest.raises(ScheduleError, match="no topology 'v5e:3x5'"):
        schedule.measure(lambda x: x, jnp.zeros(8), topology="v5e:3x5")


def test_accepted_spellings():
    names = {text: schedule.parse_topology(text)[1] for text in ("7x:1x1", "7x", "TPU7x:2x2x1", "v5e", "v5litepod:2x2")}
    assert list(names.values()) == ["tpu7x:1x1", "tpu7x:1x1", "tpu7x:2x2x1", "v5e:1x1", "v5e:2x2"]


def test_missing_libtpu_says_what_to_install(monkeypatch):
    monkeypatch.setattr(schedule.util, "find_spec", lambda name: None)
    with pytest.raises(ScheduleError, match="needs libtpu: pip install libtpu flatbuffers"):
        schedule.measure(lambda x: x, jnp.zeros(8))
