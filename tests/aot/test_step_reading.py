"""Reading a compiled module: a small one written by hand, whose every figure is worked out beside it."""

import dataclasses

import numpy as np
import pytest

from pallas_kernels import hlo_cost
from tpu_train.aot import child, collectives, kernels, memory, traffic

# A loop of 3 turns over a gather that runs beside 500 cycles of work, a reduction that nothing runs beside, and a
# slice of 1/4 of what goes round; then a fusion of 1,000 cycles. Mesh: data 2, fsdp 4.
TEXT = """\
HloModule jit_train_step, is_scheduled=true

FileNames
1 "/site-packages/jax/lib.py"
2 "/src/tpu_train/loss.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=2 function_name_id=1 line=17 end_line=17 column=1 end_column=2}
2 {file_name_id=1 function_name_id=1 line=99 end_line=99 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%a, %b)
}

%sliced (w: f32[4,8,128], at: s32[]) -> f32[1,8,128] {
  %w = f32[4,8,128]{2,1,0:T(8,128)} parameter(0)
  %at = s32[]{:T(128)S(6)} parameter(1)
  ROOT %part = f32[1,8,128]{2,1,0:T(8,128)} dynamic-slice(%w, %at, %at, %at), dynamic_slice_sizes={1,8,128}
}

%whole (x: bf16[8,128]) -> bf16[8,128] {
  %x = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %twice = bf16[8,128]{1,0:T(8,128)(2,1)} add(%x, %x)
}

%start (x: bf16[2,128]) -> (bf16[2,128], bf16[8,128]) {
  %x.1 = bf16[2,128]{1,0:T(8,128)(2,1)} parameter(0)
  %gather.1 = bf16[8,128]{1,0:T(8,128)(2,1)} all-gather(%x.1), replica_groups=[2,4]<=[8], dimensions={0}, \
frontend_attributes={chain_id="0"}, metadata={op_name="jit(train_step)/all_gather" stack_frame_id=2}
  ROOT %s = (bf16[2,128]{1,0}, bf16[8,128]{1,0}) custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}

%piece (x: bf16[8,128]) -> bf16[8,128] {
  %x.2 = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %gather.2 = bf16[8,128]{1,0:T(8,128)(2,1)} all-gather(%x.2), replica_groups=[2,4]<=[8], dimensions={0}, \
frontend_attributes={chain_id="0"}
}

%body (state: (s32[], f32[4,8,128], bf16[2,128])) -> (s32[], f32[4,8,128], bf16[2,128]) {
  %state = (s32[]{:T(128)}, f32[4,8,128]{2,1,0:T(8,128)}, bf16[2,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %w.1 = f32[4,8,128]{2,1,0:T(8,128)} get-tuple-element(%state), index=1
  %x.3 = bf16[2,128]{1,0:T(8,128)(2,1)} get-tuple-element(%state), index=2
  %async-collective-start = (bf16[2,128]{1,0:T(8,128)(2,1)}, bf16[8,128]{1,0:T(8,128)(2,1)}) fusion(%x.3), \
kind=kCustom, calls=%start
  %layer = f32[1,8,128]{2,1,0:T(8,128)} fusion(%w.1, %i), kind=kLoop, calls=%sliced, \
metadata={op_name="jit(train_step)/slice" stack_frame_id=1}, backend_config={"window_config":{"estimated_cycles":"500"}}
  %got = bf16[8,128]{1,0:T(8,128)(2,1)} get-tuple-element(%async-collective-start), index=1
  %progress = bf16[8,128]{1,0:T(8,128)(2,1)} fusion(%got), kind=kCustom, calls=%piece
  %async-collective-done = bf16[8,128]{1,0:T(8,128)(2,1)} fusion(%progress), kind=kCustom, calls=%whole
  %reduced = f32[1,8,128]{2,1,0:T(8,128)} all-reduce(%layer), replica_groups=mesh['data'=2,'fsdp'=4] {'data'}, \
to_apply=%add, metadata={op_name="jit(train_step)/psum" stack_frame_id=1}
  ROOT %next = (s32[]{:T(128)}, f32[4,8,128]{2,1,0:T(8,128)}, bf16[2,128]{1,0:T(8,128)(2,1)}) tuple(%i, %w.1, %x.3)
}

%condition (state.1: (s32[], f32[4,8,128], bf16[2,128])) -> pred[] {
  %state.1 = (s32[]{:T(128)}, f32[4,8,128]{2,1,0:T(8,128)}, bf16[2,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  %limit = s32[]{:T(128)} constant(3)
  ROOT %less = pred[]{:T(512)} compare(%i.1, %limit), direction=LT
}

ENTRY %main (p0: f32[4,8,128], p1: bf16[2,128], p2: bf16[8,128], p3: s32[]) -> bf16[8,128] {
  %p0 = f32[4,8,128]{2,1,0:T(8,128)} parameter(0)
  %p1 = bf16[2,128]{1,0:T(8,128)(2,1)} parameter(1)
  %p2 = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(2)
  %p3 = s32[]{:T(128)} parameter(3)
  %set-aside = f32[4,8,128]{2,1,0:T(8,128)} custom-call(), custom_call_target="AllocateBuffer"
  %carry = (s32[]{:T(128)}, f32[4,8,128]{2,1,0:T(8,128)}, bf16[2,128]{1,0:T(8,128)(2,1)}) tuple(%p3, %set-aside, %p1)
  %loop = (s32[]{:T(128)}, f32[4,8,128]{2,1,0:T(8,128)}, bf16[2,128]{1,0:T(8,128)(2,1)}) while(%carry), \
condition=%condition, body=%body
  %in-vmem = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} copy(%p2)
  ROOT %out = bf16[8,128]{1,0:T(8,128)(2,1)} fusion(%in-vmem), kind=kLoop, calls=%whole, \
metadata={op_name="jit(train_step)/add" stack_frame_id=2}, backend_config={"estimated_cycles":"1000"}
}
"""
MESH = {"data": 2, "fsdp": 4}


@pytest.fixture(scope="module")
def read():
    return hlo_cost.parse(TEXT)


def test_cycles_count_a_loop_as_often_as_it_runs(read):
    loop = next(i for i in read.computations["main"] if i.op == "while")
    assert read.trips(loop) == 3
    assert read.total_cycles == 3 * 500 + 1000


def test_source_is_the_innermost_line_of_our_own(read):
    out = read.computations["main"][-1]
    assert read.source(out, "/src") == "tpu_train/loss.py:17"  # frame 2 is jax's, called by frame 1
    assert read.source(out) == "/site-packages/jax/lib.py:99"
    assert read.operation(out) == "jit(train_step)/add"
    assert read.source(read.computations["main"][0], "/src") == ""


def test_arrays_have_the_padding_of_their_tiles(read):
    start = next(i for i in read.computations["body"] if i.name == "async-collective-start")
    small, gathered = start.arrays
    # 2 rows of bf16 lie in a tile of 8.
    assert (small.dims, small.content_bytes, small.bytes) == ((2, 128), 512, 2048)
    assert (gathered.content_bytes, gathered.bytes, gathered.space) == (2048, 2048, 0)
    in_vmem = next(i for i in read.computations["main"] if i.name == "in-vmem")
    assert in_vmem.arrays[0].space == 1


def test_collectives_have_their_axis_bytes_runs_and_overlap(read):
    gather, reduce = collectives.find(read, MESH, "/src")
    assert (gather.kind, gather.axes, gather.devices, gather.runs) == ("all-gather", ("fsdp",), 4, 3)
    assert (gather.bytes, gather.wire_bytes) == (2048, 2048 * 3 / 4)
    assert (gather.overlaps, gather.cycles_meanwhile) == (True, 500)
    assert gather.source == "tpu_train/loss.py:17"
    assert (reduce.kind, reduce.axes, reduce.devices, reduce.runs) == ("all-reduce", ("data",), 2, 3)
    assert (reduce.bytes, reduce.wire_bytes) == (4096, 4096 * 2 / 2)
    assert (reduce.overlaps, reduce.cycles_meanwhile) == (False, 0)


@pytest.mark.parametrize(
    ("attributes", "groups", "axes"),
    [
        ("replica_groups=[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]], ("fsdp",)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]], ("data",)),
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", [[0, 1], [2, 3], [4, 5], [6, 7]], ("fsdp",)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]], ("fsdp",)),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", [[0, 1, 2, 3, 4, 5, 6, 7]], ("data", "fsdp")),
        ("replica_groups={}", [[0, 1, 2, 3, 4, 5, 6, 7]], ("data", "fsdp")),
        ("source_target_pairs={{0,4},{4,0}}", [[0, 4], [4, 0]], ("data",)),
    ],
)
def test_groups_of_devices_are_read_in_every_form(attributes, groups, axes):
    found = collectives.replica_groups(f"channel_id=1, {attributes}, use_global_device_ids=true", 8)
    np.testing.assert_array_equal(found, groups)
    assert collectives.axes_of(found, MESH) == axes


def test_hbm_traffic_counts_slices_and_not_what_they_are_taken_from(read):
    # The start reads the padded 2 rows and writes both its results; the layer reads an index of 4 and 4,096,
    # which it writes; the piece reads and writes 2,048, the reduction 4,096; all three times. The copy and the fusion
    # after the loop have one side in VMEM each.
    a_turn = (2048 + 2048 + 2048) + (2 * 4096 + 4) + 2 * 2048 + 2 * 4096
    assert traffic.hbm_bytes(read) == 3 * a_turn + 2048 + 2048


def test_buffers_at_the_peak_come_with_their_lines(read):
    live = """\
HloLiveRange (max 9):
  Live ranges at 3 (peak):
    out{}: 2048 bytes (cumulative: 2048 bytes)
    p0{}: 16384 bytes (cumulative: 18432 bytes)
    set-aside{}: 16384 bytes (cumulative: 34816 bytes)
    in-vmem{}: 2048 bytes (cumulative: 20480 bytes)
    async-collective-start{1}: 2048 bytes (cumulative: 22528 bytes)
  Stack trace breakdown for peak usage: 22 528 bytes
"""
    buffers = memory.at_peak(live, read, "/src")
    assert [(b.bytes, b.shape, b.instruction, b.argument) for b in buffers] == [
        (16384, "f32[4,8,128]", "p0", True),
        (16384, "f32[4,8,128]", "set-aside", False),
        (2048, "bf16[8,128]", "out", False),
        (2048, "bf16[8,128]", "async-collective-start", False),
    ]
    # `out` has its own line; what was only set aside has that of what reads it in the loop.
    assert [b.source for b in buffers] == ["", "tpu_train/loss.py:17", "tpu_train/loss.py:17", ""]
    with pytest.raises(ValueError, match="no peak"):
        memory.at_peak("HloLiveRange (max 0):\n", read)


def test_a_refusal_for_memory_is_an_answer_and_any_other_a_line():
    oom = "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
    oom += "temporaries (16.25G) exceeds available HBM (15.75G). HLO module: jit_f.\nSee https://openxla.org for more."
    assert child.refusal(oom) == {
        "out of memory": "HLO temporaries",
        "needed_bytes": round(16.25 * 2**30),
        "available_bytes": round(15.75 * 2**30),
    }
    assert child.refusal("\nINTERNAL: no.\nmore") == {"refused": "INTERNAL: no."}


def test_a_text_without_a_module_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo_cost.parse("nothing")


CALLS = """\
HloModule jit_train_step, is_scheduled=true

%body (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %product.2 = f32[8,128]{1,0:T(8,128)} custom-call(%x), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"T":"256",
"kernel":"forward",
"op":"of_others"
}}, metadata={op_name="jit(f)/product" stack_frame_id=1}
}

%other (y: f32[8,128]) -> f32[8,128] {
  ROOT %y = f32[8,128]{1,0:T(8,128)} parameter(0)
}

ENTRY %main (p: s32[], q: f32[8,128]) -> f32[8,128] {
  %p = s32[]{:T(128)} parameter(0)
  %q = f32[8,128]{1,0:T(8,128)} parameter(1)
  %bare.1 = f32[8,128]{1,0:T(8,128)} custom-call(%q), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={}}
  ROOT %way = f32[8,128]{1,0:T(8,128)} conditional(%p, %bare.1, %q), branch_computations={%body, %other}
}
"""


def test_kernels_calls_say_what_they_are_and_one_that_nobody_counts_says_why(tmp_path):
    module = hlo_cost.parse(CALLS)
    (product,) = [i for i in module.computations["body"] if i.op == "custom-call"]
    assert product.facts == {"T": "256", "kernel": "forward", "op": "of_others"}
    assert module.computations["main"][2].facts == {}
    assert len(module.computations) == 3  # the brace on a line of its own ended none
    bare, named = kernels.find(module, tmp_path, "v5e")
    assert (bare.name, bare.runs, bare.cycles) == ("bare.1", 1, None)
    assert (named.name, named.runs, named.cycles) == ("of_others_forward", 0.5, None)  # one side of two
    assert bare.why == named.why == "no op says how often its regions run"
    counted = dataclasses.replace(module, kernel_cycles={"bare.1": 70, "product.2": 5})
    assert (module.total_cycles, counted.total_cycles) == (0, 75)


def test_a_kernel_whose_program_is_not_in_the_dump_is_named(tmp_path):
    facts = '"F":"128","D":"128","products":"2","itemsize":"2","y_itemsize":"2","factors":"True","residual":"False"'
    text = CALLS.replace('"op":"of_others"', f'"op":"gated_mlp",\n{facts}')
    _, named = kernels.find(hlo_cost.parse(text), tmp_path, "v6e")
    assert (named.name, named.cycles) == ("gated_mlp_forward", None)
    assert named.why == "0 files of stage post-delay-converter for product.2"
