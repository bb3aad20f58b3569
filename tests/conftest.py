"""Eight CPU devices, a one-device mesh at the start of every test, and a tiny model with batches for it."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jaxlib.version
import numpy as np
import pytest

_XLA_FLAGS: dict[str, int | str] = {
    "xla_force_host_platform_device_count": 8,
    # Eight devices share the cores of a small machine: one that waits long for the others is slow, not stuck.
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 120,
    "xla_cpu_collective_call_terminate_timeout_seconds": 300,
    # The tests are mostly compilation. At LLVM's level 0 a tiny model's init compiles 8 times faster, its step 3 times.
    "xla_backend_optimization_level": 0,
}
if jaxlib.version.__version_info__ < (0, 11):  # newer ones have no such flag and stop at it
    _XLA_FLAGS["xla_cpu_use_fusion_emitters"] = "false"  # compiles another 3 times faster
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), *(f"--{name}={value}" for name, value in _XLA_FLAGS.items())]
).strip()

import jax  # noqa: E402  (reads the variables above)
import jax.numpy as jnp  # noqa: E402
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as simulator  # noqa: E402  (no other way to its races)
from jax.experimental.pallas import tpu as pltpu  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from tpu_train.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, apply_override, check  # noqa: E402
from tpu_train.context import reorder  # noqa: E402
from tpu_train.mesh import make_mesh  # noqa: E402
from tpu_train.models.dropout import places  # noqa: E402
from tpu_train.models.transformer import Transformer  # noqa: E402
from tpu_train.optim import make_optimizer  # noqa: E402
from tpu_train.precision import Compute, resolve  # noqa: E402
from tpu_train.sharding import outside  # noqa: E402
from tpu_train.train_step import TrainState, abstract_state, with_features  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
# Ignored where the tests run in the background, which the processes that they interrupt would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _mesh_of(data: int = 1, fsdp: int = 1, tensor: int = 1, context: int = 1, expert: int = 1, stage: int = 1) -> Mesh:
    sizes = data, fsdp, tensor, context, expert, stage
    return make_mesh(MeshConfig(*sizes), jax.devices()[: np.prod(sizes)])


@pytest.fixture(autouse=True)
def one_device() -> Iterator[Mesh]:
    """A mesh of one device, set for the process; set again after the test, whatever that did."""
    yield _mesh_of()
    _mesh_of()


@pytest.fixture(scope="session")
def mesh_of() -> Callable[..., Mesh]:
    """mesh_of(data, fsdp, tensor, context, expert, stage) makes a mesh of the first devices, set for the process."""
    assert len(jax.devices()) == 8
    return _mesh_of


@pytest.fixture
def simulated_tpu() -> Callable:
    """with simulated_tpu(): Pallas kernels run in JAX's simulator, on memory full of NaN; at its end, none may race."""

    @contextmanager
    def simulate() -> Iterator[None]:
        try:
            with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")):
                yield
                jax.effects_barrier()
            assert simulator.races is not None, "no kernel ran"
            assert not simulator.races.races_found
        finally:
            pltpu.reset_tpu_interpret_mode_state()

    return simulate


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Config]:
    """tiny("optim.z_loss=0.1", ...): a model that uses grouped heads and windows, small enough for any mesh of 8."""

    def make(*overrides: str) -> Config:
        config = Config(
            model=ModelConfig(
                vocab_size=64, num_layers=2, model_dim=16, num_heads=8, num_kv_heads=4, head_dim=4, mlp_dim=32,
                window_pattern=(5, 0),
            ),
            data=DataConfig(seq_len=16, batch_size=8),
            # An eps near the gradients' size: a step then shows their size, which plain Adam divides away.
            optim=OptimConfig(peak_lr=1e-2, warmup_steps=0, eps=1e-3, schedule="constant", muon_lr=1e-2),
        )  # fmt: skip
        for override in overrides:
            config = apply_override(config, override)
        check(config)
        return config

    return make


@pytest.fixture(scope="session")
def random_batch() -> Callable[..., dict[str, np.ndarray]]:
    """random_batch(config, seed): [A, B, T] of two documents a row and padding, of a different length in every row."""

    def make(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        B, T, V = config.data.batch_size, config.data.seq_len, config.model.vocab_size
        tokens, labels = rng.integers(0, V, (2, B, T), dtype=np.int32)
        length_B1 = rng.integers(2, T + 1, (B, 1))
        first_B1 = rng.integers(1, length_B1)
        at_1T = np.arange(T)[None]
        batch = {
            "tokens": tokens,
            "labels": labels,
            "positions": np.where(at_1T < first_B1, at_1T, at_1T - first_B1).astype(np.int32),
            "segment_ids": np.where(at_1T < first_B1, 1, np.where(at_1T < length_B1, 2, 0)).astype(np.int32),
            "weights": (at_1T < length_B1).astype(np.float32),
            "places": places(B, T),
        }
        return {name: x.reshape(config.optim.accumulation_steps, -1, T) for name, x in batch.items()}

    return make


@pytest.fixture(scope="session")
def place() -> Callable[..., dict[str, jax.Array]]:
    """place(batch): a batch of [A, B, T] or [B, T] put on the current mesh."""

    def put(batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        mesh = jax.sharding.get_mesh()
        spec = outside("ABT" if batch["tokens"].ndim == 3 else "BT", mesh)
        batch = {name: reorder(x, mesh.shape["context"]) for name, x in batch.items()}
        return jax.device_put(batch, NamedSharding(mesh, spec))

    return put


def _random_model(config: Config, seed: int = 0) -> Transformer:
    """Every weight drawn by numpy, norm scales too, and placed on the current mesh: nothing to compile."""
    mesh, rng = jax.sharding.get_mesh(), np.random.default_rng(seed)
    key = jax.eval_shape(lambda: jax.random.key(0))
    abstract = jax.eval_shape(lambda key: Transformer(config.model, key), key)

    def draw(path, x):
        is_scale = "scale" in jax.tree_util.keystr(path)
        value = rng.normal(1.0 if is_scale else 0.0, 0.2, x.shape).astype(np.float32)
        spec = PartitionSpec() if x.sharding is None else x.sharding.spec
        return jax.device_put(value, NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(draw, abstract)


@pytest.fixture(scope="session")
def random_model() -> Callable[..., Transformer]:
    """random_model(config, seed): the same weights on every mesh."""
    return _random_model


@pytest.fixture(scope="session")
def fresh_state() -> Callable[..., TrainState]:
    """fresh_state(config, compute): step 0 with `random_model`'s weights and empty moments, quick to make."""

    def make(config: Config, compute: Compute | None = None) -> TrainState:
        compute = compute or resolve(config.run, "cpu")
        model = _random_model(config)
        state = TrainState(
            step=jnp.zeros((), jnp.int32),
            model=model,
            opt_state=jax.jit(make_optimizer(config.optim, config.run.steps).init)(model),
            loss_scale=jnp.float32(2.0**15 if compute.scales_loss else 1.0),
            good_steps=jnp.zeros((), jnp.int32),
        )
        state = with_features(state, config)
        return jax.device_put(state, jax.tree.map(lambda x: x.sharding, abstract_state(config, compute)))

    return make
