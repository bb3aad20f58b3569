"""The mesh: its shape from what is asked and what is there, and which models fit it."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

from tpu_train import layout
from tpu_train.aot import search
from tpu_train.config import MeshConfig, UserError
from tpu_train.mesh import AXES, check_fits, make_mesh, mesh_shape, over_slices, platform


@pytest.mark.parametrize(
    ("sizes", "devices", "shape"),
    [
        ((-1, 1, 1), 8, (8, 1, 1, 1, 1, 1)),
        ((-1, 1, 1), 1, (1, 1, 1, 1, 1, 1)),
        ((-1, 2, 2), 8, (2, 1, 1, 2, 1, 2)),
        ((2, -1, 2), 8, (2, 1, 1, 2, 1, 2)),
        ((1, 2, -1), 12, (1, 1, 1, 2, 1, 6)),
        ((2, 4, 1), 8, (2, 1, 1, 4, 1, 1)),
        ((-1, 4, 2), 8, (1, 1, 1, 4, 1, 2)),
        ((1, 2, 1, -1), 8, (1, 1, 1, 2, 4, 1)),
        ((-1, 1, 2, 2), 8, (2, 1, 1, 1, 2, 2)),
        ((2, 1, 1, 1, -1), 8, (2, 1, 4, 1, 1, 1)),
        ((2, 1, 1, 1, 1, -1), 8, (2, 4, 1, 1, 1, 1)),
    ],
)
def test_shape_fills_in_what_is_left(sizes, devices, shape):
    """The config has context, expert and stage last, the mesh tensor, whose devices talk most."""
    assert mesh_shape(MeshConfig(*sizes), devices) == shape


@given(st.tuples(*[st.integers(1, 6)] * 6), st.integers(0, 5))
def test_shape_always_uses_every_device(sizes, free):
    asked = [-1 if i == free else size for i, size in enumerate(sizes)]
    data, fsdp, tensor, context, expert, stage = sizes
    assert mesh_shape(MeshConfig(*asked), int(np.prod(sizes))) == (data, stage, expert, fsdp, context, tensor)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((-1, -1, 1), "at most one is -1"),
        ((0, 1, 1), "sizes are at least 1"),
        ((1, -2, 1), "sizes are at least 1"),
        ((-1, 3, 1), "makes 3 devices; there are 8"),
        ((-1, 16, 1), "makes 16 devices; there are 8"),
        ((2, 2, 1), "mesh.data=2, mesh.fsdp=2, mesh.tensor=1 makes 4 devices; there are 8: the product must match"),
        ((4, 4, 1), "makes 16 devices; there are 8"),
    ],
)
def test_shape_that_does_not_fit_the_devices_is_refused(sizes, message):
    with pytest.raises(UserError) as error:
        mesh_shape(MeshConfig(*sizes), 8)
    assert message in str(error.value)


def test_mesh_is_explicit_holds_the_devices_and_is_set_for_the_process():
    mesh = make_mesh(MeshConfig(2, 2, -1))
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == {"data": 2, "stage": 1, "expert": 1, "fsdp": 2, "context": 1, "tensor": 2}
    assert set(mesh.axis_types) == {AxisType.Explicit}
    assert set(mesh.devices.flat) == set(jax.devices())
    assert jax.sharding.get_mesh() == mesh
    assert make_mesh(MeshConfig(), jax.devices()[3:5]).devices.flatten().tolist() == jax.devices()[3:5]


@pytest.mark.parametrize(
    ("asked", "slices", "found"),
    [
        ({}, 1, {}),
        ({}, 2, {"data": 2}),
        ({"fsdp_slices": 2}, 2, {"fsdp": 2}),
        ({"fsdp_slices": 2}, 4, {"data": 2, "fsdp": 2}),
        ({"data_slices": 1, "stage_slices": -1}, 4, {"stage": 4}),
        ({"data_slices": 2, "tensor_slices": 2, "context_slices": -1}, 8, {"data": 2, "tensor": 2, "context": 2}),
        ({"expert_slices": 4}, 4, {"expert": 4}),
    ],
)
def test_slices_are_dealt_out_to_the_axes(asked, slices, found):
    size = dict.fromkeys(AXES, 4)
    assert layout.across_slices(MeshConfig(**asked), size, slices) == dict.fromkeys(AXES, 1) | found


@pytest.mark.parametrize(
    ("asked", "slices", "message"),
    [
        ({"fsdp_slices": 2}, 1, "mesh.fsdp_slices=2 makes 2 slices, and the devices are one slice: the product must"),
        ({"fsdp_slices": 2}, 3, "mesh.fsdp_slices=2 makes 2 slices, and there are 3 slices: the product must match"),
        ({"data_slices": 1}, 2, "mesh.data_slices=1 makes 1 slices, and there are 2 slices: the product must match"),
        ({"data_slices": 2, "fsdp_slices": 2}, 2, "mesh.data_slices=2, mesh.fsdp_slices=2 makes 4 slices, and there"),
        (
            {"fsdp_slices": -1},
            2,
            "mesh.data_slices=-1, mesh.fsdp_slices=-1: slices are at least 1, and at most one is -1",
        ),
        ({"stage_slices": 0}, 2, "mesh.stage_slices=0: slices are at least 1"),
        (
            {},
            3,
            "mesh.data=4 is not a multiple of the 3 slices that it is spread over; set mesh.data to one, or spread ",
        ),
        ({"stage_slices": 3}, 3, "mesh.stage=4 is not a multiple of the 3 slices"),
        (
            {"fsdp_slices": 2, "gradient_scatter": "ring"},
            2,
            "sends within a slice, and mesh.fsdp is spread over 2; set",
        ),
    ],
)
def test_slices_that_can_not_be_dealt_out_so_are_refused(asked, slices, message):
    with pytest.raises(UserError) as error:
        layout.across_slices(MeshConfig(**asked), dict.fromkeys(AXES, 4), slices)
    assert message in str(error.value)


def test_an_axis_goes_through_a_slice_before_it_goes_on_to_the_next():
    devices = [
        SimpleNamespace(id=i, slice_index=i // 4, device_kind="", platform="", process_index=0) for i in range(8)
    ]
    shape = (2, 1, 1, 4, 1, 1)
    for axis, rows in (("data", [[0, 1, 2, 3], [4, 5, 6, 7]]), ("fsdp", [[0, 1, 4, 5], [2, 3, 6, 7]])):
        across = dict.fromkeys(AXES, 1) | {axis: 2}
        placed = over_slices(shape, across, devices)
        assert placed.shape == shape
        assert [[device.id for device in row] for row in placed.reshape(2, 4)] == rows


def test_one_slice_refuses_axes_over_several():
    with pytest.raises(UserError, match=r"mesh.fsdp_slices=2 makes 2 slices, and the devices are one slice"):
        make_mesh(MeshConfig(1, 8, fsdp_slices=2))


def test_platform_is_that_of_the_meshs_devices(mesh_of):
    assert platform(mesh_of(2)) == "cpu"


@pytest.mark.parametrize(
    ("shape", "overrides", "message"),
    [
        (
            (2, 1, 1),
            ["data.batch_size=7"],
            "accumulation_steps=7 does not divide over the 2 devices of mesh axis data x",
        ),
        ((2, 2, 1), ["optim.accumulation_steps=4"], "accumulation_steps=2 does not divide over the 4 devices"),
        ((1, 8, 1), ["model.model_dim=12"], "model.model_dim=12 does not divide over the 8 devices of mesh axis fsdp"),
        ((1, 1, 4), ["model.num_heads=6", "model.num_kv_heads=6"], "model.num_heads=6 does not divide over the 4"),
        (
            (1, 1, 4),
            ["model.num_kv_heads=2"],
            "model.num_kv_heads=2 does not divide over the 4 devices of mesh axis ten",
        ),
        ((1, 1, 4), ["model.mlp_dim=30"], "model.mlp_dim=30 does not divide over the 4 devices of mesh axis tensor"),
        (
            (1, 1, 1, 4),
            ["model.model_dim=18"],
            "model.model_dim=18 does not divide over the 4 devices of mesh axis fsdp x",
        ),
        (
            (1, 1, 1, 4),
            ["data.seq_len=20"],
            "data.seq_len=20 does not divide into the 8 chunks of mesh.context=4, two a",
        ),
        (
            (1, 1, 2, 4),
            ["mesh.context_method=all_to_all", "model.num_heads=16"],
            "model.num_kv_heads=4 does not divide over mesh.tensor=2 x mesh.context=4; set mesh.context_method=ring or",
        ),
        (
            (1, 1, 1, 2),
            ["mesh.context_method=ring", "run.implementation=reference"],
            "run.implementation=reference has no ring; set mesh.context_method=all_gather",
        ),
        ((1, 1, 1, 1, 2), [], "mesh.expert=2 splits experts, and model.num_experts is 0; set mesh.fsdp"),
        (
            (1, 1, 1, 1, 4),
            ["model.num_experts=6"],
            "model.num_experts=6 does not divide over the 4 devices of mesh axis expert",
        ),
        (
            (1, 1, 4),
            ["model.num_experts=4", "model.expert_dim=6"],
            "model.expert_dim=6 does not divide over the 4 devices of mesh axis tensor",
        ),
        (
            (2, 1, 1, 1, 2),
            ["data.batch_size=6", "model.num_experts=4"],
            "batch_size / optim.accumulation_steps=6 does not divide over the 4 devices of mesh axis data x expert x f",
        ),
        (
            (1, 1, 1, 1, 1, 2),
            ["model.num_layers=6"],
            "does not divide into the 2 pieces of mesh.stage=2 x mesh.stage_rounds=1; take a multiple of 4",
        ),
        (
            (1, 1, 1, 1, 1, 2),
            ["model.num_layers=4", "mesh.stage_rounds=2", "model.window_pattern=0,0"],
            "does not divide into the 4 pieces of mesh.stage=2 x mesh.stage_rounds=2; take a multiple of 8",
        ),
        (
            (1, 1, 1, 1, 1, 2),
            ["model.num_layers=4", "mesh.stage_microbatches=5"],
            "mesh.stage_microbatches=5 is not a multiple of mesh.stage=2; a stage would wait",
        ),
        (
            (1, 4, 2),
            ["mesh.gradient_scatter=ring"],
            "mesh.gradient_scatter=ring is for a mesh of data and fsdp alone, and mesh.tensor=2; set it to xla",
        ),
        (
            (2, 1, 1, 1, 1, 2),
            ["model.num_layers=4", "mesh.stage_microbatches=8"],
            "the 4 rows that each group of stages has of data.batch_size / optim.accumulation_steps do not divide into "
            "8 parts of mesh.stage_microbatches; take a multiple of 8",
        ),
        (
            (4, 1, 1, 1, 1, 2),
            ["model.num_layers=4", "data.batch_size=12"],
            "optim.accumulation_steps do not divide into 2 stages; take a multiple of 2",
        ),
        (
            (1, 1, 1, 1, 1, 2),
            ["model.model_dim=17"],
            "model.model_dim=17 does not divide over the 2 devices of mesh axis",
        ),
        ((1, 1, 4), ["model.vocab_size=63"], "model.vocab_size=63 does not divide over the 4 devices of mesh axis ten"),
    ],
)
def test_model_that_does_not_divide_over_the_mesh_is_refused(mesh_of, tiny, shape, overrides, message):
    config = tiny(*overrides)
    check_fits(config, mesh_of())
    with pytest.raises(UserError) as error:
        check_fits(config, mesh_of(*shape))
    assert message in str(error.value)


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1), (1, 1, 4), (2, 2, 2), (1, 1, 2, 4)])
def test_model_that_divides_over_the_mesh_fits(mesh_of, tiny, shape):
    check_fits(tiny(), mesh_of(*shape))


def test_searched_meshes_keep_the_experts_axis(tiny):
    config = tiny("model.num_experts=4", "mesh.expert=2", "mesh.data=1", "data.batch_size=16")
    found = list(search.meshes(config, 16, 2))
    assert {mesh.expert for mesh in found} == {2}
    for mesh in found:
        layout.check_fits(config, {axis: getattr(mesh, axis) for axis in AXES})
    assert {(mesh.data, mesh.fsdp, mesh.tensor) for mesh in found} == {(2, 4, 1), (2, 2, 2), (2, 1, 4)}
