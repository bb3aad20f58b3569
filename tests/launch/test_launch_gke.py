"""launch/gke.sh: its manifests against JobSet's published schema, and its calls of kubectl and xpk."""

import json
import re
import sys

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from launch_sandbox import HOSTILE, ROOT

RUN = ("--name=run1", "--topology=v6e:2x4", "--image=registry/image:1")
TRAIN = ("--", "tpu-train", "train", "--config=configs/tiny.py")
FLAG = "--xla_tpu_enable_async_all_to_all=true"  # of launch/xla_flags.tsv for v5e, v5p and v6e
# Writes its calls and its input down.
STAND_IN = f"""#!{sys.executable} -IS
import json, os, sys
with open(os.environ["CLOUD"] + "/calls", "a") as calls:
    calls.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
if "--filename=-" in sys.argv:
    open(os.environ["CLOUD"] + "/manifest", "w").write(sys.stdin.read())
sys.stderr.write(os.environ.get("WORDS", ""))
sys.exit(int(os.environ.get("CODE", 0)))
"""


@pytest.fixture
def cluster(sandbox):
    sandbox.add("kubectl", STAND_IN)
    sandbox.add("xpk", STAND_IN)
    return sandbox


def manifest(sandbox, *flags, command=TRAIN):
    result = sandbox.run("gke.sh", "manifest", *RUN, *flags, *command)
    assert result.returncode == 0, result.stderr
    return yaml.safe_load(result.stdout)


def faults(value, schema, path="JobSet"):
    """What of `value` is not as a Kubernetes OpenAPI `schema` has it; fields that it does not know are faults too."""
    if schema.get("x-kubernetes-int-or-string"):
        return [] if isinstance(value, int | str) else [f"{path} is neither a number nor a string"]
    types = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    kind = schema["type"]
    if not isinstance(value, types[kind]) or (kind == "integer" and isinstance(value, bool)):
        return [f"{path} is {value!r}, not of type {kind}"]
    found = [f"{path}={value!r}"] if value not in schema.get("enum", [value]) else []
    if kind == "integer" and value < schema.get("minimum", value):
        found.append(f"{path}={value} is too small")
    if kind == "array":
        return found + [
            fault for i, item in enumerate(value) for fault in faults(item, schema["items"], f"{path}[{i}]")
        ]
    if kind == "object" and path != "JobSet.metadata":
        found += [f"{path}.{name} is missing" for name in schema.get("required", []) if name not in value]
        for name, item in value.items():
            of = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
            found += faults(item, of, f"{path}.{name}") if of else [f"{path}.{name} is not in the schema"]
    return found


@pytest.fixture(scope="session")
def schema():
    return json.loads((ROOT / "tests" / "launch" / "jobset_schema.json").read_text())


def test_the_check_finds_faults(schema, sandbox):
    good = manifest(sandbox)
    assert faults(good, schema["schema"]) == []
    job = good["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    pod["nodeSelector"]["cloud.google.com/gke-spot"] = True
    pod["continers"] = pod.pop("containers")
    job["backoffLimit"] = "0"
    good["spec"]["failurePolicy"]["rules"][0]["action"] = "Explode"
    assert len(faults(good, schema["schema"])) == 5


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize(
    ("topology", "accelerator", "hosts", "chips_per_host"),
    [
        ("v4:2x2x4", "tpu-v4-podslice", 4, 4),
        ("v5e:1x1", "tpu-v5-lite-podslice", 1, 1),
        ("v5e:4x8", "tpu-v5-lite-podslice", 8, 4),
        ("v5p:4x4x8", "tpu-v5p-slice", 32, 4),
        ("v6e:2x4", "tpu-v6e-slice", 1, 8),
        ("v6e:4x4", "tpu-v6e-slice", 4, 4),
        ("7x:2x2x2", "tpu7x", 2, 4),
    ],
)
def test_manifests_fit_the_schema_and_the_slice(sandbox, schema, topology, accelerator, hosts, chips_per_host, slices):
    everything = ("--bucket=b", "--spot", "--queue=q", "--service_account=s", "--namespace=n", "--restarts=3")
    if hosts == 1 and slices > 1:
        refused = sandbox.run("gke.sh", "manifest", *RUN, f"--topology={topology}", "--slices=2", *TRAIN)
        assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
        assert "GKE joins only slices of several hosts" in refused.stderr
        return
    for flags in ((), everything):
        jobset = manifest(sandbox, f"--topology={topology}", f"--slices={slices}", *flags)
        assert faults(jobset, schema["schema"]) == []
        assert jobset["apiVersion"] == f"{schema['group']}/{schema['version']}"
        slice_job = jobset["spec"]["replicatedJobs"][0]
        job = slice_job["template"]["spec"]
        pod = job["template"]["spec"]
        container = pod["containers"][0]
        assert (slice_job["replicas"], job["parallelism"], job["completions"]) == (slices, hosts, hosts)
        selector = {key.rpartition("-")[2]: value for key, value in pod["nodeSelector"].items()}
        assert selector["accelerator"] == accelerator
        assert selector["topology"] == topology.partition(":")[2]
        assert container["resources"]["limits"] == {"google.com/tpu": chips_per_host}
        assert {"name": "TPU_TRAIN_PROCESSES", "value": str(hosts * slices)} in container["env"]
        assert ("annotations" in jobset["metadata"]) == (hosts > 1)
        assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"] == container["name"]
    assert selector["spot"] == "true"
    assert pod["volumes"][0]["csi"]["volumeAttributes"] == {"bucketName": "b"}
    assert jobset["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "q"}
    assert (jobset["metadata"]["namespace"], pod["serviceAccountName"]) == ("n", "s")
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 3


@pytest.mark.parametrize(
    ("topology", "variables", "wanted"),
    [
        ("v6e:4x4", {}, [FLAG]),
        ("v4:2x2x4", {}, []),
        ("v6e:4x4", {"LIBTPU_INIT_ARGS": ""}, []),
        ("v6e:4x4", {"LIBTPU_INIT_ARGS": '--a="$(touch owned)" --b'}, ['--a="$$(touch owned)" --b']),
    ],
)
def test_the_compilers_flags_are_those_of_the_generation_or_yours(sandbox, topology, variables, wanted):
    result = sandbox.run("gke.sh", "manifest", *RUN, f"--topology={topology}", *TRAIN, **variables)
    jobset = yaml.safe_load(result.stdout)
    (container,) = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    assert [entry["value"] for entry in container["env"] if entry["name"] == "LIBTPU_INIT_ARGS"] == wanted


def expand(text, variables):
    """As Kubernetes reads a container's command: $(NAME) is a variable if there is one of that name, $$ is $."""

    def value(match):
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)


def test_values_arrive_as_they_were_written(sandbox):
    values = list(HOSTILE)
    jobset = manifest(sandbox, "--image=i $(touch owned)\n- x: y", "--bucket='\"b", command=("--", *values))
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "i $(touch owned)\n- x: y"
    assert pod["volumes"][0]["csi"]["volumeAttributes"]["bucketName"] == "'\"b"
    assert [expand(word, {"HOME": "/root"}) for word in pod["containers"][0]["command"]] == values


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1), min_size=1, max_size=20))
@example(["a\u2028b"])
@example(["\x85"])
@example(["\U0001f600", "\x7f\x1b"])
def test_any_text_arrives_or_is_refused(sandbox, words):
    result = sandbox.run("gke.sh", "manifest", *RUN, "--", *words)
    if result.returncode:
        assert result.returncode == 2
        assert re.search("[\x80-\x9f\u2028\u2029\ufeff\ufffe\uffff]", "".join(words))
        assert "can't carry the control characters" in result.stderr
        return
    pod = yaml.safe_load(result.stdout)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert [expand(word, {}) for word in pod["containers"][0]["command"]] == words


def test_create_shows_the_cost_and_hands_the_manifest_over(cluster):
    result = cluster.run("gke.sh", "create", *RUN, "--context=c d", "--yes", *TRAIN)
    assert result.returncode == 0, result.stderr
    assert "$21.60 an hour" in result.stderr
    assert cluster.calls() == [["kubectl", "--context=c d", "create", "--filename=-"]]
    given = (cluster.cloud / "manifest").read_text()
    assert yaml.safe_load(given) == manifest(cluster)
    dry = cluster.run("gke.sh", "create", *RUN, "--context=c d", "--dry_run", "--", "echo", "\nEND\n")
    assert cluster.calls() == []
    cluster.paste(dry.stdout)
    assert cluster.calls() == [["kubectl", "--context=c d", "create", "--filename=-"]]
    assert yaml.safe_load((cluster.cloud / "manifest").read_text()) == manifest(
        cluster, command=("--", "echo", "\nEND\n")
    )


@pytest.mark.parametrize("action", ["create", "delete"])
def test_what_costs_or_destroys_asks_and_failures_keep_their_code(cluster, action):
    command = TRAIN if action == "create" else ()
    refused = cluster.run("gke.sh", action, *RUN, *command)
    assert refused.returncode == 2
    assert "no terminal to ask on: add --yes" in refused.stderr
    assert cluster.run_answering("\n", "gke.sh", action, *RUN, *command).returncode == 1
    assert cluster.calls() == []
    failed = cluster.run("gke.sh", action, *RUN, "--yes", *command, CODE="5", WORDS="Error: forbidden\n")
    assert failed.returncode == 5
    assert "Error: forbidden\n" in failed.stderr


def test_logs_status_and_delete_name_the_jobset(cluster):
    for action in ("logs", "status", "delete"):
        assert cluster.run("gke.sh", action, "--name=run1", "--namespace=n", "--yes").returncode == 0
    logs, jobset, pods, delete = cluster.calls()
    selector = "--selector=jobset.sigs.k8s.io/jobset-name=run1"
    assert selector in logs
    assert "--follow" in logs
    assert jobset == ["kubectl", "--namespace=n", "get", "jobset", "run1"]
    assert selector in pods
    assert delete == ["kubectl", "--namespace=n", "delete", "jobset", "run1"]


XPK = ("--cluster=c", "--zone=z", "--project=p")


def test_xpk_gets_the_same_run(cluster):
    flags = ("--topology=v5p:2x2x1", *XPK, "--spot", "--restarts=4")
    result = cluster.run("gke.sh", "xpk", *RUN, *flags, "--yes", "--", "tpu-train", "it's a", '"b"')
    assert result.returncode == 0, result.stderr
    (call,) = cluster.calls()
    assert call[:3] == ["xpk", "workload", "create"]
    assert set(call[3:]) == {
        *("--workload=run1", "--cluster=c", "--zone=z", "--project=p", "--tpu-type=v5p-8", "--num-slices=1"),
        *("--docker-image=registry/image:1", "--max-restarts=4", "--spot", "--no-use-parallel-containers"),
        f"--command=env TPU_TRAIN_PROCESSES=1 LIBTPU_INIT_ARGS={FLAG} tpu-train 'it'\\''s a' '\"b\"'",
    }


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("xpk", "--cluster=c", *TRAIN), "xpk needs --zone"),
        (("xpk", *XPK, "--bucket=b", *TRAIN), "xpk has no --bucket"),
        (("xpk", *XPK, "--", "echo", "$(HOME)"), "xpk can't take a command with a line break or $"),
        (("manifest",), "needs a command after --"),
        (("manifest", "--restarts=-1", *TRAIN), "--restarts=-1 is not a whole number"),
        (("create", "--price=x", *TRAIN), "--price=x is not a number"),
        (("create", "--topology=7x:2x2x1", *TRAIN), "no price is known for 7x"),
        (("logs", *TRAIN), "logs takes no command"),
    ],
)
def test_bad_input_is_one_line_and_calls_nothing(cluster, flags, words):
    action, *rest = flags
    topology = () if any("--topology" in flag for flag in rest) else ("--topology=v6e:2x2",)
    result = cluster.run("gke.sh", action, "--name=run1", "--image=i", *topology, "--yes", *rest)
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert words in result.stderr
    assert cluster.calls() == []
