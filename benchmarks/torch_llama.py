"""The yardstick of gpu.py: a plain PyTorch transformer of Llama's shape and its training step; needs torch alone.

    python benchmarks/torch_llama.py '{"layers": 16, "dim": 2048, ...}'

RMSNorm, rotary positions, grouped-query attention by scaled_dot_product_attention, SwiGLU, float32 weights, autocast to
bfloat16, fused AdamW, clipping at 1, torch.compile. Where memory runs out, blocks are recomputed in the backward pass,
and where torch.compile fails, the step is eager; the answer, a line of JSON, says both.
"""

import json
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def rotate(x, cos, sin):
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = s["heads"], s["kv_heads"], s["head_dim"]
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.attention_norm, self.mlp_norm = nn.RMSNorm(s["dim"], s["eps"]), nn.RMSNorm(s["dim"], s["eps"])
        self.q, self.out = nn.Linear(s["dim"], width, bias=False), nn.Linear(width, s["dim"], bias=False)
        self.k, self.v = nn.Linear(s["dim"], kv_width, bias=False), nn.Linear(s["dim"], kv_width, bias=False)
        self.gate, self.up = nn.Linear(s["dim"], s["mlp"], bias=False), nn.Linear(s["dim"], s["mlp"], bias=False)
        self.down = nn.Linear(s["mlp"], s["dim"], bias=False)

    def forward(self, x, cos, sin):
        B, T, _ = x.shape
        y = self.attention_norm(x)
        q = self.q(y).view(B, T, self.heads, self.head_dim).transpose(1, 2)
        k, v = (w(y).view(B, T, self.kv_heads, self.head_dim).transpose(1, 2) for w in (self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.out(o.transpose(1, 2).reshape(B, T, -1))
        y = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, s, recompute: bool):
        super().__init__()
        self.recompute = recompute
        self.tokens, self.norm = nn.Embedding(s["vocab"], s["dim"]), nn.RMSNorm(s["dim"], s["eps"])
        self.blocks = nn.ModuleList(Block(s) for _ in range(s["layers"]))
        self.head = nn.Linear(s["dim"], s["vocab"], bias=False)
        if s["tied"]:
            self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        frequencies = s["theta"] ** (-torch.arange(0, s["head_dim"], 2).float() / s["head_dim"])
        angles = torch.arange(s["length"]).float()[:, None] * frequencies[None]
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens, labels):
        x = self.tokens(tokens)
        for block in self.blocks:
            inputs = (x, self.cos, self.sin)
            x = checkpoint(block, *inputs, use_reentrant=False) if self.recompute else block(*inputs)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def time_steps(s, device: str, recompute: bool, compiled: bool) -> dict:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Llama(s, recompute).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
    forward = torch.compile(model) if compiled else model
    tokens = torch.randint(s["vocab"], (s["rows"], s["length"] + 1), device=device)

    def step():
        with torch.autocast(device, torch.bfloat16):
            loss = forward(tokens[:, :-1], tokens[:, 1:].contiguous())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    losses, seconds = [float(step()) for _ in range(3)], []
    for _ in range(s["repeats"]):
        wait()
        began = time.perf_counter()
        for _ in range(s["steps"]):
            loss = step()
        wait()
        seconds.append((time.perf_counter() - began) / s["steps"])
        losses.append(float(loss))
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return {
        "seconds": statistics.median(seconds),
        "range": [min(seconds), max(seconds)],
        "memory_bytes": peak,
        "losses": losses,
        "recomputed": recompute,
        "compiled": compiled,
        "torch": torch.__version__,
    }


def main() -> None:
    s = json.loads(sys.argv[1])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device != s.get("device", "cuda"):
        raise SystemExit("torch_llama.py: this torch sees no GPU")
    recompute, compiled, why = False, True, []
    while True:
        try:
            answer = time_steps(s, device, recompute, compiled)
            break
        except torch.OutOfMemoryError:
            if recompute:
                raise
            recompute = True
            why.append("out of memory without recomputing")
        except Exception as error:  # torch.compile fails in many ways
            if not compiled:
                raise
            compiled = False
            why.append(f"torch.compile failed: {type(error).__name__}")
        if device == "cuda":
            torch.cuda.empty_cache()
    print(json.dumps(answer | {"why": why}), flush=True)


if __name__ == "__main__":
    main()
