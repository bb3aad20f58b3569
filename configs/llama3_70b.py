"""Llama 3.1's 70B shape (80 layers of 8192, 64 query and 8 key heads), for a slice of 64 TPU v5p or more.

    tpu-train compile --config=configs/llama3_70b.py --topology=v5p:4x4x8
    ./launch/local.sh train --config=configs/llama3_70b.py \
        --set data.source=text --set data.paths='corpus/*.txt' --set data.tokenizer=tokenizer.json

One sequence of 8,192 tokens a chip of 128; give another slice its own data.batch_size. Weights, gradients and moments
in float32 are 16 bytes a parameter: 9 GB a chip, over 128. Never trained: the loss should begin near
ln(128,256) = 11.8.
"""

from tpu_train.config import CheckpointConfig, Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, RunConfig


def config() -> Config:
    return Config(
        model=ModelConfig(
            vocab_size=128_256,
            num_layers=80,
            model_dim=8192,
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
            mlp_dim=28_672,
            tie_embeddings=False,
            norm_eps=1e-5,
            rope_theta=500_000.0,
            remat="full",
        ),
        data=DataConfig(seq_len=8192, batch_size=128),
        optim=OptimConfig(peak_lr=1.5e-4, warmup_steps=2000, z_loss=1e-4),
        mesh=MeshConfig(data=1, fsdp=-1),
        checkpoint=CheckpointConfig(every_steps=500),
        run=RunConfig(steps=100_000, eval_every=500, eval_batches=16),
    )
