"""The reader of compiled modules, on a text whose every figure is known by hand."""

import pytest

from pallas_kernels import hlo_cost

CYCLES = 'backend_config={"window_config":{"estimated_cycles":"%d"}}'
TEXT = f"""HloModule jit_f, is_scheduled=true

FileNames
1 "/src/model.py"

FunctionNames
1 "f"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=7 end_line=7 column=4 end_column=9}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}

%body (param: (s32[], bf16[8,200])) -> (s32[], bf16[8,200]) {{
  %param = (s32[]{{:T(128)}}, bf16[8,200]{{1,0:T(8,128)(2,1)S(1)}}) parameter(0)
  %inner = bf16[8,200]{{1,0:T(8,128)(2,1)}} fusion(%param), kind=kLoop, calls=%fused, {CYCLES % 30}
  ROOT %tuple = (s32[]{{:T(128)}}, bf16[8,200]{{1,0:T(8,128)(2,1)}}) tuple(%param, %inner)
}}

%condition (param.1: (s32[], bf16[8,200])) -> pred[] {{
  %param.1 = (s32[]{{:T(128)}}, bf16[8,200]{{1,0:T(8,128)(2,1)}}) parameter(0)
  %limit = s32[]{{:T(128)}} constant(5)
  ROOT %less = pred[]{{:T(512)}} compare(%param.1, %limit), direction=LT
}}

%cheap (param.2: bf16[8,200]) -> bf16[8,200] {{
  ROOT %same = bf16[8,200]{{1,0}} copy(%param.2)
}}

%dear (param.3: bf16[8,200]) -> bf16[8,200] {{
  ROOT %sum = bf16[8,200]{{1,0}} fusion(%param.3), kind=kLoop, calls=%fused.1, {CYCLES % 1000}
}}

ENTRY %main (x: bf16[8,200]) -> bf16[8,200] {{
  %x = bf16[8,200]{{1,0:T(8,128)(2,1)}} parameter(0), metadata={{op_name="x"}}
  %loop = (s32[]{{:T(128)}}, bf16[8,200]{{1,0:T(8,128)(2,1)}}) while(%x), condition=%condition, body=%body
  %side = bf16[8,200]{{1,0}} conditional(%p, %x, %x), true_computation=%cheap, false_computation=%dear
  %kernel = bf16[8,200]{{1,0}} custom-call(%side), custom_call_target="tpu_custom_call"
  ROOT %out = bf16[8,200]{{1,0}} fusion(%kernel), metadata={{op_name="jit(f)/mul" stack_frame_id=1}}, {CYCLES % 7}
}}
"""


def test_cycles_are_summed_with_trip_counts_and_the_dearest_side():
    module = hlo_cost.parse(TEXT)
    assert module.total_cycles == 5 * 30 + 1000 + 7


def test_walk_says_how_often_each_instruction_runs():
    runs = {instruction.name: times for times, _, _, instruction in hlo_cost.parse(TEXT).walk()}
    assert (runs["inner"], runs["out"], runs["sum"]) == (5, 1, 1)


def test_arrays_know_their_memory_and_their_padded_size():
    module = hlo_cost.parse(TEXT)
    (x,) = module.computations["main"][0].arrays
    assert (str(x), x.space, x.content_bytes, x.bytes) == ("bf16[8,200]", 0, 8 * 200 * 2, 8 * 256 * 2)
    assert [array.space for array in module.computations["body"][0].arrays] == [0, 1]


def test_operands_and_sources_are_read():
    module = hlo_cost.parse(TEXT)
    out = module.computations["main"][-1]
    assert out.operands == ("kernel",)
    assert module.source(out, "/src") == "model.py:7"
    assert module.operation(out) == "jit(f)/mul"


def test_a_text_without_entry_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo_cost.parse("HloModule empty\n")
