"""What a checkpoint is good for without its run: validation loss and text."""

from typing import Any

from tpu_train import config as config_lib
from tpu_train import data, generate, paths, precision, processes
from tpu_train import mesh as mesh_lib
from tpu_train.checkpoint import Checkpoints
from tpu_train.config import Config, UserError
from tpu_train.evaluate import evaluate, make_eval_step
from tpu_train.models.held import hold_in_int8
from tpu_train.report import say
from tpu_train.train_step import TrainState, abstract_state


def evaluate_checkpoint(flag: dict[str, Any]) -> int:
    """Prints the mean cross entropy per token over the whole validation split."""
    step, config, model, mesh, compute = _load(flag)
    batches = data.validation_batches(config.data, vocab_size=config.model.vocab_size, **processes.batch_share(mesh))
    loss = evaluate(make_eval_step(compute), model, batches, mesh)
    whose = "of the moving average, " if flag["ema"] else ""
    say(f"step {step}  validation loss {loss:.4f} ({whose}nats per token, whole validation split)")
    return 0


def generate_from_checkpoint(flag: dict[str, Any]) -> int:
    """Prints the samples that the flags of `tpu-train generate` ask for."""
    _, config, model, _, compute = _load(flag)
    texts = generate.sample_text(
        *(model, data.load_tokenizer(config.data.tokenizer), flag["prompt"], compute),
        num_tokens=flag["num_tokens"],
        num_samples=flag["num_samples"],
        temperature=flag["temperature"],
        top_k=flag["top_k"],
        seed=flag["seed"],
    )
    for number, text in enumerate(texts, start=1):
        if len(texts) > 1:
            say(f"--- {number}")
        say(text)
    return 0


def _load(flag: dict[str, Any]):
    """(step, config, model, mesh, compute) of a checkpoint, its config with overrides of mesh, data or run.

    The model is the moving average of the weights where the flag `ema` is set.
    """
    workdir, step, overrides = flag["workdir"], flag["step"], flag["set"]
    if not (paths.at(workdir) / "checkpoints").is_dir():
        raise UserError(f"{workdir} has no checkpoints; give the --workdir of a run that has saved")
    with Checkpoints(workdir, keep_last=None) as checkpoints:
        step = checkpoints.find(step)
        config: Config = checkpoints.saved_config(step)
        for override in overrides:
            if override.split(".")[0] in ("model", "optim") or override.split("=")[0] == "run.spike_factor":
                raise UserError(f"--set {override}: a checkpoint's model and optim are what they were trained with")
            config = config_lib.apply_override(config, override)
        config_lib.check(config)
        mesh = mesh_lib.make_mesh(config.mesh)
        mesh_lib.check_fits(config, mesh)
        compute = precision.resolve(config.run, mesh_lib.platform(mesh), config.mesh)
        if flag["ema"] and config.optim.ema_decay is None:
            raise UserError(f"--ema: the run in {workdir} kept no moving average at step {step} (optim.ema_decay)")
        state: TrainState = checkpoints.restore(step, abstract_state(config, compute))
        model = state.average if flag["ema"] else state.model
        if flag["weights"] == "int8":
            model, before, now = hold_in_int8(model)
            say(
                f"the blocks' matrices are held in int8: {now / 1e6:,.1f} MB in place of {before / 1e6:,.1f} in float32"
            )
    return step, config, model, mesh, compute
