"""Random rows for the checks: documents packed two a row, the same documents alone, always with padding."""

import numpy as np

from tpu_train.config import Config
from tpu_train.models import dropout

Batch = dict[str, np.ndarray]


def packed(config: Config, rows: int, seed: int) -> Batch:
    """[rows, T]: two documents and padding, of other lengths in every row; one document where rows are not packed."""
    rng = np.random.default_rng(seed)
    T, V = config.data.seq_len, config.model.vocab_size
    tokens, labels = rng.integers(0, V, (2, rows, T), dtype=np.int32)
    length_B1 = rng.integers(T // 2, T, (rows, 1))
    first_B1 = rng.integers(1, length_B1) if config.data.packing else length_B1
    return _rows(tokens, labels, first_B1, length_B1)


def _rows(tokens, labels, first_B1, length_B1) -> Batch:
    at_1T = np.arange(tokens.shape[1])[None]
    return {
        "tokens": tokens,
        "labels": labels,
        "positions": np.where(at_1T < first_B1, at_1T, at_1T - first_B1).astype(np.int32),
        "segment_ids": np.where(at_1T < first_B1, 1, np.where(at_1T < length_B1, 2, 0)).astype(np.int32),
        "weights": (at_1T < length_B1).astype(np.float32),
        "places": dropout.places(*tokens.shape),
    }


def packed_and_alone(config: Config, rows: int, seed: int) -> tuple[Batch, Batch]:
    """The same documents twice, in `rows` rows (even): packed into the first half of them; each in a row of its own."""
    rng = np.random.default_rng(seed)
    T, V, half = config.data.seq_len, config.model.vocab_size, rows // 2
    tokens, labels = rng.integers(0, V, (2, half, T), dtype=np.int32)
    length_B1 = rng.integers(T // 2, T + 1, (half, 1))
    first_B1 = rng.integers(1, length_B1)
    together = _rows(tokens, labels, first_B1, length_B1)
    ends = [(0, int(a), int(b)) for a, b in zip(first_B1[:, 0], length_B1[:, 0], strict=True)]

    def pad(parts):
        parts = [*parts, *[np.zeros(0, parts[0].dtype)] * (rows - len(parts))]
        return np.stack([np.pad(part, (0, T - len(part))) for part in parts])

    def cut(x):
        return pad([row[a:b] for row, (start, middle, end) in zip(x, ends, strict=True)
                    for a, b in ((start, middle), (middle, end))])  # fmt: skip

    alone = {name: cut(np.minimum(x, 1) if name == "segment_ids" else x) for name, x in together.items()}
    return {name: pad(list(x)) for name, x in together.items()}, alone


def step_batches(config: Config, steps: int) -> list[Batch]:
    """A batch of [A, B, T] for each step."""
    micro, rows = config.optim.accumulation_steps, config.data.batch_size
    return [
        {name: x.reshape(micro, rows // micro, -1) for name, x in packed(config, rows, seed).items()}
        for seed in range(steps)
    ]
