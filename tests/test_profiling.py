"""Traces of steps and the program's text: there where asked for, of those steps, and nowhere else."""

import gzip
import json
import re
import time
from pathlib import Path

import jax
import pytest
import test_train

from tpu_train import config, precision, profiling, train, train_step, watchdog
from tpu_train.train_step import make_train_step

cache, compiled_once, traced_once = test_train.cache, test_train.compiled_once, test_train.traced_once
devices, texts, config_of = test_train.devices, test_train.texts, test_train.config_of
at_step = test_train.at_step


def run(made, steps=None, **options):
    return train.train(made, time.monotonic(), profile_steps=config.profile_range(steps, made), **options)


def steps_in(workdir: Path) -> list[list[int]]:
    """The steps of each trace, as their reader sees them: events "train" with a number."""
    found = []
    for folder in sorted(workdir.glob("profile/plugins/profile/*")):
        (xplane,), (file,) = folder.glob("*.xplane.pb"), folder.glob("*.trace.json.gz")
        assert xplane.stat().st_size > 0
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        found.append(sorted({int(event["args"]["step_num"]) for event in events if event.get("name") == "train"}))
    return found


def test_a_profile_holds_its_steps_and_changes_nothing_else(config_of, capsys, monkeypatch, tmp_path):
    plain, traced = config_of(), config_of(f"run.workdir={tmp_path / 'traced'}")
    watched, limits = [], []
    watch, write = watchdog.Watchdog.watch, jax.profiler.stop_trace
    monkeypatch.setattr(watchdog.Watchdog, "watch", lambda *it: watched.append(it[1:]) or watch(*it))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: limits.append(watched[-1]) or write())
    assert run(plain) == 0
    assert run(traced, "3:5", dump_hlo=True) == 0
    assert not {"profile", "hlo"} & {path.name for path in Path(plain.run.workdir).iterdir()}
    assert f"profile: steps 3 to 5 in {tmp_path / 'traced' / 'profile'}" in capsys.readouterr().out
    assert steps_in(tmp_path / "traced") == [[3, 4, 5]]
    assert (tmp_path / "traced" / "profile" / "memory_step5.prof").stat().st_size > 0
    assert test_train.losses(traced.run.workdir) == test_train.losses(plain.run.workdir)
    assert limits == [("the profile at step 5", watchdog.START_FACTOR)]
    spent = json.loads((tmp_path / "traced" / "goodput.jsonl").read_text().splitlines()[-1])["seconds"]
    assert spent["profile"] > 0
    operations = re.findall(r'op_name="([^"]*)"', (tmp_path / "traced" / "hlo" / "train_step.compiled.txt").read_text())
    for scope in ("embed", "block0", "attention", "flash_attention", "rope", "mlp", "norm", "loss", "optimizer"):
        assert any(re.search(rf"(?<!\w){scope}(?!\w)", name) for name in operations), scope
    for inner in ("attention", "mlp"):  # the gradient's too
        assert any(re.search(rf"transpose\(.*block0.*{inner}", name) for name in operations), inner
    assert "block0/attention" in (tmp_path / "traced" / "hlo" / "train_step.lowered.txt").read_text()


def test_a_run_that_stops_inside_its_profile_writes_it_and_the_next_start_the_rest(config_of, at_step, capsys):
    acts = {4: test_train.send(15)}
    at_step(acts)
    made = config_of()
    assert run(made, "3:8") == 143
    (steps,) = steps_in(Path(made.run.workdir))
    assert steps[:2] == [3, 4]
    at = steps[-1]
    assert at < 8
    assert f"profile: steps 3 to {at} in" in capsys.readouterr().out
    acts.clear()
    assert run(made, "3:8") == 0
    said = f"profile: the run goes on after step {at}; of --profile_steps=3:8, steps {at + 1} to 8 are traced"
    assert said in capsys.readouterr().out
    assert steps_in(Path(made.run.workdir))[1] == list(range(at + 1, 9))
    profiling.Profiler(range(3, 9), Path(made.run.workdir)).continue_from(8)
    assert capsys.readouterr().out == "profile: the run has done step 8, so nothing is traced of --profile_steps=3:8\n"


def test_a_trace_that_can_not_be_written_ends_no_run(config_of, capsys):
    made = config_of("run.steps=3")
    Path(made.run.workdir).mkdir()
    (Path(made.run.workdir) / "profile").write_text("in the way")
    assert run(made, "2:2") == 0
    assert "profile: no trace could be started ([Errno 17] File exists" in capsys.readouterr().out
    assert test_train.saved_steps(made.run.workdir)[-1] == 3


def test_only_process_0_traces(monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    profiler = profiling.Profiler(range(1, 3), tmp_path)
    profiler.begin(1, None, None)
    with profiler.step(1):
        pass
    profiler.end(2, None, None)
    profiler.close()
    assert list(tmp_path.iterdir()) == []


def test_names_of_scopes_change_nothing_of_the_program(tiny, one_device, monkeypatch):
    monkeypatch.setattr(train_step, "make_train_step", make_train_step)
    made = tiny()
    compute = precision.resolve(made.run, "cpu")
    named = train_step.trace_step(made, compute, one_device).lower()
    scope = type(jax.named_scope("any"))
    monkeypatch.setattr(scope, "__enter__", lambda self: None)
    monkeypatch.setattr(scope, "__exit__", lambda *error: None)
    nameless = train_step.trace_step(made, compute, one_device).lower()
    assert "block0" in named.as_text(debug_info=True)
    assert "block0" not in nameless.as_text(debug_info=True)
    assert named.as_text() == nameless.as_text()


@pytest.mark.parametrize("text", ["10:5", "0:3", "3", "3:", "a:b", "1:9", "-1:3"])
def test_a_range_that_can_not_be_is_refused_in_one_line(text):
    with pytest.raises(config.UserError, match=rf"--profile_steps={text}") as refused:
        config.profile_range(text, config.Config(run=config.RunConfig(steps=8)))
    assert "\n" not in str(refused.value)
