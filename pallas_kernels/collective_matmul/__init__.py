"""Products of what is split over a mesh axis, sent round its ring while they run."""

from pallas_kernels.collective_matmul.reduce_scatter import matmul_reduce_scatter
from pallas_kernels.collective_matmul.vjp import sharded_matmul

__all__ = ["matmul_reduce_scatter", "sharded_matmul"]
