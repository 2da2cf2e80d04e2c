"""The JobSet: documented fields alone, valid Kubernetes, and processes that find each other."""

import pytest

from .launching import ODD, RUN, VALID, rendered

yaml = pytest.importorskip("yaml")


def manifest(argv, cwd) -> dict:
    command, text = rendered(argv, cwd)
    assert command.startswith("kubectl create ")
    return yaml.safe_load(text)


def job_of(jobset: dict) -> dict:
    (replicated,) = jobset["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def pod(jobset: dict) -> dict:
    return job_of(jobset)["template"]["spec"]


# Fields that we write, of jobset.x-k8s.io/v1alpha2 (JobSetSpec, ReplicatedJob, FailurePolicy, FailurePolicyRule, Network), of batch/v1
# (JobSpec, PodFailurePolicy) and v1 (PodSpec, Container). A type; a dict of fields ("?": may be missing, "*": any); a list of one kind.
VOLUME = {
    "name": str, "persistentVolumeClaim?": {"claimName": str}, "nfs?": {"server": str, "path": str}, "emptyDir?": {"medium": str},
    "csi?": {"driver": str, "volumeAttributes": {"*": str}},
}  # fmt: skip
CONTAINER = {
    "name": str, "image": str, "workingDir": str, "resources?": {"limits": {"*": int}}, "securityContext?": {"privileged": bool},
    "volumeMounts": [{"name": str, "mountPath": str}], "command": [str],
    "env": [{"name": str, "value?": str, "valueFrom?": {"fieldRef": {"fieldPath": str}}}],
}  # fmt: skip
POD = {
    "restartPolicy": str, "terminationGracePeriodSeconds": int, "hostNetwork?": bool, "dnsPolicy?": str, "nodeSelector?": {"*": str},
    "tolerations?": [{"key": str, "operator": str}], "serviceAccountName?": str, "volumes": [VOLUME], "containers": [CONTAINER],
}  # fmt: skip
JOB = {
    "parallelism": int, "completions": int, "completionMode": str, "backoffLimit": int,
    "podFailurePolicy": {"rules": [{"action": str, "onExitCodes": {"containerName": str, "operator": str, "values": [int]}}]},
    "template": {"metadata": {"labels": {"*": str}, "annotations?": {"*": str}}, "spec": POD},
}  # fmt: skip
JOBSET_FIELDS = {
    "apiVersion": str, "kind": str, "metadata": {"name": str, "labels": {"*": str}, "annotations?": {"*": str}},
    "spec": {
        "network": {"enableDNSHostnames": bool},
        "failurePolicy": {"maxRestarts": int, "rules": [{"name": str, "action": str, "onJobFailureReasons": [str]}]},
        "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": JOB}}],
    },
}  # fmt: skip


def breaches(given, fields, where="") -> list[str]:
    """Where `given` is not what `fields` describes."""
    if isinstance(fields, type):
        return [] if type(given) is fields else [f"{where}: {given!r}"]
    if isinstance(fields, list):
        items = given if type(given) is list else []
        return [b for i, item in enumerate(items) for b in breaches(item, fields[0], f"{where}[{i}]")] if items else [f"{where}: {given!r}"]
    known = {name.rstrip("?"): kind for name, kind in fields.items()}
    found = [f"{where}.{name}: missing" for name in fields if name != "*" and not name.endswith("?") and name not in given]
    for name, value in given.items():
        kind = known.get(name, known.get("*"))
        found += breaches(value, kind, f"{where}.{name}") if kind else [f"{where}.{name}: unknown"]
    return found


JOBSETS = {name: argv for name, argv in VALID.items() if argv[0] == "jobset"}
every_jobset = pytest.mark.parametrize("argv", JOBSETS.values(), ids=JOBSETS)


@every_jobset
def test_a_jobset_has_the_documented_fields(argv, tmp_path):
    jobset = manifest(argv, tmp_path)
    assert breaches(jobset, JOBSET_FIELDS) == []
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    job, inner = job_of(jobset), pod(jobset)
    (container,) = inner["containers"]
    assert job["completions"] == job["parallelism"] and job["completionMode"] == "Indexed"
    assert inner["restartPolicy"] == "Never"  # a podFailurePolicy asks for it
    assert job["backoffLimit"] == 0 and inner["terminationGracePeriodSeconds"] == 120
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in inner["volumes"]}
    assert all(sum(key != "name" for key in volume) == 1 for volume in inner["volumes"])
    assert jobset["metadata"]["labels"]["xpk.google.com/workload"] == "no"
    assert container["command"] == ["gammalm", *(word.replace("$(", "$$(") for word in RUN[1:])]  # Kubernetes makes $( of $$(
    if ODD[1] in argv:
        assert {"name": "ODD", "value": ODD[1].removeprefix("ODD=").replace("$(", "$$(")} in container["env"]
    jobset["spec"]["restarts"] = 3
    assert breaches(jobset, JOBSET_FIELDS) == [".spec.restarts: unknown"]


@every_jobset
def test_the_job_of_a_jobset_is_valid_kubernetes(argv, tmp_path):
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed here")
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job_of(manifest(argv, tmp_path))}
    kubernetes_validate.validate(job, "1.31", strict=True)


@every_jobset
def test_a_jobset_starts_again_but_for_a_refused_config(argv, tmp_path):
    """Exit status 2 of the trainer's container fails its job for a reason that fails the JobSet; any other counts as a restart."""
    jobset = manifest(argv, tmp_path)
    (rule,) = job_of(jobset)["podFailurePolicy"]["rules"]
    assert rule == {"action": "FailJob", "onExitCodes": {"containerName": "gammalm", "operator": "In", "values": [2]}}
    assert pod(jobset)["containers"][0]["name"] == "gammalm"
    policy = jobset["spec"]["failurePolicy"]
    (rule,) = policy["rules"]
    assert (rule["action"], rule["onJobFailureReasons"], policy["maxRestarts"]) == ("FailJobSet", ["PodFailurePolicy"], 20)


@pytest.mark.parametrize("name, source", [("tpu", "persistentVolumeClaim"), ("cpu", "nfs"), ("one-chip", "csi")])
def test_the_storage_of_a_jobset_is_where_it_works(name, source, tmp_path):
    inner = pod(manifest(JOBSETS[f"jobset-{name}"], tmp_path))
    (container,) = inner["containers"]
    assert source in inner["volumes"][0] and container["volumeMounts"][0]["name"] == inner["volumes"][0]["name"]
    assert container["workingDir"] == container["volumeMounts"][0]["mountPath"] == "/shared"
    assert environment(JOBSETS[f"jobset-{name}"], tmp_path)["JAX_COMPILATION_CACHE_DIR"] == "/shared/compiled"


def environment(argv, cwd) -> dict:
    (container,) = pod(manifest(argv, cwd))["containers"]
    return {item["name"]: item.get("value") for item in container["env"]}


def test_a_jobset_covers_the_topology(tmp_path):
    """Nodes times chips are the slice; the processes find each other as JAX does it on GKE, alone where there is one."""
    jobset = manifest(JOBSETS["jobset-tpu"], tmp_path)
    inner = pod(jobset)
    assert job_of(jobset)["parallelism"] * inner["containers"][0]["resources"]["limits"]["google.com/tpu"] == 4 * 4 * 8
    assert inner["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"] == "tpu-v5p-slice"
    assert inner["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4x8"
    assert jobset["spec"]["replicatedJobs"][0]["replicas"] == 2
    assert environment(JOBSETS["jobset-tpu"], tmp_path)["GAMMALM_COORDINATOR"] == "auto"
    assert jobset["metadata"]["annotations"] == {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    assert "GAMMALM_COORDINATOR" not in environment(JOBSETS["jobset-one-chip"], tmp_path)
    one = manifest(JOBSETS["jobset-one-chip"], tmp_path)
    assert job_of(one)["parallelism"] == pod(one)["containers"][0]["resources"]["limits"]["google.com/tpu"] == 1


def test_processes_of_a_gpu_jobset_find_each_other(tmp_path):
    from gammalm.sharding.processes import arguments

    given = environment(JOBSETS["jobset-gpu"], tmp_path)
    inner = pod(manifest(JOBSETS["jobset-gpu"], tmp_path))
    assert inner["hostNetwork"] and inner["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert given.pop("GAMMALM_PROCESS_ID") is None  # of the completion index, by pod
    found = arguments(env=given | {"GAMMALM_PROCESS_ID": "3"})
    # <jobset>-<replicated job>-<job>-<pod>.<subdomain, by default the jobset's name>
    assert (found["coordinator_address"], found["num_processes"], found["process_id"]) == ("no-slice-job-0-0.no:55527", 4, 3)
