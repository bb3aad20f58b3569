"""The `tpu-train` command: train, eval, generate, diff, blame, check, plan, compile, kernels."""

import logging
import os
import signal
import sys
import time
import traceback
from importlib import util
from pathlib import Path
from typing import Any

from absl import flags

START_TIME = time.monotonic()

COMMANDS = {
    "train": "train the model that a config file describes, or continue where its workdir stopped",
    "eval": "validation loss of a checkpoint over the whole validation split",
    "generate": "sample text from a checkpoint",
    "diff": "the first step where two runs part, and by how much: tpu-train diff WORKDIR1 WORKDIR2",
    "blame": "the first tensor that was not finite in a skipped step, done again from the checkpoint before",
    "check": "does a config compute the same on every mesh, however its rows are cut, by every kernel",
    "plan": "memory, time, cost and a mesh for a config on given chips, by formulas; needs no chip",
    "compile": "the real train step through the compiler of a TPU or GPU: memory, work, traffic; needs none",
    "kernels": "predicted cycles of the Pallas kernels on a TPU, from its compiler; needs no TPU",
}


def run() -> None:
    """Entry point of the console command."""
    at_once = False
    try:
        code = main(sys.argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("tpu-train: stopped at once", file=sys.stderr)
        code, at_once = 128 + signal.SIGINT, True
    except BrokenPipeError:
        if not _stdout_is_closed():
            raise
        code, at_once = 128 + signal.SIGPIPE, True
    except Exception as error:
        if os.environ.get("TPU_TRAIN_PROCESSES", "1") in ("", "1"):
            raise
        # Left to itself Python would end at a barrier, where the other processes never come.
        _say_why(error)
        code = 1
    if at_once or code in (1, 2):
        # A failed save, or a step still compiling for a run that was refused, has threads that Python would wait for.
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _stdout_is_closed() -> bool:
    """Whether the reader of our output went away, as `| head` does; other pipes break too, of a worker for one."""
    try:
        print(flush=True)
    except BrokenPipeError:
        return True
    return False


def main(argv: list[str]) -> int:
    """Runs `argv` ("tpu-train", command, flags...); returns the exit code: 2 for bad input, 1 for a run that failed."""
    if len(argv) < 2 or argv[1] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if len(argv) > 1 else 2
    command = argv[1]
    if command not in COMMANDS:
        print(f"tpu-train: no command {command!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    values = _flags_of(command)
    if any(arg in ("-h", "--help", "-help", "--helpfull") for arg in argv[2:]):
        print(_help(command, values))
        return 0
    from tpu_train.config import UserError

    try:
        rest = values([f"tpu-train {command}", *argv[2:]])[1:]
        if command == "diff":
            return _diff(list(rest), values)
        if rest:
            raise UserError(f"{command} takes flags only, not {rest[0]!r}; see tpu-train {command} --help")
        return _run(command, values, argv[1:])
    except (UserError, flags.Error) as error:
        return _fail(error, 2)


def _diff(workdirs: list[str], values: flags.FlagValues) -> int:
    from tpu_train.config import UserError

    if len(workdirs) != 2:
        raise UserError(f"diff takes two workdirs, not {len(workdirs)}: tpu-train diff runs/a runs/b")
    os.environ["JAX_PLATFORMS"] = "cpu"  # to read with
    _prepare_jax()
    from tpu_train import diff

    return diff.show(workdirs[0], workdirs[1], limit=int(values["arrays"].value or 1))


def _fail(error: Exception, code: int) -> int:
    print("tpu-train:", "; ".join([str(error), *getattr(error, "__notes__", [])]), file=sys.stderr)
    return code


def _say_why(error: Exception) -> None:
    if "Gloo" in str(error):  # one line, for it is not this process that failed
        _fail(Exception(f"lost another process of the run ({str(error).splitlines()[0]})"), 1)
    else:
        traceback.print_exception(error)


def _flags_of(command: str) -> flags.FlagValues:
    values = flags.FlagValues()

    def add(define, name, default, text, **more):
        define(name, default, text, flag_values=values, **more)

    if command == "kernels":
        add(flags.DEFINE_string, "topology", "v5e:1x1", "the TPU: v4, v5e, v5p, v6e or 7x, and a shape such as :1x1")
        add(flags.DEFINE_string, "op", None, "the kernels of this op only")
        add(flags.DEFINE_bool, "json", False, "print JSON in place of the table")
        add(flags.DEFINE_string, "update_budget", None, "also write the cycles into this budget file")
        return values
    if command == "diff":
        add(flags.DEFINE_integer, "arrays", 10, "list so many arrays that differ", lower_bound=1)
        return values
    if command == "compile":
        add(flags.DEFINE_string, "config", None, "the run: a Python file with `def config() -> Config`")
        add(
            flags.DEFINE_string,
            "topology",
            "v5e:4x4",
            "one slice, as v6e:4x4 or v5p:4x4x4, or the cards of a host, as h100:8",
        )
        text = "slices or hosts; mesh.data goes across them, or what mesh.*_slices says"
        add(flags.DEFINE_integer, "num_slices", 1, text, lower_bound=1)
        text = "LIBTPU_INIT_ARGS, or XLA_FLAGS for NVIDIA cards; default: what launch/xla_flags.tsv has for the TPU"
        add(flags.DEFINE_string, "xla_flags", None, text)
        add(flags.DEFINE_bool, "search", False, "try remat policies, meshes and micro-batches, and rank them")
        add(flags.DEFINE_bool, "json", False, "print JSON in place of the table")
        add(flags.DEFINE_multi_string, "set", [], "section.field=value, over the config's own; may be repeated")
        return values
    if command == "plan":
        _plan_flags(add)
        return values
    if command == "check":
        _check_flags(add)
        return values
    if command == "train":
        add(flags.DEFINE_string, "config", None, "the run: a Python file with `def config() -> Config`")
        add(flags.DEFINE_string, "profile_steps", None, "FIRST:LAST: trace these steps into WORKDIR/profile, for xprof")
        add(flags.DEFINE_bool, "dump_hlo", False, "write the step's program, lowered and compiled, into WORKDIR/hlo")
    elif command == "blame":
        add(flags.DEFINE_string, "config", None, "the run's config file, if no checkpoint came before the step")
        add(flags.DEFINE_integer, "step", None, "default: the first of the last row of steps that were not finite")
    else:
        add(flags.DEFINE_string, "config", None, "the run's config file, to find its workdir; or give --workdir")
        add(flags.DEFINE_integer, "step", None, "the checkpoint's step; default: the newest")
        add(flags.DEFINE_bool, "ema", False, "use the moving average of the weights, where optim.ema_decay kept one")
        text = "as stored, or int8: the blocks' matrices in a quarter of the memory, half of bfloat16's"
        add(flags.DEFINE_enum, "weights", "stored", ["stored", "int8"], help=text)
    add(flags.DEFINE_string, "workdir", None, "where checkpoints and metrics go; default: runs/<name of the config>")
    add(flags.DEFINE_multi_string, "set", [], "section.field=value, over the config's own; may be repeated")
    add(flags.DEFINE_integer, "processes", 1, "run as so many processes on this machine, each with a CPU device")
    if command == "generate":
        add(flags.DEFINE_string, "prompt", "", "the text to continue")
        add(flags.DEFINE_integer, "num_tokens", 200, "tokens to sample")
        add(flags.DEFINE_integer, "num_samples", 1, "continuations of the prompt")
        add(flags.DEFINE_float, "temperature", 0.8, "0 always takes the likeliest token")
        add(flags.DEFINE_integer, "top_k", None, "sample from the k likeliest tokens only")
        add(flags.DEFINE_integer, "seed", 0, "of the sampling")
    return values


def _plan_flags(add) -> None:
    add(flags.DEFINE_string, "config", None, "the run's config file")
    add(flags.DEFINE_multi_string, "set", [], "section.field=value, over the config's own; may be repeated")
    add(flags.DEFINE_string, "chips", None, "which and how many: v5p-256, v5e:4x8, h100-16")
    add(flags.DEFINE_integer, "slices", 0, "slices that the chips come in; 0: as few as can be", lower_bound=0)
    add(flags.DEFINE_float, "tokens", None, "tokens to train on; default: the config's steps")
    add(flags.DEFINE_float, "mfu", 0.4, "share of the chips' peak to count on")
    add(flags.DEFINE_float, "watts", None, "of one chip; default: the table's")
    add(flags.DEFINE_float, "price", None, "USD of one chip for an hour; default: the table's")
    add(flags.DEFINE_bool, "json", False, "print JSON in place of text")
    add(flags.DEFINE_string, "html", None, "also write a page of charts to this file")


def _check_flags(add) -> None:
    add(flags.DEFINE_string, "config", None, "the run's config file")
    add(flags.DEFINE_multi_string, "set", [], "section.field=value, over the config's own; may be repeated")
    add(flags.DEFINE_string, "meshes", None, "such as data=2,fsdp=4;tensor=2; default: its own, pairs, triples of axes")
    add(flags.DEFINE_integer, "devices", None, "default: all accelerators here, else 8 CPU devices", lower_bound=1)
    add(flags.DEFINE_integer, "steps", 3, "steps on each mesh", lower_bound=1)
    add(flags.DEFINE_bool, "full", False, "with the config's own sizes, not with a small copy's")
    add(flags.DEFINE_float, "replicated_limit", 1.0, "MB that an array outside of the table may have on every device")
    add(flags.DEFINE_bool, "json", False, "print JSON in place of text")


def _overview() -> str:
    lines = ["usage: tpu-train COMMAND [--flag=value ...]", ""]
    lines += [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
    return "\n".join([*lines, "", "tpu-train COMMAND --help lists the command's flags."])


def _help(command: str, values: flags.FlagValues) -> str:
    lines = [f"usage: tpu-train {command} [--flag=value ...]", f"  {COMMANDS[command]}", ""]
    for name in values:
        default = values[name].default
        shown = f" (default: {default})" if default not in (None, "", []) else ""
        text = str(values[name].help).partition("\n")[0].rstrip(";")  # absl adds a line to repeatable flags
        lines.append(f"  --{name:<12} {text}{shown}")
    if command == "train":
        from tpu_train.config import Config, flatten

        lines += ["", "fields for --set, and their defaults:"]
        lines += [f"  {name} = {value}" for name, value in flatten(Config())]
    return "\n".join(lines)


def _run(command: str, values: flags.FlagValues, argv: list[str]) -> int:
    from tpu_train import config as config_lib

    flag: dict[str, Any] = {name: values[name].value for name in values}
    if command in ("kernels", "compile"):
        os.environ["JAX_PLATFORMS"] = "cpu"  # to trace with; the TPU's compiler runs in a process of its own
        _prepare_jax()
        from tpu_train import aot, kernels

        return (kernels if command == "kernels" else aot).show(flag)
    if command == "plan":
        from tpu_train import plan

        return plan.show(flag)
    if command == "check":
        return _check(flag)
    from tpu_train import local_processes

    overrides = list(flag["set"])
    if flag["workdir"]:
        overrides.append(f"run.workdir={flag['workdir']}")
    if command == "train":
        if not flag["config"]:
            raise config_lib.UserError("train needs --config=FILE, such as --config=configs/tiny.py")
        config = config_lib.load(flag["config"], overrides)
        traced = config_lib.profile_range(flag["profile_steps"], config)
        if local_processes.wanted(flag["processes"]):
            return local_processes.run(flag["processes"], argv)
        _prepare_jax()
        if config.run.deterministic:  # XLA reads it once; on CPU and TPU it changes nothing
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true".strip()
        _join()
        from tpu_train import checkpoint, data, processes, report, train

        try:
            code = train.train(config, START_TIME, profile_steps=traced, dump_hlo=flag["dump_hlo"])
            processes.leave()
            return code
        except (report.RunFailed, checkpoint.SaveFailed, data.WorkerDied) as error:
            return _fail(error, 1)
    if not flag["workdir"]:
        if not flag["config"]:
            raise config_lib.UserError(f"{command} needs --workdir=DIR or --config=FILE")
        flag["workdir"] = config_lib.load(flag["config"], overrides).run.workdir
    if local_processes.wanted(flag["processes"]):
        return local_processes.run(flag["processes"], argv)
    _prepare_jax()
    _join()
    if command == "blame":
        from tpu_train import blame

        return blame.show(flag)
    from tpu_train import inference

    return inference.evaluate_checkpoint(flag) if command == "eval" else inference.generate_from_checkpoint(flag)


def _check(flag: dict[str, Any]) -> int:
    from tpu_train import config as config_lib
    from tpu_train import cpu

    if not flag["config"]:
        raise config_lib.UserError("check needs --config=FILE, such as --config=configs/tiny.py")
    config = config_lib.load(flag["config"], flag["set"])
    if not cpu.has_accelerator() or os.environ.get("JAX_PLATFORMS") == "cpu":
        cpu.pretend_devices(flag["devices"] or 8, compile_quickly=not flag["full"])
    _prepare_jax()
    from tpu_train import checking

    return checking.show(config, flag)


def _join() -> None:
    """Joins the other processes of the run, if there are any."""
    from tpu_train import local_processes, processes

    local_processes.follow_parent()
    processes.join()


def _prepare_jax() -> None:
    """Settings that must stand before jax is imported."""
    from tpu_train import cpu

    if not cpu.has_accelerator():
        cpu.keep_freed_memory()
        if util.find_spec("libtpu"):  # here for its compiler; jax would look for a TPU, and libtpu warn of none
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(cache) / "tpu_train" / "xla"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "2")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from absl import logging as absl_logging

    # Orbax tells of every save, and of a failed one with every thread's traceback; what matters it raises too.
    absl_logging.set_verbosity(absl_logging.FATAL)
    logging.getLogger("absl").setLevel(logging.CRITICAL)


if __name__ == "__main__":
    run()
