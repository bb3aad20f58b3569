"""launch/tpu_vm.sh and worker.sh, run for real against a stand-in for gcloud whose hosts are folders."""

import os
import signal
import subprocess
import tarfile
import time

import pytest
from launch_sandbox import HOSTILE

SLICE = ("--name=run1", "--zone=us-east5-b", "--topology=v6e:2x4", "--poll=0")
TRAIN = ("--", "tpu-train", "train", "--config=configs/tiny.py")


def tpu(sandbox, action, *flags, **variables):
    return sandbox.run("tpu_vm.sh", action, *SLICE, *flags, **variables)


@pytest.fixture
def ready(sandbox):
    """A slice that is set up."""
    assert tpu(sandbox, "setup").returncode == 0
    sandbox.calls()
    return sandbox


@pytest.fixture
def two_hosts(sandbox):
    """A slice of two hosts, set up."""
    assert tpu(sandbox, "setup", HOSTS="2").returncode == 0
    sandbox.calls()
    return sandbox


def test_create_shows_the_cost_requests_and_waits(sandbox):
    waiting = [{"out": state} for state in ("WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE")]
    sandbox.answer({"queued-resources describe": waiting})
    result = tpu(sandbox, "create", "--yes", "--hours=10", "--spot", "--create_flag=--network=n")
    assert result.returncode == 0, result.stderr
    assert "8 chips x $2.70 a chip-hour (list price" in result.stderr
    assert "at most $21.60 an hour, $518.40 a day, $216.00 in 10 hours" in result.stderr
    assert [line for line in result.stderr.splitlines() if "run1: " in line] == [
        f"tpu_vm.sh: run1: {state['out']}" for state in waiting
    ]
    create, *looks = sandbox.calls()
    expected = "--accelerator-type=v6e-8 --runtime-version=v2-alpha-tpuv6e --node-id=run1 --spot --network=n --quiet"
    zone = "--zone=us-east5-b"
    assert create == ["compute", "tpus", "queued-resources", "create", "run1", *expected.split(), zone]
    assert len(looks) == 3


def test_your_price_counts_and_an_unknown_one_is_asked_for(sandbox):
    assert "x $1.00 a chip-hour (your --price): $8.00 an hour" in tpu(sandbox, "create", "--yes", "--price=1").stderr
    sandbox.calls()
    result = tpu(sandbox, "create", "--yes", "--topology=v4:2x2x1")
    assert result.returncode == 2
    assert "no price is known for v4" in result.stderr
    assert sandbox.calls() == []


@pytest.mark.parametrize("action", ["create", "delete"])
def test_what_costs_or_destroys_asks(sandbox, action):
    result = tpu(sandbox, action)
    assert result.returncode == 2
    assert "no terminal to ask on: add --yes" in result.stderr
    no = sandbox.run_answering("n\n", "tpu_vm.sh", action, *SLICE)
    assert no.returncode == 1
    assert no.stderr.endswith("tpu_vm.sh: nothing done\n")
    assert sandbox.calls() == []
    assert sandbox.run_answering("yes\n", "tpu_vm.sh", action, *SLICE).returncode == 0
    assert sandbox.verbs()[0] == f"queued-resources {action}"


def test_dry_runs_print_what_runs(sandbox):
    flags = ("--yes", "--project=it's $(touch owned)", "--create_flag=--network=a b")
    (sandbox.folder / "mount it").write_text("touch ~/prepared\n")
    for action in ("create", "setup", "status", "stop", "logs", "delete"):
        more = ("--prepare=mount it",) if action == "setup" else ()
        dry = tpu(sandbox, action, *flags, *more, "--dry_run", SECRET_TOKEN="sesame")
        assert dry.returncode == 0, dry.stderr
        assert sandbox.calls() == []
        assert "sesame" not in dry.stdout + dry.stderr
        tpu(sandbox, action, *flags, *more)
        real = sandbox.calls()
        assert all("--project=it's $(touch owned)" in call for call in real)
        if action in ("create", "setup", "status", "delete"):
            sandbox.paste(dry.stdout)
            assert sandbox.calls() == real
    assert (sandbox.cloud / "run1-w0" / "prepared").exists()


def test_setup_copies_this_tree_alone_and_installs_it(sandbox):
    (sandbox.repo / "key.json").write_text("secret")
    (sandbox.repo / "configs" / "old.py").touch()
    assert tpu(sandbox, "setup").returncode == 0
    with tarfile.open(sandbox.repo / "build" / "run1" / "tpu-train.tgz") as archive:
        tops = {name.split("/")[0] for name in archive.getnames()}
    assert tops == {"pyproject.toml", "README.md", "LICENSE", "tpu_train", "pallas_kernels", "configs", "launch"}
    host = sandbox.cloud / "run1-w0"
    (sandbox.repo / "configs" / "old.py").unlink()
    assert tpu(sandbox, "setup").returncode == 0
    assert not (host / "tpu-train" / "configs" / "old.py").exists()
    assert (host / "set-up").read_text() == "tpu train --help\n" * 2


def test_setup_brings_a_python_where_the_image_has_an_old_one(sandbox):
    (sandbox.bin / "python3.12").unlink()
    uv = '#!/bin/sh\necho "$*" >>"$HOME/uv-calls"\nif [ "$2" = find ]; then echo /uv/python3.12; fi\n'
    sandbox.write(sandbox.folder / "uv", uv)
    sandbox.add("python3", f'#!/bin/sh\nmkdir -p "$HOME/.local/bin"\ncp {sandbox.folder}/uv "$HOME/.local/bin"\n')
    result = tpu(sandbox, "setup")
    assert result.returncode == 0, result.stderr
    calls = (sandbox.cloud / "run1-w0" / "uv-calls").read_text().splitlines()
    assert calls == ["python install --quiet 3.12", "python find 3.12"]


def test_the_command_arrives_as_it_was_written(ready):
    result = tpu(ready, "run", "--", "tpu-train", *HOSTILE)
    assert result.returncode == 0, result.stderr
    assert ready.trained() == [["1", *HOSTILE]]
    dry = tpu(ready, "run", "--dry_run", "--", "tpu-train", *HOSTILE)
    ready.paste(dry.stdout)
    assert ready.trained()[1:] == [["1", *HOSTILE]]


def test_the_compilers_flags_are_those_of_the_generation_or_yours(ready):
    shown = ("--", "bash", "-c", 'echo "flags: $LIBTPU_INIT_ARGS"')
    assert "flags: --xla_tpu_enable_async_all_to_all=true\n" in tpu(ready, "run", *shown).stdout
    for yours in ("--a=1 --b='$(touch owned)'", ""):
        assert f"flags: {yours}\n" in tpu(ready, "run", *shown, LIBTPU_INIT_ARGS=yours).stdout


def test_run_shows_the_output_and_keeps_the_exit_code(ready):
    result = tpu(ready, "run", "--", "bash", "-c", "echo out; echo err >&2; pwd; exit 3")
    assert result.returncode == 3
    tree = ready.cloud / "run1-w0" / "tpu-train"
    assert [line for line in result.stdout.splitlines() if line][:3] == ["out", "err", str(tree)]
    again = tpu(ready, "logs", "--lines=1")
    assert again.returncode == 3
    assert "tpu-train" in again.stdout
    assert "out\n" not in again.stdout


def test_hosts_without_set_up_and_logs_without_a_run_say_so(sandbox):
    result = tpu(sandbox, "run", *TRAIN)
    assert result.returncode == 1
    assert "nothing is installed on this host: run setup first" in result.stderr
    assert tpu(sandbox, "setup").returncode == 0
    assert "no command was started here" in tpu(sandbox, "logs").stderr


def test_one_failing_host_fails_the_run(two_hosts):
    command = 'echo "of $TPU_TRAIN_PROCESSES"; [[ $LABEL != run1-w1 ]] || { echo broken; exit 7; }'
    result = tpu(two_hosts, "run", "--", "bash", "-c", command, HOSTS="2")
    assert result.returncode == 7
    assert result.stdout.count("of 2") == 2
    assert len([line for line in result.stdout.splitlines() if line.startswith("[run1 w")]) == 3


def test_more_hosts_than_the_topology_should_have_all_train_as_one_run(ready):
    assert tpu(ready, "setup", HOSTS="2").returncode == 0
    result = tpu(ready, "run", *TRAIN, HOSTS="2")
    assert result.returncode == 0
    assert "run1 has 2 hosts, where v6e:2x4 and 1 slices should have 1" in result.stderr
    assert ready.trained() == [["2", *TRAIN[2:]]] * 2


def test_several_slices_are_several_nodes(two_hosts):
    slices = ("--topology=v6e:4x4", "--slices=2")
    assert tpu(two_hosts, "create", "--yes", *slices).returncode == 0
    assert {"--node-count=2", "--node-prefix=run1"} <= set(two_hosts.calls()[0])
    assert tpu(two_hosts, "setup", *slices, HOSTS="4").returncode == 0
    result = tpu(two_hosts, "run", *slices, *TRAIN, HOSTS="4")
    assert result.returncode == 0, result.stderr
    assert two_hosts.trained() == [["8", *TRAIN[2:]]] * 8
    failing = tpu(two_hosts, "run", *slices, "--", "bash", "-c", "[[ $LABEL != run1-1-w3 ]] || exit 5", HOSTS="4")
    assert failing.returncode == 5


@pytest.mark.parametrize(
    ("flag", "word"),
    [
        ("--name=$(touch owned)", "--name"),
        ("--name=Capital", "--name"),
        ("--zone=a b", "--zone"),
        ("--topology=v6e:3x3", "v6e comes as 1x1 2x2"),
        ("--topology=v6e:2x2 2x4", "v6e comes as"),
        ("--topology=v9:2x2", "no TPU generation 'v9'"),
        ("--topology=v5p:2x2", "v5p comes as 2x2x1"),
        ("--topology=7x:2x2x1", "tpu7x is rented through GKE"),
        ("--slices=0", "--slices=0"),
        ("--slices=08", "--slices=08"),
        ("--slices=a[$(touch owned)]", "--slices"),
        ("--poll=1.5", "--poll"),
        ("--price=cheap", "--price"),
        ("--zoen=a", "no flag --zoen; there are: name zone"),
        ("--zone", "--zone needs a value"),
        ("--yes=no", "--yes takes no value"),
        ("yes", "flags look like --name=value"),
        ("--create_flag=network", "--create_flag takes a flag of gcloud's"),
        ("--prepare=no file", "no file 'no file'"),
        ("--flagfile=none", "no flag file 'none'"),
    ],
)
def test_bad_input_is_one_line_and_calls_nothing(sandbox, flag, word):
    action = "setup" if flag.startswith("--prepare") else "create"
    result = tpu(sandbox, action, "--yes", flag)
    assert result.returncode == 2
    assert word in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert sandbox.calls() == []


def test_flags_come_from_a_file_too(sandbox):
    (sandbox.folder / "slice").write_text(
        "# of ours\n--name=other\n\n--zone=$(touch owned)\n--topology=v5e:2x2\n--spot"
    )
    result = sandbox.run("tpu_vm.sh", "create", "--flagfile=slice", "--zone=us-west4-a", "--yes", "--poll=0")
    assert result.returncode == 0, result.stderr
    assert {"other", "--accelerator-type=v5litepod-4", "--spot", "--zone=us-west4-a"} <= set(sandbox.calls()[0])
    (sandbox.folder / "slice").write_text("name=other\n")
    assert "flags look like --name=value" in sandbox.run("tpu_vm.sh", "create", "--flagfile=slice").stderr


def test_without_gcloud_one_line_says_where_it_is(sandbox):
    (sandbox.bin / "gcloud").unlink()
    result = tpu(sandbox, "create", "--yes")
    assert result.returncode == 1
    assert "gcloud is not on PATH; install the Google Cloud CLI" in result.stderr
    assert tpu(sandbox, "create", "--dry_run").returncode == 0


@pytest.mark.parametrize("verb", ["create", "delete", "describe"])
def test_gclouds_own_words_and_exit_code_are_kept(sandbox, verb):
    words = "ERROR: (gcloud) RESOURCE_EXHAUSTED: Quota limit 'TPUV6EPerProject' has been exceeded.\n"
    sandbox.answer({f"queued-resources {verb}": [{"status": 9, "err": words}]})
    result = tpu(sandbox, "create" if verb == "describe" else verb, "--yes")
    assert result.returncode == 9
    assert words in result.stderr
    if verb == "create":
        assert sandbox.verbs() == ["queued-resources create"]


@pytest.mark.parametrize("state", ["FAILED", "SUSPENDED", "SUSPENDING"])
def test_a_request_that_ends_unfulfilled_fails(sandbox, state):
    sandbox.answer({"queued-resources describe": [{"out": "PROVISIONING"}, {"out": state}]})
    result = tpu(sandbox, "create", "--yes")
    assert result.returncode == 1
    assert "was not granted (above); remove it with delete" in result.stderr.splitlines()[-1]


def test_a_look_that_fails_is_tried_again(sandbox):
    sandbox.answer({"queued-resources describe": [{"status": 1, "err": "timeout\n"}] * 4 + [{"out": "ACTIVE"}]})
    assert tpu(sandbox, "create", "--yes").returncode == 0


def test_ctrl_c_while_waiting_says_that_the_request_stays(sandbox):
    sandbox.answer({"queued-resources describe": [{"out": "WAITING_FOR_RESOURCES"}]})
    process = sandbox.start("tpu_vm.sh", "create", *SLICE, "--poll=60", "--yes")
    while "WAITING" not in process.stderr.readline():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    assert "the request for run1 stays, and costs once it is granted" in process.communicate(timeout=120)[1]
    assert process.returncode == 130


def test_ctrl_c_leaves_the_command_running_and_stop_ends_it(ready):
    go = "trap 'echo saved >saved; exit 143' TERM; echo going; while true; do sleep 0.05; done"
    process = ready.start("tpu_vm.sh", "run", *SLICE, "--", "bash", "-c", go)
    tree = ready.cloud / "run1-w0" / "tpu-train"
    while "going" not in process.stdout.readline():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    assert "the command goes on, on run1" in process.communicate(timeout=120)[1]
    assert process.returncode == 130
    busy = [tpu(ready, "run", *TRAIN), tpu(ready, "setup")]
    assert [result.returncode for result in busy] == [1, 1]
    assert all("runs on" in result.stderr and "already" in result.stderr for result in busy)
    twice = subprocess.run([tree / "launch" / "worker.sh", "start", "1", "true"], env=ready.environment(), check=False)
    assert twice.returncode == 1
    assert not (tree / "saved").exists()
    assert tpu(ready, "stop").returncode == 0
    assert (tree / "saved").exists()
    assert (tree / ".run" / "status").read_text() == "143\n"


def test_ctrl_c_ends_the_view_of_every_slice(two_hosts):
    slices = ("--topology=v6e:4x4", "--slices=2")
    assert tpu(two_hosts, "setup", *slices).returncode == 0
    command = ("--", "bash", "-c", "exec sleep 600")
    process = two_hosts.start("tpu_vm.sh", "run", *SLICE, *slices, *command)
    while (two_hosts.cloud / "calls").read_text().count("worker.sh follow") < 2:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=120)  # ends when nothing writes any more
    assert process.returncode == 130
    assert tpu(two_hosts, "stop", *slices).returncode == 0
