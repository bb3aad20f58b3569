"""The plan's FLOPs of a step, recomputation included, against the products of the trainer's own traced step."""

import dataclasses

import jax.numpy as jnp
import pytest

from tpu_train import chips
from tpu_train.aot import child, flops
from tpu_train.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig
from tpu_train.planning import roofline
from tpu_train.planning.split import Split
from tpu_train.precision import Compute
from tpu_train.train_step import trace_step

ON_TPU = Compute(jnp.dtype("bfloat16"), "pallas", "tpu")


@pytest.mark.parametrize(
    ("mesh", "micro", "remat", "model", "method"),
    [
        ((1, 1, 1, 1), 1, "none", {}, "auto"),
        ((1, 1, 1, 1), 1, "dots", {}, "auto"),
        ((1, 1, 1, 1), 2, "full", {"gated_mlp": False, "qk_norm": True, "window_pattern": (64, 0)}, "auto"),
        ((1, 2, 2, 1), 1, "full", {"tie_embeddings": False, "vocab_size": 4096}, "auto"),
        ((1, 1, 1, 2), 1, "none", {}, "ring"),
        ((2, 1, 1, 2), 1, "full", {}, "all_gather"),
        ((1, 1, 1, 2), 1, "dots", {}, "all_to_all"),
    ],
    ids=[
        *("one device", "dots", "micro-batches, two layers a group", "four devices, tokens brought to the head"),
        *("a ring", "keys gathered", "heads exchanged"),
    ],
)
def test_flops_are_those_of_the_traced_step(mesh_of, mesh, micro, model, remat, method):
    shape = {"vocab_size": 64, "num_layers": 4, "model_dim": 32, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 48}
    seq_len = 128 if mesh[3] == 1 else 512  # a chunk of 128 is the shortest that the kernel takes
    config = Config(
        model=ModelConfig(**shape | model, remat=remat),
        data=DataConfig(seq_len=seq_len, batch_size=8),
        optim=OptimConfig(accumulation_steps=micro),
        mesh=MeshConfig(*mesh, context_method=method),
    )
    split = Split(*mesh[:3], micro, remat, context=mesh[3], context_method=method)
    traced = trace_step(config, dataclasses.replace(ON_TPU, context_method=method), mesh_of(*mesh))
    counted = flops.count(traced.jaxpr, split.devices, config.model)
    step = roofline.step(config, split, chips.parse(f"v5e-{split.devices}"))
    total = sum(block.flops for block in step.blocks)
    assert total == pytest.approx(counted["xla_flops"] + counted["kernel_flops"], rel=1e-9)


@pytest.mark.parametrize(
    ("expert", "micro", "remat", "model"),
    [
        (1, 1, "none", {}),
        (2, 1, "full", {"num_shared_experts": 1}),
        (2, 2, "dots", {"balance": "bias", "gated_mlp": False, "num_shared_experts": 1}),
        (1, 2, "none", {"num_experts": 8}),
    ],
    ids=["one device", "over expert", "biases, plain, micro-batches", "loads counted first"],
)
def test_flops_of_experts_are_those_of_the_traced_step_if_loads_are_even(mesh_of, expert, micro, remat, model):
    shape = {"vocab_size": 64, "num_layers": 2, "model_dim": 32, "num_heads": 4, "num_kv_heads": 2, "num_experts": 4}
    config = Config(
        model=ModelConfig(**shape | {"expert_dim": 24} | model, remat=remat),
        data=DataConfig(seq_len=128, batch_size=8),
        optim=OptimConfig(accumulation_steps=micro),
        mesh=MeshConfig(1, expert=expert),
    )
    split = Split(expert=expert, accumulation=micro, remat=remat)
    mesh = mesh_of(expert=expert)
    filled = child.rows_filled(config, dict(mesh.shape))
    counted = flops.count(trace_step(config, ON_TPU, mesh).jaxpr, expert, config.model, filled)
    step = roofline.step(config, split, chips.parse(f"v5e-{expert}"))
    total = sum(block.flops for block in step.blocks)
    assert total == pytest.approx(counted["xla_flops"] + counted["kernel_flops"], rel=1e-9)
