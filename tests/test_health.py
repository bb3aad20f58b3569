"""Whole runs that meet bad steps: skipped, averaged, stopped; in this process, with the small run of test_train."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_train
from test_train import finite_checkpoints, losses, run

from tpu_train import main, metrics, train

cache, compiled_once, traced_once = test_train.cache, test_train.compiled_once, test_train.traced_once
devices, texts, config_of = test_train.devices, test_train.texts, test_train.config_of
ends, at_step = test_train.ends, test_train.at_step


def test_skipped_steps_are_counted_and_not_saved_until_one_too_many_stops_the_run(config_of, at_step, capsys):
    @jax.jit
    def spoil(tree):
        return jax.tree.map(lambda x: x * jnp.nan, tree)

    at_step({5: lambda state, values: (dataclasses.replace(state, model=spoil(state.model)), values)})
    made = config_of("checkpoint.every_steps=2", "run.log_every=50", "run.max_skipped=2")
    with pytest.raises(train.RunFailed) as failed:
        run(made)
    said = "loss is nan at step 8, and the 2 step(s) before it were skipped too; kept: checkpoint of step 4 in"
    assert str(failed.value).startswith(f"{said} {made.run.workdir};")
    assert finite_checkpoints(made.run.workdir) == [2, 4]
    assert "step 7 changed nothing: loss is nan (2 in a row of at most 2)\n" in capsys.readouterr().out
    skipped = {line["step"]: line["skipped"] for line in metrics.read(Path(made.run.workdir))}
    assert skipped == {1: 0, 4: 0, 6: 1, 7: 2, 8: 3}


def test_an_average_and_the_watch_for_spikes_can_begin_and_end_where_a_run_goes_on(config_of, ends, capsys):
    often = ("optim.schedule=constant", "run.eval_every=2", "run.eval_batches=99")
    assert run(config_of("run.steps=2", *often)) == 0
    assert run(config_of("run.steps=4", *often, "optim.ema_decay=0.5", "run.spike_factor=9")) == 0
    assert run(config_of("run.steps=6", *often)) == 0
    kept = [{name.split(".")[1].split("[")[0] for name in state} for state, _ in ends]
    assert [names - kept[0] for names in kept] == [set(), {"average", "norms"}, set()]
    plain = config_of("run.steps=6", *often, "run.workdir=" + config_of().run.workdir + "-plain")
    assert run(plain) == 0
    (averaged, _), (last, _), (wanted, _) = ends[1:]
    for name, value in wanted.items():  # another program: the same up to rounding
        np.testing.assert_allclose(last[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
    assert any(np.any(averaged[f".average{name[6:]}"] != x) for name, x in averaged.items() if name[:6] == ".model")
    validation = [losses(made.run.workdir)[4][2] for made in (config_of(), plain)]
    assert validation[0] != validation[1]  # the average's
    capsys.readouterr()
    evaluate = ["tpu-train", "eval", f"--workdir={config_of().run.workdir}", "--step=4"]
    assert main.main([*evaluate, "--ema"]) == main.main(evaluate) == 0
    average, weights = re.findall(r"validation loss (\S+) \((.*)nats", capsys.readouterr().out)
    assert (average[1], weights[1]) == ("of the moving average, ", "")
    assert float(average[0]) == pytest.approx(validation[0], abs=1e-4)
    assert float(weights[0]) != pytest.approx(validation[0], abs=1e-4)
