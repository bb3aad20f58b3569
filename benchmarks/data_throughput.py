"""Tokens per second of the data pipeline alone, beside what a training step would take, and its memory over time.

    python benchmarks/data_throughput.py [--seconds=5] [--workers=2] [--megabytes=8]
    python benchmarks/data_throughput.py --minutes=60

The text is Python's own sources on this machine, as JSONL, up to --megabytes and over again if there are fewer; the
tokenizer a byte-level BPE of 32,768 ids that is trained on them. What a step takes is the plan's best step time for
configs/llama_1b.py on 8 v5e, a formula, and so the most that can be asked of the pipeline. With --minutes batches are
drawn from the token cache as fast as they come, and memory is what the process has to itself (RssAnon), so pages of the
mapped cache do not count.
"""

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tpu_train import chips, data
from tpu_train import config as config_lib
from tpu_train.config import DataConfig
from tpu_train.data.opening import open_source
from tpu_train.data.texts import stdlib_files
from tpu_train.planning.report import Inputs, report

ROOT = Path(__file__).resolve().parent.parent


def write_corpus(path: Path, megabytes: float) -> int:
    """JSONL of the standard library, up to `megabytes`, some of it again if there is less; gives the bytes written."""
    written = 0
    with path.open("w", encoding="utf-8") as file:
        for source in itertools.cycle(stdlib_files()):
            written += file.write(json.dumps({"text": Path(source).read_text(encoding="utf-8")}) + "\n")
            if written >= megabytes * 1e6:
                return written
    raise AssertionError("there is no standard library")


def train_tokenizer(path: Path) -> None:
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=32_768,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train(stdlib_files(), trainer)
    tokenizer.save(str(path))


def needed() -> tuple[float, int]:
    """(tokens per second that a step takes, by the plan; rows of a batch)."""
    config = config_lib.load(str(ROOT / "configs" / "llama_1b.py"))
    plan = report(config, chips.parse("v5e-8", 0), Inputs(None, 0.4, None, None))
    return plan["batch"]["tokens"] / plan["step"]["best"], config.data.batch_size


def speed(config: DataConfig, seconds: float) -> tuple[float, float | None]:
    """Tokens per second, and per core-second where no workers share the work; after a few batches, which start them."""
    batches = data.train_batches(config, vocab_size=1 << 17)
    for _ in range(5):
        next(batches)
    began, used, tokens = time.monotonic(), time.process_time(), 0
    while time.monotonic() - began < seconds:
        tokens += next(batches)["tokens"].size
    taken, used = time.monotonic() - began, time.process_time() - used
    batches.close()
    return tokens / taken, None if config.workers else tokens / used


def own_memory() -> int:
    """Bytes that this process has to itself."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def soak(config: DataConfig, seconds: float, say: Callable[[str], None], lines: int = 12) -> list[int]:
    """Draws batches for `seconds`; `own_memory` at the start, once warm, and in `lines` equal steps from there."""
    batches = data.train_batches(config, vocab_size=1 << 17)
    for _ in range(20):
        next(batches)
    began, tokens, found = time.monotonic(), 0, [own_memory()]
    while len(found) <= lines:
        tokens += next(batches)["tokens"].size
        passed = time.monotonic() - began
        if passed >= seconds * len(found) / lines:
            found.append(own_memory())
            say(f"| {passed / 60:.1f} | {tokens / passed / 1e6:.1f} | {found[-1] / 1e6:.1f} |")
    batches.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5, help="for each line of the table")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=8)
    parser.add_argument("--minutes", type=float, default=0, help="soak: memory over so many minutes")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        size = write_corpus(here / "text.jsonl", flags.megabytes)
        train_tokenizer(here / "tokenizer.json")
        eaten, rows = needed()
        text = DataConfig(source="jsonl", paths=(str(here / "text.jsonl"),), seq_len=2048, batch_size=rows)
        bpe = config_lib.apply_override(config_lib.Config(data=text), f"data.tokenizer={here / 'tokenizer.json'}").data
        began, used = time.monotonic(), time.process_time()
        cached = config_lib.apply_override(config_lib.Config(data=bpe), f"data.cache={here / 'cache'}").data
        made = open_source(cached, 1 << 17).size
        built = made / (time.monotonic() - began), made / (time.process_time() - used)
        if flags.minutes:
            print("| minutes | M tokens/s | RssAnon, MB |\n|---|---|---|")
            memory = soak(cached, flags.minutes * 60, lambda line: print(line, flush=True))
            print(f"from {memory[0] / 1e6:.1f} to {memory[-1] / 1e6:.1f} MB")
            return
        workers = [(f"{flags.workers} workers", {"workers": flags.workers})]
        print(f"{size / 1e6:.0f} MB of text, {made / 1e6:.1f} M BPE tokens")
        print(f"predicted for 8 v5e, llama_1b (the plan's best step): {eaten:,.0f} tokens/s\n")
        print("| pipeline | tokens/s | times the step | a core-second | times the step |\n|---|---|---|---|---|")
        rates: dict[str, tuple[float, float | None]] = {"building the token cache, one process": built}
        for name, config in (("bytes", text), ("BPE", bpe), ("token cache", cached)):
            for how, more in [("a thread", {}), *(workers if flags.workers else [])]:
                rates[f"{name}, {how}"] = speed(DataConfig(**{**vars(config), **more}), flags.seconds)
        for name, found in rates.items():
            print(f"| {name} |", " | ".join("| " if x is None else f"{x:,.0f} | {x / eaten:.1f}" for x in found), "|")


if __name__ == "__main__":
    main()
