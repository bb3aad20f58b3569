"""Which dtype does what, in one table, and how a forward pass computes.

Weights, moments, softmax statistics, norms, logits and the loss are float32 in every policy. The operands of matmuls
and the activations between them take the compute dtype; every product accumulates in float32. A weight's gradient is
rounded to the compute dtype where it leaves its product and so crosses the mesh at that width, as do the partial sums
of a product split over `tensor`; from there on (micro-batches, clipping, update) it is float32. The head's gradient is
float32 throughout, and so is all of a router.
"""

import dataclasses

import jax
import jax.numpy as jnp

from tpu_train.config import MeshConfig, RunConfig, UserError

COMPUTE_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}

KEPT_FLOAT32 = ("DE",)  # matrices of blocks that take part in float32: a router's, by their dims

# CPUs emulate bfloat16, which is slower than float32.
AUTO = {"tpu": "bfloat16", "gpu": "bfloat16", "cpu": "float32"}


@dataclasses.dataclass(frozen=True)
class Compute:
    """How a forward pass computes: the dtype of activations and matmul operands, and whose kernels run."""

    dtype: jnp.dtype
    implementation: str
    platform: str
    context_method: str = "auto"  # of MeshConfig, as the next three
    stage_rounds: int = 1
    stage_microbatches: int | None = None
    gradient_scatter: str = "xla"
    quantized: str = "none"  # of RunConfig
    seed: int = 0  # of RunConfig, for dropout
    kernels_always: bool = False  # pallas: also where XLA is quicker, so that a check meets every kernel

    @property
    def scales_loss(self) -> bool:
        """float16 gradients underflow without a loss scale."""
        return self.dtype == jnp.float16


def resolve(config: RunConfig, platform: str, mesh: MeshConfig | None = None) -> Compute:
    """The `Compute` for a run on devices of `platform`, with the mesh's context_method, stages and rings.

    Raises UserError where the platform can't do what is asked.
    """
    name = AUTO[platform] if config.precision == "auto" else config.precision
    if name == "float16" and platform == "tpu":
        raise UserError("run.precision=float16 has no TPU hardware; use bfloat16, which needs no loss scale")
    if config.implementation == "pallas" and platform != "tpu":
        raise UserError(f"run.implementation=pallas runs on TPUs, and these devices are {platform}; use xla or auto")
    kernels = "pallas" if platform == "tpu" else "xla"
    implementation = kernels if config.implementation == "auto" else config.implementation
    if name == "float32":
        # The default would round float32 operands to bfloat16 on TPU and to TF32 on GPU.
        jax.config.update("jax_default_matmul_precision", "highest")
    mesh = mesh or MeshConfig()
    return Compute(
        *(jnp.dtype(COMPUTE_DTYPES[name]), implementation, platform),
        *(mesh.context_method, mesh.stage_rounds, mesh.stage_microbatches),
        gradient_scatter=mesh.gradient_scatter,
        quantized=config.quantized,
        seed=config.seed,
    )
