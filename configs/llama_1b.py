"""Llama 3.2's 1B shape (16 layers of 2048, 32 query and 8 key heads), for one accelerator of 80 GB or a small slice.

    ./launch/local.sh train --config=configs/llama_1b.py \
        --set data.source=text --set data.paths='corpus/*.txt' --set data.tokenizer=tokenizer.json

As it stands it trains on Python's own sources with byte tokens, in a vocabulary of 128,256 of which 256 are used, so
the loss falls as nanogpt's does and the speed is that of the real thing. Weights, gradients and moments in float32
take 16 bytes a parameter: 19.8 GB; give a smaller device a mesh with --set mesh.fsdp=N.
"""

from tpu_train.config import CheckpointConfig, Config, DataConfig, ModelConfig, OptimConfig, RunConfig


def config() -> Config:
    return Config(
        model=ModelConfig(
            vocab_size=128_256,
            num_layers=16,
            model_dim=2048,
            num_heads=32,
            num_kv_heads=8,
            head_dim=64,
            mlp_dim=8192,
            norm_eps=1e-5,
            rope_theta=500_000.0,
            remat="full",
        ),
        data=DataConfig(seq_len=2048, batch_size=8),
        optim=OptimConfig(peak_lr=3e-4, warmup_steps=200, z_loss=1e-4),
        checkpoint=CheckpointConfig(every_steps=500),
        run=RunConfig(steps=10_000, eval_every=500, eval_batches=16),
    )
