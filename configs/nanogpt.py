"""nanoGPT's character-level shape: 6 layers of 384, rows of 256 bytes, 10.7M parameters, on Python's own sources.

    ./launch/local.sh train --config=configs/nanogpt.py

For a GPU or a TPU: predicted for two CPU cores, from the 1,817 tokens/s of `python benchmarks/cpu_train.py`, are 9 s
a step. Expected: the loss falls from 5.6 as tiny's does, and further; no run to the last step has been measured yet.
"""

from tpu_train.config import CheckpointConfig, Config, DataConfig, ModelConfig, OptimConfig, RunConfig


def config() -> Config:
    return Config(
        model=ModelConfig(
            num_layers=6,
            model_dim=384,
            num_heads=6,
            mlp_dim=1536,
            gated_mlp=False,
            activation="gelu_tanh",
            scan_unroll=6,
        ),
        data=DataConfig(seq_len=256, batch_size=64),
        optim=OptimConfig(peak_lr=1e-3, warmup_steps=100, b2=0.99),
        checkpoint=CheckpointConfig(every_steps=250),
        run=RunConfig(steps=5000, log_every=10, eval_every=250, eval_batches=20),
    )
