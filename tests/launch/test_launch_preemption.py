"""Runs of launch/tpu_vm.sh whose slices are taken away, whose connections break, and whose hosts don't answer."""

from pathlib import Path

import pytest
from launch_sandbox import Sandbox

SLICE = ("--name=run1", "--zone=us-east5-b", "--topology=v6e:2x4", "--poll=0", "--spot")
# Counts its starts in a place that outlives the slice, and ends well at the second.
TRAIN = 'echo start >>"$OUTLIVES"; touch "$BEGUN"; [[ $(grep -c start "$OUTLIVES") == 1 ]] || exit 0; sleep 60'
LOST = [{"out": "SUSPENDED\tSERVICE"}, {"out": "PROVISIONING"}, {"out": "ACTIVE"}]


@pytest.fixture
def ready(sandbox) -> Sandbox:
    assert sandbox.run("tpu_vm.sh", "setup", *SLICE).returncode == 0
    sandbox.calls()
    return sandbox


def run(sandbox, *flags, command=TRAIN):
    outlives = sandbox.folder / "bucket"
    outlives.touch()
    more = {"OUTLIVES": str(outlives), "BEGUN": str(sandbox.folder / "begun")}
    return sandbox.run("tpu_vm.sh", "run", *SLICE, *flags, "--", "bash", "-c", command, **more)


def preempted(sandbox, status=255):
    """The answer to the first follow: the slice goes away when the command has begun."""
    begun = sandbox.folder / "begun"
    return {"await": str(begun), "wipe": True, "status": status}


def test_a_preempted_run_is_requested_set_up_and_started_again(ready):
    ready.answer(
        {
            "tpu-vm ssh follow": [preempted(ready), {}],
            "queued-resources describe": LOST,
        }
    )
    result = run(ready, "--yes", "--create_flag=--network=n")
    assert result.returncode == 0, result.stderr
    assert "run1 was preempted; 19 restarts are left" in result.stderr
    calls = ready.calls()
    verbs = [" ".join(call[2:4]) for call in calls]
    after = verbs[verbs.index("queued-resources delete") :]
    assert after == [
        *("queued-resources delete", "queued-resources create", "queued-resources describe"),
        *("queued-resources describe", "tpu-vm scp", "tpu-vm ssh"),  # the request, then set-up
        *("tpu-vm ssh", "tpu-vm ssh", "tpu-vm ssh"),  # idle, start, follow
    ]
    create = next(call for call in calls if call[3] == "create")
    assert {"--spot", "--network=n", "--accelerator-type=v6e-8"} <= set(create)
    assert (ready.folder / "bucket").read_text() == "start\nstart\n"


def test_a_node_that_says_preempted_counts_before_its_request_does(ready):
    ready.answer(
        {
            "tpu-vm ssh follow": [preempted(ready), {}],
            "tpu-vm describe": [{"out": "PREEMPTED"}, {"out": "READY"}],
        }
    )
    result = run(ready, "--yes")
    assert result.returncode == 0, result.stderr
    assert "run1 was preempted" in result.stderr


def test_recreating_asks(ready):
    ready.answer({"tpu-vm ssh follow": [preempted(ready)], "queued-resources describe": LOST})
    result = run(ready)
    assert result.returncode == 2
    assert "Delete what is left of run1 and request it again? There is no terminal" in result.stderr
    assert "queued-resources delete" not in ready.verbs()


@pytest.mark.parametrize("state", ["SUSPENDING\tUSER", "DELETING"])
def test_what_was_deleted_from_elsewhere_stays_deleted(ready, state):
    ready.answer({"tpu-vm ssh follow": [preempted(ready)], "queued-resources describe": [{"out": state}]})
    result = run(ready, "--yes")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "tpu_vm.sh: run1 was deleted"
    assert "queued-resources create" not in ready.verbs()


def test_restarts_are_limited(ready):
    ready.answer(
        {
            "tpu-vm ssh follow": [{"wipe": True, "status": 255}],
            "queued-resources describe": [{"out": "SUSPENDED"}, {"out": "ACTIVE"}, {"out": "SUSPENDED"}],
        }
    )
    result = run(ready, "--yes", "--restarts=1")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "tpu_vm.sh: run1 was preempted, and --restarts is used up"
    assert ready.verbs().count("queued-resources create") == 1


def test_preempted_again_while_it_is_recreated_goes_on(ready):
    states = ["SUSPENDED", "PROVISIONING", "SUSPENDED", "SUSPENDED", "SUSPENDED", "WAITING_FOR_RESOURCES", "ACTIVE"]
    ready.answer(
        {
            "tpu-vm ssh follow": [preempted(ready), {}],
            "queued-resources describe": [{"out": state} for state in states],
        }
    )
    result = run(ready, "--yes")
    assert result.returncode == 0, result.stderr
    assert "18 restarts are left" in result.stderr
    assert ready.verbs().count("queued-resources create") == 2


def test_no_quota_for_the_second_request_ends_the_run_with_gclouds_words(ready):
    ready.answer(
        {
            "tpu-vm ssh follow": [preempted(ready)],
            "queued-resources describe": LOST,
            "queued-resources create": [{"status": 6, "err": "ERROR: quota\n"}],
        }
    )
    result = run(ready, "--yes")
    assert result.returncode == 6
    assert "ERROR: quota" in result.stderr


def test_a_broken_connection_is_taken_up_again(ready):
    begun, back = ready.folder / "begun", ready.folder / "back"
    ready.answer({"tpu-vm ssh follow": [{"await": str(begun), "status": 255}, {"touch": str(back)}]})
    result = run(ready, command=f'echo one; touch "{begun}"; until [[ -e "{back}" ]]; do sleep 0.1; done; exit 4')
    assert result.returncode == 4
    assert "lost sight of the command; following it again" in result.stderr
    assert "one" in result.stdout
    assert "queued-resources delete" not in ready.verbs()


def test_a_spot_slice_is_looked_at_again_before_a_failure_counts(ready):
    """SIGTERM reaches the command before the state says that the slice goes."""
    ready.answer({"queued-resources describe": [{"out": "ACTIVE"}, {"out": "SUSPENDING"}, {"out": "ACTIVE"}]})
    again = '[[ -s $OUTLIVES ]] || { echo saved >"$OUTLIVES"; exit 143; }'
    result = run(ready, "--yes", command=again)
    assert result.returncode == 0, result.stderr
    assert "run1 was preempted" in result.stderr


def test_hosts_that_do_not_answer_end_the_run_after_ten_tries(ready):
    ready.answer({"tpu-vm ssh result": [{"status": 255, "err": "ssh: timed out\n"}]})
    result = run(ready, command="exit 3")
    assert result.returncode == 1
    assert result.stderr.count("ssh: timed out") == 10
    assert "can't reach the hosts of run1 (above)" in result.stderr


def test_a_start_on_some_hosts_only_is_taken_back(ready):
    flags = ("--topology=v6e:4x4",)
    command = ("--", "bash", "-c", "sleep 60")
    assert ready.run("tpu_vm.sh", "setup", *SLICE, *flags, HOSTS="2").returncode == 0
    (ready.cloud / "run1-w1" / "tpu-train" / ".run").write_text("a file, where a folder should be")
    result = ready.run("tpu_vm.sh", "run", *SLICE, *flags, *command, HOSTS="2")
    assert result.returncode == 1
    assert "did not start on every host (above); stopping it on the others" in result.stderr
    pid = (ready.cloud / "run1-w0" / "tpu-train" / ".run" / "pid").read_text().strip()
    cmdline = Path(f"/proc/{pid}/cmdline")
    assert not cmdline.exists() or not cmdline.read_text()  # gone, or a zombie


def test_a_command_killed_outright_is_told_apart_from_one_that_ended(ready):
    result = run(ready, command='kill -KILL "$PPID"')
    assert result.returncode == 137
    assert "ended without an exit code" in result.stderr
