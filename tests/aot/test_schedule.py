"""The schedule reader on a matmul whose answer is known, on the real TPU compiler; needs libtpu, not a TPU."""

import functools
import json
import re

import jax.numpy as jnp
import matmul_cases
import pytest

from pallas_kernels import schedule, schedule_dump
from pallas_kernels.schedule import Job, ScheduleError

pytestmark = pytest.mark.aot

STEPS, BLOCKS = 16, 4


@pytest.fixture(scope="module")
def measured():
    """Everything that is compiled here but for bad topologies, in one process: to start it takes seconds."""
    (case,) = matmul_cases.cases()
    small = functools.partial(case.fn, vmem_limit_bytes=2 << 20)
    jobs = {
        "stated": case.job("v5e"),
        "bare": Job(case.fn, case.args),
        "vmem": Job(small, case.args),
        "more vmem": Job(functools.partial(case.fn, vmem_limit_bytes=96 << 20), case.args),
        "wrong kernel": Job(case.fn, case.args, counts={"no_kernel": {}}),
        "wrong region": Job(case.fn, case.args, counts={"matmul_kernel": {"grid/when9": 3}}),
        "no topology": Job(case.fn, case.args, "v5e:3x5"),
        **{generation: case.job(generation) for generation in ("v4", "v5p", "v6e", "7x")},
    }
    return dict(zip(jobs, schedule.measure_all(list(jobs.values())), strict=True))


def test_regions_of_a_matmul_are_its_grid_its_product_and_its_two_whens(measured):
    (kernel,) = measured["stated"].kernels
    assert (kernel.name, kernel.steps) == ("matmul_kernel", STEPS)
    runs = {region.name: region.runs for region in kernel.regions}
    assert runs == {
        "top": 1,
        "grid": STEPS,
        "grid/when1": STEPS,
        "grid/when1/when1": BLOCKS,
        "grid/when1/when2": BLOCKS,
    }
    product = kernel.region("grid/when1")
    assert sum(region.matmuls for region in kernel.regions) == product.matmuls
    # A block's accumulator is 512 x 512 float32: 256 registers of 8 x 128, and one store a bundle on v5e.
    zeroing = kernel.region("grid/when1/when1")
    assert zeroing.slots["store"] == 256
    assert 256 <= zeroing.bundles < 270


def test_mxu_occupancy_of_a_block_is_its_flops_over_the_peak(measured):
    report = measured["stated"]
    product = report.kernels[0].region("grid/when1")
    assert product.mxu_cycles == 2 * 512**3 // report.core.peak_bf16_flops == 2048
    assert product.matmuls == 512 * 512 * 512 // (16 * 128 * 128)
    assert 0 < product.idle < product.bundles / 4
    assert product.cycles == max(product.bundles, 2048)


def test_total_is_the_sum_over_regions_of_runs_times_cycles(measured):
    (kernel,) = measured["stated"].kernels
    by_hand = sum(region.runs * max(region.bundles, region.mxu_cycles) for region in kernel.regions)
    assert measured["stated"].cycles == kernel.cycles == by_hand
    assert 2048 * STEPS < by_hand < 1.2 * 2048 * STEPS
    assert measured["stated"].peak_share == pytest.approx(2048 * STEPS / by_hand)


def test_without_counts_all_but_the_top_runs_once_a_grid_step(measured):
    (kernel,) = measured["bare"].kernels
    assert {region.runs for region in kernel.regions if region.name != "top"} == {STEPS}


def test_vmem_copies_and_hbm_are_those_of_the_blocks(measured):
    report = measured["stated"]
    (kernel,) = report.kernels
    block = 512 * 512
    windows = 2 * 2 * block * 3 + 4 * block  # three windows of bf16, each twice, and the accumulator
    assert windows <= kernel.vmem_bytes < windows + 2**16
    assert (kernel.vmem_limit_bytes, kernel.vmem_capacity_bytes) == (16 << 20, 128 << 20)
    assert measured["more vmem"].kernels[0].vmem_limit_bytes == 96 << 20
    assert kernel.region("grid").dma_bytes == 2 * 2 * block
    operands = 2 * (1024 * 2048 * 2 + 1024 * 1024)
    assert report.bytes_accessed == operands
    assert report.hbm_bytes == operands


def test_a_kernel_that_does_not_fit_is_refused_in_one_line(measured):
    error = measured["vmem"]
    assert isinstance(error, ScheduleError)
    assert re.fullmatch(
        r"the compiler for v5e:1x1 refuses it: out of scoped VMEM: Scoped allocation with size 4\.\d+M and limit 2\.00M"
        r" exceeded scoped vmem limit by \S+",
        str(error),
    )


def test_counts_of_what_is_not_there_are_refused(measured):
    assert str(measured["wrong kernel"]) == "counts for a kernel 'no_kernel', but the program has matmul_kernel"
    assert "matmul_kernel has no region 'grid/when9'; it has top, grid, grid/when1," in str(measured["wrong region"])


def test_table_and_json_say_the_same(measured):
    report = measured["stated"]
    table, plain = report.table(), json.loads(json.dumps(report.as_dict()))
    assert f"matmul_kernel on v5e:1x1: {report.cycles:,.0f} predicted cycles" in table
    assert plain["cycles"] == report.cycles
    regions = {region["name"]: region for region in plain["kernels"][0]["regions"]}
    assert regions["grid/when1/when1"]["slots"]["store"] == 256
    assert [region["name"] for region in plain["kernels"][0]["regions"]][-1] in table
    assert plain["versions"]["libtpu"] in table


@pytest.mark.parametrize("topology", ["v4", "v5p", "v6e", "7x"])
def test_other_generations_are_read_too(measured, topology):
    report = measured[topology]
    (kernel,) = report.kernels
    busiest = max(kernel.regions, key=lambda region: region.mxu_cycles)
    assert busiest.mxu_cycles == 2 * 512**3 // report.core.peak_bf16_flops
    assert busiest.runs == STEPS


def test_unknown_topology_names_those_that_exist(measured):
    assert str(measured["no topology"]).startswith("no topology 'v5e:3x5': ")
    with pytest.raises(ScheduleError, match="no TPU generation 'v9'; there are v4, v5e, v5p, v6e, tpu7x"):
        schedule.measure(lambda x: x, jnp.zeros(8), topology="v9:1x1")


def test_accepted_spellings():
    names = {text: schedule.parse_topology(text)[1] for text in ("7x:1x1", "7x", "TPU7x:2x2x1", "v5e", "v5litepod:2x2")}
    assert list(names.values()) == ["tpu7x:1x1", "tpu7x:1x1", "tpu7x:2x2x1", "v5e:1x1", "v5e:2x2"]


def test_missing_libtpu_says_what_to_install(monkeypatch):
    monkeypatch.setattr(schedule.util, "find_spec", lambda name: None)
    with pytest.raises(ScheduleError, match="needs libtpu: pip install libtpu flatbuffers"):
        schedule.measure(lambda x: x, jnp.zeros(8))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "no regions"),
        ("$region0: #{k}\n$region2: #{k} parent=1 // pred_region", "region 2 is in a region 1 that has not begun"),
        ("$region0: #{k}\n$region2: #{k} parent=0 // loop_footer", "region 2 ends a loop that has not begun"),
    ],
)
def test_a_dump_of_another_form_is_refused_in_one_line(tmp_path, text, message):
    rows = "MATMUL, MATPUSH, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU\n" + "1 " * 11
    (tmp_path / "1-k.1-00-post-delay-converter.txt").write_text(text)
    (tmp_path / "1-k.1-01-pre-delay_hlo-static-per-bundle-utilization.txt").write_text(rows)
    with pytest.raises(schedule_dump.DumpError, match=message):
        schedule_dump.read(tmp_path, "k.1", schedule_dump.CORES["v5e"])
