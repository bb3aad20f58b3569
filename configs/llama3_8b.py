"""Llama 3.1's 8B shape (32 layers of 4096, 32 query and 8 key heads), for a slice of 16 TPU v5e or more.

    tpu-train compile --config=configs/llama3_8b.py --topology=v5e:4x4
    ./launch/local.sh train --config=configs/llama3_8b.py \
        --set data.source=text --set data.paths='corpus/*.txt' --set data.tokenizer=tokenizer.json

One sequence of 2,048 tokens a chip; give another slice its own data.batch_size. Weights, gradients and moments in
float32 are 16 bytes a parameter: 8 GB a chip, over 16. Compiled, never trained: the loss should begin
near ln(128,256) = 11.8.
"""

from tpu_train.config import CheckpointConfig, Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, RunConfig


def config() -> Config:
    return Config(
        model=ModelConfig(
            vocab_size=128_256,
            num_layers=32,
            model_dim=4096,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            mlp_dim=14_336,
            tie_embeddings=False,
            norm_eps=1e-5,
            rope_theta=500_000.0,
            remat="full",
        ),
        data=DataConfig(seq_len=2048, batch_size=16),
        optim=OptimConfig(peak_lr=3e-4, warmup_steps=2000, z_loss=1e-4),
        mesh=MeshConfig(data=1, fsdp=-1),
        checkpoint=CheckpointConfig(every_steps=500),
        run=RunConfig(steps=100_000, eval_every=500, eval_batches=16),
    )
