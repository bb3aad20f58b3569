"""The table of accelerators: sources, agreement with what else knows chips, and what --chips accepts."""

import dataclasses
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.runtime import CHIPS as KERNEL_CHIPS
from tpu_train import chips, devices
from tpu_train.config import UserError
from tpu_train.planning import advice
from tpu_train.precision import AUTO


@pytest.mark.parametrize("chip", chips.CHIPS.values(), ids=list(chips.CHIPS))
def test_every_number_has_a_source_with_a_date(chip):
    numbers = {"name", "platform", "kinds", "sources", "devices"}.symmetric_difference(
        field.name for field in dataclasses.fields(chip)
    )
    assert set(chip.sources) == numbers
    for name in numbers:
        if getattr(chip, name) is not None:
            assert re.search(r"\b20\d\d\b|WORKSPACE", chip.sources[name]), (name, chip.sources[name])


@pytest.mark.parametrize("chip", KERNEL_CHIPS.values(), ids=list(KERNEL_CHIPS))
def test_the_kernels_know_the_same_tpus_by_the_same_kinds(chip):
    assert {chips.of_kind(kind).name for kind in chip.kinds} == {chips.ALIASES.get(chip.name, chip.name)}


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5e", 197e12),
        ("TPU v5p", 459e12),
        ("TPU v5", 459e12),
        ("TPU v6 lite", 918e12),
        ("TPU7x", 2307e12 / 2),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("AMD Instinct MI300X", 1307.4e12),
        ("cpu", None),
        ("TPU v3", None),
    ],
)
def test_peak_of_a_device_by_its_kind(kind, peak):
    assert devices.peak_flops(kind) == peak


@pytest.mark.parametrize("chip", chips.CHIPS.values(), ids=list(chips.CHIPS))
def test_auto_precision_is_what_the_trainer_takes(chip, tiny):
    assert advice.dtype_of(tiny(), chips.Fleet(chip, (1,))) == AUTO[chip.platform]


def test_float32_takes_six_products_on_a_tpu_and_is_unknown_on_a_gpu():
    assert chips.CHIPS["v5e"].flops("float32") == 197e12 / 6
    assert chips.CHIPS["h100"].flops("float32") is None
    assert chips.CHIPS["7x"].flops("bfloat16") == 2307e12 / 2


@pytest.mark.parametrize(
    ("text", "slices", "count", "shape", "in_slices"),
    [
        ("v5p-256", 0, 256, (4, 8, 8), 1),
        ("v5e-256", 0, 256, (16, 16), 1),
        ("v5e-512", 0, 512, (16, 16), 2),
        ("v5e-32", 2, 32, (4, 4), 2),
        ("v5e:2x4", 0, 8, (2, 4), 1),
        ("V5P:4X4", 3, 48, (4, 4, 1), 3),
        ("tpu7x-8", 0, 8, (2, 2, 2), 1),
        ("v5p-8960", 0, 8960, (16, 20, 28), 1),
        ("h100-64", 0, 64, (8,), 8),
        ("h100-4", 0, 4, (4,), 1),
        ("cpu", 0, 1, (1,), 1),
    ],
)
def test_chips_are_read(text, slices, count, shape, in_slices):
    fleet = chips.parse(text, slices)
    assert (fleet.chips, fleet.shape, fleet.slices) == (count, shape, in_slices)
    assert fleet.devices == count * fleet.chip.devices


@pytest.mark.parametrize(
    ("text", "slices", "message"),
    [
        ("v5q-8", 0, "no chip 'v5q'; did you mean 'v5p'?"),
        ("gtx1080-1", 0, "no chip 'gtx1080'; there are v4, v5e, v5p, v6e, 7x, a100, h100, h200, b200, mi300x, cpu"),
        ("", 0, "no chip ''; there are v4"),
        ("v5e-0", 0, "0 chips do not make 1 equal slices of at most 256"),
        ("v5e-12", 5, "12 chips do not make 5 equal slices"),
        ("v5e-18", 0, "no slice of v5e has 18 chips: sides are 1, 2 or a multiple of 4, within 16x16"),
        ("v5e:2x2x2", 0, "v5e joins its chips along 2 sides"),
        ("h100-12", 1, "12 chips do not make 1 equal slices of at most 8"),
    ],
)
def test_chips_that_can_not_be_are_refused_with_what_there_is(text, slices, message):
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        chips.parse(text, slices)
    assert "\n" not in str(refused.value)


@settings(deadline=None)
@given(st.sampled_from([chip for chip in chips.CHIPS.values() if not chip.switched]), st.integers(1, 3000))
def test_a_shape_has_the_chips_asked_for_within_the_largest_slice(chip, count):
    try:
        shape = chips.shape_of(count, chip)
    except UserError:
        return
    assert math.prod(shape) == count
    assert all(side <= most for side, most in zip(sorted(shape), sorted(chip.torus), strict=True))
