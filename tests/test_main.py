"""The command line: what it refuses and in which words, its help, eval and generate from a trained workdir."""

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_train import config as config_lib
from tpu_train import data, main, mesh, precision
from tpu_train.checkpoint import Checkpoints
from tpu_train.train_step import abstract_state

ROOT = Path(__file__).parent.parent
CPU = precision.Compute(jnp.dtype("float32"), "xla", "cpu")
CONFIG = """\
from tpu_train.config import CheckpointConfig, Config, DataConfig, ModelConfig, OptimConfig, RunConfig


def config() -> Config:
    return Config(
        model=ModelConfig(num_layers=2, model_dim=32, mlp_dim=64),
        data=DataConfig(source="text", paths=({paths!r},), seq_len=32, batch_size=8),
        optim=OptimConfig(warmup_steps=2, peak_lr=1e-2),
        checkpoint=CheckpointConfig(every_steps=4),
        run=RunConfig(steps=8, log_every=4, eval_every=8, eval_batches=1000, sample_tokens=0),
    )
"""


@pytest.fixture(autouse=True)
def on_one_device(monkeypatch):
    make = mesh.make_mesh
    monkeypatch.setattr(mesh, "make_mesh", lambda config: make(config, jax.devices()[:1]))


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("config")
    for i in range(20):
        (folder / f"{i:02}.txt").write_text("".join(f"def f{i}_{j}(x): return x + {i * j}\n" for j in range(20)))
    (folder / "tiny.py").write_text(CONFIG.format(paths=f"{folder}/*.txt"))
    return folder / "tiny.py"


@pytest.fixture(scope="module")
def trained(config_file, tmp_path_factory):
    """The workdir of a run of 8 steps with checkpoints of steps 4 and 8."""
    workdir = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        make = mesh.make_mesh
        patch.setattr(mesh, "make_mesh", lambda config: make(config, jax.devices()[:1]))
        assert main.main(["tpu-train", "train", f"--config={config_file}", f"--workdir={workdir}"]) == 0
    return workdir


@pytest.fixture
def tpu_train(capsys):
    """tpu_train(arguments...) -> (exit code, stdout, stderr)."""

    def call(*arguments):
        capsys.readouterr()
        code = main.main(["tpu-train", *map(str, arguments)])
        return code, *capsys.readouterr()

    return call


def child(code, *arguments, **options):
    return subprocess.run(
        [sys.executable, *(["-c", code] if code else ["-m", "tpu_train.main"]), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        **options,
    )


def cpu_seconds_of_children():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_without_arguments_it_shows_the_commands_and_fails(tpu_train):
    code, out, err = tpu_train()
    assert code == 2
    assert err == ""
    assert out.startswith("usage: tpu-train COMMAND")
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ")] == list(main.COMMANDS)


@pytest.mark.parametrize("flag", ["--help", "-h", "help"])
def test_help_shows_the_commands(tpu_train, flag):
    code, out, _ = tpu_train(flag)
    assert code == 0
    assert "generate" in out


@pytest.mark.parametrize("command", main.COMMANDS)
def test_help_of_a_command_lists_its_flags_soon_and_without_jax(command):
    program = "import sys; from tpu_train import main; main.main(sys.argv); sys.exit('jax' in sys.modules)"
    began = cpu_seconds_of_children()
    done = child(program, command, "--help")
    assert cpu_seconds_of_children() - began < 2
    assert (done.returncode, done.stderr) == (0, "")
    listed = re.findall(r"^  --(\w+) +(\S.*)$", done.stdout, re.M)
    wanted = {
        "train": "config profile_steps dump_hlo workdir set processes",
        "eval": "config step ema weights workdir set processes",
        "diff": "arrays",
        "blame": "config step workdir set processes",
        "check": "config set meshes devices steps full replicated_limit json",
        "generate": "config step ema weights workdir set processes prompt num_tokens num_samples temperature top_k "
        "seed",
        "plan": "config set chips slices tokens mfu watts price json html",
        "compile": "config topology num_slices xla_flags search json set",
        "kernels": "topology op json update_budget",
    }
    assert [name for name, _ in listed] == wanted[command].split()
    assert "repeat this option" not in done.stdout
    assert ("data.packing = True" in done.stdout) == (command == "train")
    # config.py and main.py are all that a mistyped command may cost.
    assert child("import sys; from tpu_train import main, config; sys.exit('jax' in sys.modules)").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], f"no command 'trian'; there are {', '.join(main.COMMANDS)}"),
        (["--config=x"], f"no command '--config=x'; there are {', '.join(main.COMMANDS)}"),
        (["train", "--confg=x"], "Unknown command line flag 'confg'. Did you mean: config ?"),
        (["eval", "--temperature=1"], "Unknown command line flag 'temperature'"),
        (["train", "run.py"], "train takes flags only, not 'run.py'; see tpu-train train --help"),
        (["train"], "train needs --config=FILE, such as --config=configs/tiny.py"),
        (["train", "--config"], "Missing value for flag --config"),
        (["train", "--config=CONFIGS/tny.py"], "no config file 'CONFIGS/tny.py'; did you mean 'CONFIGS/tiny.py'?"),
        (["train", "--config=TINY", "--set=model.model_dm=3"], "'model.model_dm'; did you mean 'model.model_dim'?"),
        (["train", "--config=TINY", "--set", "optim.lr=1"], "unknown config field 'optim.lr'"),
        (["train", "--config=TINY", "--set=run.steps"], "--set 'run.steps' has no value; write --set section.field="),
        (["train", "--config=TINY", "--set=run.steps=1e3"], "run.steps='1e3' is not a whole number"),
        (["train", "--config=TINY", "--set=data.packing=0"], "data.packing='0' is not true or false"),
        (["train", "--config=TINY", "--set=run.steps=0"], "run.steps is 0; it must be above 0"),
        (["train", "--config=TINY", "--workdir=TINY"], "can't make the folder TINY/checkpoints: Not a directory"),
        (["train", "--config=TINY", "--profile_steps=5:9"], "--profile_steps=5:9 goes past the run's last step, run.s"),
        (["eval"], "eval needs --workdir=DIR or --config=FILE"),
        (["generate"], "generate needs --workdir=DIR or --config=FILE"),
        (["eval", "--workdir=NONE"], "NONE has no checkpoints; give the --workdir of a run that has saved"),
        (["eval", "--workdir=EMPTY"], "EMPTY/checkpoints has no complete checkpoint"),
        (["generate", "--workdir=NONE", "--step=x"], "flag --step=x: invalid literal"),
        (
            ["eval", "--workdir=RUN", "--ema"],
            "--ema: the run in RUN kept no moving average at step 8 (optim.ema_decay)",
        ),
        (["eval", "--workdir=RUN", "--step=5"], "RUN/checkpoints has no checkpoint of step 5; it has 4, 8"),
        (["eval", "--workdir=RUN", "--set=model.num_layers=1"], "a checkpoint's model and optim are what they were"),
        (["eval", "--workdir=RUN", "--set=data.sed=1"], "unknown config field 'data.sed'; did you mean 'data.seed'?"),
        (["generate", "--workdir=RUN", "--temperature=-1"], "temperature=-1.0 must be 0 or more"),
        (["generate", "--workdir=RUN", "--num_tokens=0"], "num_tokens=0, num_samples=1 and top_k=None must be at lea"),
    ],
)
def test_bad_input_is_refused_in_one_line(tpu_train, config_file, trained, tmp_path, arguments, message):
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    paths = {
        "CONFIGS": config_file.parent,
        "TINY": config_file,
        "NONE": tmp_path / "none",
        "EMPTY": tmp_path / "empty",
        "RUN": trained,
    }
    for name, path in paths.items():
        arguments = [argument.replace(name, str(path)) for argument in arguments]
        message = message.replace(name, str(path))
    code, out, err = tpu_train(*arguments)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("tpu-train: ")
    assert message in line
    assert not (tmp_path / "none").exists()


def test_false_is_false(tpu_train, config_file, tmp_path):
    workdir = tmp_path / "run"
    more = ["--set", "data.packing=false", "--set=model.tie_embeddings=False", "--set=run.steps=2"]
    code, out, _ = tpu_train("train", "--config", config_file, "--workdir", workdir, *more)
    assert code == 0
    assert "  data.packing = False\n" in out
    assert "  model.tie_embeddings = False\n" in out
    with Checkpoints(workdir, keep_last=None) as checkpoints:
        saved = checkpoints.saved_config(2)
        names = checkpoints.restore(2, abstract_state(saved, CPU)).model
    assert (saved.data.packing, saved.model.tie_embeddings) == (False, False)
    assert names.head_VD is not None


def load(workdir, step):
    with Checkpoints(workdir, keep_last=None) as checkpoints:
        saved = checkpoints.saved_config(step)
        return saved, checkpoints.restore(step, abstract_state(saved, CPU)).model


def loss_by_hand(workdir, step, place):
    """Cross entropy per token of the validation split: softmax in float64 of the model's logits."""
    saved, model = load(workdir, step)
    hidden = jax.jit(lambda model, batch: model(batch["tokens"], batch["positions"], batch["segment_ids"], CPU)[0])
    total, count = 0.0, 0
    for batch in data.validation_batches(saved.data, vocab_size=saved.model.vocab_size):
        x_BTD = hidden(model, place(batch))
        logits_BTV = np.asarray(x_BTD, np.float64) @ np.asarray(model.output_VD, np.float64).T
        lse_BT = np.log(np.sum(np.exp(logits_BTV), axis=-1))
        picked_BT = np.take_along_axis(logits_BTV, batch["labels"][..., None], axis=-1)[..., 0]
        counted_BT = batch["weights"] > 0
        total, count = total + np.sum((lse_BT - picked_BT)[counted_BT]), count + np.sum(counted_BT)
    return total / count


def test_eval_and_generate_pass_over_a_damaged_checkpoint_but_not_one_asked_for(tpu_train, trained, tmp_path):
    workdir = shutil.copytree(trained, tmp_path / "run")
    array = max((workdir / "checkpoints" / "8" / "state" / "d").iterdir())
    array.write_bytes(array.read_bytes()[1:])
    reason = f"{workdir}/checkpoints/8 is damaged{{}}: state/d/{array.name} has "
    for command, more in (("eval", []), ("generate", ["--num_tokens=2"])):
        code, out, err = tpu_train(command, f"--workdir={workdir}", *more)
        assert (code, len(err.splitlines())) == (0, 1)
        assert err.startswith("tpu-train: " + reason.format(" and skipped"))
        assert out.startswith("step 4 ") == (command == "eval")
        code, out, err = tpu_train(command, f"--workdir={workdir}", "--step=8", *more)
        assert (code, out) == (2, "")
        assert err.startswith("tpu-train: " + reason.format(""))


def test_eval_is_the_loss_computed_by_hand(tpu_train, trained, place):
    for step in (4, 8):
        code, out, err = tpu_train("eval", f"--workdir={trained}", f"--step={step}")
        assert (code, err) == (0, "")
        said = re.fullmatch(r"step (\d+)  validation loss (\S+) \(nats per token, whole validation split\)\n", out)
        assert int(said[1]) == step
        assert float(said[2]) == pytest.approx(loss_by_hand(trained, step, place), abs=6e-5)


def test_eval_takes_the_newest_step_and_finds_the_workdir_of_a_config(tpu_train, config_file, trained):
    found = tpu_train("eval", f"--config={config_file}", f"--set=run.workdir={trained}")
    assert found == tpu_train("eval", f"--workdir={trained}")
    assert found[1].startswith("step 8  ")


def test_eval_can_take_other_batches_of_the_same_text(tpu_train, trained):
    said = [tpu_train("eval", f"--workdir={trained}", f"--set=data.batch_size={size}")[1] for size in (8, 3)]
    loss = [float(re.search(r"loss (\S+)", line)[1]) for line in said]
    assert loss[0] == pytest.approx(loss[1], abs=2e-4)


def test_a_workdir_that_moved_can_be_evaluated(tpu_train, trained, tmp_path):
    moved = tmp_path / "elsewhere"
    moved.symlink_to(trained)
    assert tpu_train("eval", f"--workdir={moved}") == tpu_train("eval", f"--workdir={trained}")


def test_generate_prints_as_many_samples_as_asked(tpu_train, trained):
    flags = ["generate", f"--workdir={trained}", "--prompt=def f", "--num_tokens=6"]
    code, out, err = tpu_train(*flags, "--num_samples=3", "--temperature=2")
    assert (code, err) == (0, "")
    samples = re.split(r"^--- \d\n", out, flags=re.M)
    assert samples[0] == ""
    assert len(samples[1:]) == 3
    assert all(sample.startswith("def f") for sample in samples[1:])
    assert len(set(samples[1:])) > 1
    code, out, err = tpu_train(*flags)
    assert (code, err) == (0, "")
    assert out.startswith("def f")
    assert "---" not in out
    code, out, err = tpu_train(*flags, "--weights=int8")
    assert (code, err) == (0, "")
    assert re.match(r"the blocks' matrices are held in int8: [\d.]+ MB in place of [\d.]+ in float32\ndef f", out)


def test_temperature_0_takes_the_likeliest_token_whatever_the_seed(tpu_train, trained, place):
    flags = ["generate", f"--workdir={trained}", "--prompt=def f1", "--num_tokens=3"]
    greedy = tpu_train(*flags, "--temperature=0", "--seed=1")
    assert greedy == tpu_train(*flags, "--temperature=0", "--seed=2")
    _, model = load(trained, 8)
    tokenizer = data.load_tokenizer("bytes")
    ids = [tokenizer.eod_id, *tokenizer.encode("def f1")]
    hidden = jax.jit(lambda model, batch: model(batch["tokens"], batch["positions"], batch["segments"], CPU)[0])
    for _ in range(3):
        tokens = np.array([ids], np.int32)
        positions = np.arange(len(ids), dtype=np.int32)[None]
        x_BTD = hidden(model, place({"tokens": tokens, "positions": positions, "segments": np.ones_like(tokens)}))
        ids.append(int(np.argmax(np.asarray(x_BTD)[0, -1] @ np.asarray(model.output_VD).T)))
    assert greedy[1] == "def f1" + tokenizer.decode(np.array(ids[7:])) + "\n"


def test_the_seed_decides_the_sample(tpu_train, trained):
    flags = ["generate", f"--workdir={trained}", "--num_tokens=20", "--temperature=1.5"]
    first = tpu_train(*flags, "--seed=1")
    assert first == tpu_train(*flags, "--seed=1")
    assert first != tpu_train(*flags, "--seed=2")


@pytest.mark.parametrize("arguments", [["train", "--help"], ["help"]])
def test_a_reader_that_goes_away_gives_no_traceback(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "tpu_train.main", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=environment, timeout=240)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize(("accelerator", "wanted"), [(False, "cpu"), (True, None)])
def test_libtpu_is_left_alone_where_there_is_no_accelerator(accelerator, wanted):
    """jax starts every plugin that is installed; libtpu without a TPU prints three warnings."""
    program = f"""
import os
os.environ.pop("JAX_PLATFORMS", None)
from tpu_train import cpu, main
cpu.has_accelerator = lambda: {accelerator}
main._prepare_jax()
print(os.environ.get("JAX_PLATFORMS"))
if not {accelerator}:
    import jax
    jax.devices()
"""
    done = child(program)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{wanted}\n", "")


def test_ctrl_c_before_the_run_has_begun_gives_one_line(tmp_path):
    slow = tmp_path / "slow.py"
    slow.write_text("import time\nopen('begun', 'w').close()\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "tpu_train.main", "train", f"--config={slow}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    begun = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        limit = time.monotonic() + 120
        while not (tmp_path / "begun").exists():
            assert time.monotonic() < limit
            time.sleep(0.02)
        begun.send_signal(signal.SIGINT)
        assert begun.communicate(timeout=120)[1] == "tpu-train: stopped at once\n"
        assert begun.returncode == 130
    finally:
        begun.kill()


def test_the_command_leaves_the_exit_code_to_the_shell(tmp_path):
    done = child(None, "train", f"--config={tmp_path / 'none.py'}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"tpu-train: no config file '{tmp_path / 'none.py'}'\n"


def test_flags_of_the_help_are_those_of_the_config():
    shown = main._help("train", main._flags_of("train"))
    fields = re.findall(r"^  (\w+\.\w+) = (.*)$", shown, re.M)
    assert fields == [(name, str(value)) for name, value in config_lib.flatten(config_lib.Config())]
