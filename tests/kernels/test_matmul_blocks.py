"""Block sizes of the matmul kernels: what is chosen fits, and what does not fit is refused with what would."""

import itertools

import pytest

from pallas_kernels.matmul import blocks
from pallas_kernels.matmul.blocks import KERNELS, Block, Problem
from pallas_kernels.runtime import CHIPS

SHAPES = [
    (1, 1, 1),
    (1000, 300, 37),
    (2048, 5632, 2048),
    (4096, 14336, 4096),
    (16384, 28672, 8192),
    (300, 53248, 16384),
]


@pytest.mark.parametrize(("name", "shape"), list(itertools.product(CHIPS, SHAPES)))
def test_chosen_blocks_fit_the_chip(name, shape):
    chip = CHIPS[name]
    for kernel, itemsize, products in itertools.product(KERNELS, (2, 4), (1, 2)):
        problem = Problem(*shape, products, itemsize, itemsize, factors=True)
        block = blocks.choose(kernel, problem, chip)
        blocks.check("op", kernel, problem, block, chip)
        assert blocks.vmem_limit(chip) < chip.vmem_bytes


def test_real_sizes_get_long_contractions_and_reads_that_the_products_hide():
    problem = Problem(4096, 14336, 4096, 2, 2, 2, factors=True)
    for name, chip in CHIPS.items():
        rate, per_byte, cores = blocks.RATES[name]
        ideal = 2 * 4096 * 14336 * 4096 / rate
        for kernel in KERNELS:
            block = blocks.choose(kernel, problem, chip)
            assert {"forward": block.D, "dx": 2 * block.F, "dw": block.T}[kernel] >= (256 if name == "v4" else 1024)
            # 16 MiB of VMEM, v4's, hold too little for that.
            copies = blocks.hbm_bytes(kernel, problem, block) * per_byte / rate
            assert copies <= ideal * (1.05 if name == "v4" else 0.9)
            outer = {"forward": block.T, "dx": block.T, "dw": block.F}[kernel]
            assert {"dw": 14336}.get(kernel, 4096) // outer >= cores


def test_a_block_that_does_not_fit_names_the_limit_and_one_that_does():
    problem = Problem(8192, 8192, 8192, 2, 2, 2, factors=True)
    message = (
        r"op: dx block T=8192, F=8192, D=8192 needs [\d.]+ MiB of VMEM; v5p has 54\.4 MiB for it; T=\d+, F=\d+, D="
    )
    with pytest.raises(ValueError, match=message):
        blocks.check("op", "dx", problem, Block(8192, 8192, 8192), CHIPS["v5p"])


def test_arrays_that_no_block_of_fits_name_the_way_out():
    problem = Problem(128, 2**18, 2**18, 2, 2, 2, factors=True)  # dx sums a row of all of D in float32
    block = blocks.choose("dx", problem, CHIPS["v4"])
    with pytest.raises(ValueError, match=r"v4 has 13\.6 MiB for it; no block of these arrays fits, so use implement"):
        blocks.check("op", "dx", problem, block, CHIPS["v4"])


def test_blocks_pad_a_length_little():
    problem = Problem(1100, 1100, 1100, 1, 2, 2, factors=False)
    for kernel in KERNELS:
        block = blocks.choose(kernel, problem, CHIPS["v5e"])
        for size in (block.T, block.F, block.D):
            assert -(-1100 // size) * size <= 1536
