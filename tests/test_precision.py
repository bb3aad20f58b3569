"""Which dtype computes where, and what a platform refuses."""

import jax
import jax.numpy as jnp
import pytest

from tpu_train.config import RunConfig, UserError
from tpu_train.precision import AUTO, resolve


def matmul_precision() -> str | None:
    return jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def keep_matmul_precision():
    before = matmul_precision()
    yield
    jax.config.update("jax_default_matmul_precision", before)


@pytest.mark.parametrize(
    ("platform", "dtype", "implementation"),
    [("tpu", jnp.bfloat16, "pallas"), ("gpu", jnp.bfloat16, "xla"), ("cpu", jnp.float32, "xla")],
)
def test_auto_takes_the_platforms_dtype_and_kernels(platform, dtype, implementation):
    compute = resolve(RunConfig(), platform)
    assert (compute.dtype, compute.implementation, compute.platform) == (jnp.dtype(dtype), implementation, platform)
    assert not compute.scales_loss


@pytest.mark.parametrize("platform", AUTO)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_is_asked_for_is_taken(platform, precision):
    assert resolve(RunConfig(precision=precision), platform).dtype == jnp.dtype(precision)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_float16_alone_scales_its_loss(platform):
    compute = resolve(RunConfig(precision="float16"), platform)
    assert compute.dtype == jnp.float16
    assert compute.scales_loss
    assert not resolve(RunConfig(precision="bfloat16"), platform).scales_loss


def test_float16_is_refused_on_a_tpu():
    with pytest.raises(UserError, match="no TPU hardware; use bfloat16"):
        resolve(RunConfig(precision="float16"), "tpu")


def test_float32_multiplies_in_float32_on_every_platform():
    jax.config.update("jax_default_matmul_precision", None)
    resolve(RunConfig(precision="bfloat16"), "gpu")
    assert matmul_precision() is None
    resolve(RunConfig(precision="float32"), "gpu")
    assert matmul_precision() == "highest"


def test_implementation_is_kept_and_one_without_kernels_refused():
    assert resolve(RunConfig(implementation="reference"), "tpu").implementation == "reference"
    with pytest.raises(UserError, match=r"run\.implementation=pallas runs on TPUs, and these devices are cpu; use xla"):
        resolve(RunConfig(implementation="pallas"), "cpu")
