"""The yardstick of cpu_train.py: a plain PyTorch GPT and its training step, in the shape and manner of nanoGPT.

LayerNorm, learned positions, fused causal attention, exact GELU, tied head, no biases, AdamW (fused), clipping at 1.
"""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional

VOCAB = 256


class Block(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim, bias=False)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x):
        batch, length, dim = x.shape
        shape = (batch, length, self.heads, dim // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.attention_norm(x)).split(dim, dim=2))
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(o.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, dim: int, heads: int, length: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim, bias=False), nn.Linear(dim, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                out = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if out else 0.02)

    def forward(self, tokens, labels):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def nanogpt(folder: str, layers: int, dim: int, heads: int, length: int):
    """The model of a nanoGPT clone in `folder`."""
    import sys

    sys.path.insert(0, folder)
    import model  # type: ignore[import-not-found]

    shape = {"n_layer": layers, "n_embd": dim, "n_head": heads, "block_size": length}
    return model.GPT(model.GPTConfig(vocab_size=VOCAB, bias=False, dropout=0.0, **shape))


def make_step(model: nn.Module, text: np.ndarray, batch: int, length: int, compiled: bool):
    """A function that trains one step on random rows of `text` (byte ids) and returns the loss."""
    torch.manual_seed(0)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
    forward = torch.compile(model) if compiled else model
    ids = torch.from_numpy(text.astype(np.int64))

    def step() -> float:
        starts = torch.randint(len(ids) - length - 1, (batch,))
        tokens = torch.stack([ids[i : i + length] for i in starts])
        labels = torch.stack([ids[i + 1 : i + 1 + length] for i in starts])
        loss = forward(tokens, labels)[1]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step
