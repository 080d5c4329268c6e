"""launch/k8s: the manifests are valid for the operators, as far as can be checked without a cluster.

The tests repeat rules that the operators check (training-operator with API version v1, mpi-operator with v2beta1). If the
package kubeflow-training is installed, the names and types of fields, including those of the pods, are compared with
its OpenAPI types. tests/launch/test_k8s.py runs the pods' own commands.
"""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
import yaml

from dualtrain.config import parse
from tests.pool import ROOT

KINDS = {"PyTorchJob": "pytorchReplicaSpecs", "MPIJob": "mpiReplicaSpecs"}
JOBS = {kind: yaml.safe_load((ROOT / "launch" / "k8s" / f"{kind.lower()}.yaml").read_text()) for kind in KINDS}
SPEC = {
    "PyTorchJob": {"elasticPolicy", "nprocPerNode", "pytorchReplicaSpecs", "runPolicy"},
    "MPIJob": {"mpiImplementation", "mpiReplicaSpecs", "runPolicy", "slotsPerWorker", "sshAuthMountPath"},
}
RUN_POLICY = {"activeDeadlineSeconds", "backoffLimit", "cleanPodPolicy", "schedulingPolicy", "suspend"}
RUN_POLICY |= {"ttlSecondsAfterFinished", "managedBy"}


def replicas(kind: str) -> dict[str, Any]:
    specs: dict[str, Any] = JOBS[kind]["spec"][KINDS[kind]]
    return specs


PODS = {f"{kind}-{name}": replica["template"]["spec"] for kind in KINDS for name, replica in replicas(kind).items()}


def test_the_manifests_have_the_api_versions_of_the_operators():
    assert JOBS["PyTorchJob"]["apiVersion"] == "kubeflow.org/v1"
    assert JOBS["MPIJob"]["apiVersion"] == "kubeflow.org/v2beta1"


@pytest.mark.parametrize("kind", KINDS)
def test_the_spec_has_known_fields_with_known_values(kind):
    job = JOBS[kind]
    assert set(job) == {"apiVersion", "kind", "metadata", "spec"}
    assert job["kind"] == kind
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?", job["metadata"]["name"])  # names of pods begin with it
    assert set(job["spec"]) <= SPEC[kind]
    policy = job["spec"]["runPolicy"]
    assert set(policy) <= RUN_POLICY
    assert policy["cleanPodPolicy"] in ("None", "Running", "All")
    assert policy["backoffLimit"] >= 0
    for replica in replicas(kind).values():
        assert set(replica) == {"replicas", "restartPolicy", "template"}
        assert replica["replicas"] >= 1
        assert replica["restartPolicy"] in ("Never", "OnFailure")


def test_a_pytorchjob_has_one_master_and_containers_that_the_operator_finds():
    spec = JOBS["PyTorchJob"]["spec"]
    assert isinstance(spec["nprocPerNode"], str)  # the operator refuses a number
    assert set(replicas("PyTorchJob")) == {"Master", "Worker"}
    assert replicas("PyTorchJob")["Master"]["replicas"] == 1
    for replica in replicas("PyTorchJob").values():
        assert [container["name"] for container in replica["template"]["spec"]["containers"]] == ["pytorch"]


def test_an_mpijob_has_one_launcher_and_mounts_its_keys_in_the_home_folder():
    spec = JOBS["MPIJob"]["spec"]
    assert set(replicas("MPIJob")) == {"Launcher", "Worker"}
    assert replicas("MPIJob")["Launcher"]["replicas"] == 1
    assert spec["mpiImplementation"] == "OpenMPI"
    home = {
        each["name"]: each.get("value")
        for each in replicas("MPIJob")["Launcher"]["template"]["spec"]["containers"][0]["env"]
    }
    assert spec["sshAuthMountPath"] == f"{home['HOME']}/.ssh"


@pytest.mark.parametrize("pod", PODS.values(), ids=PODS)
def test_no_pod_runs_as_root_and_every_pod_requests_resources(pod):
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for container in pod["containers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        for limit in ("requests", "limits"):
            assert set(container["resources"][limit]) == {"cpu", "memory"}
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)


@pytest.mark.parametrize("kind", KINDS)
def test_the_pods_of_ranks_mount_memory_at_dev_shm(kind):
    specs = replicas(kind)
    for name in specs if kind == "PyTorchJob" else ["Worker"]:  # an MPIJob's launcher has no ranks
        pod = specs[name]["template"]["spec"]
        mounted = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes[mounted["/dev/shm"]]["emptyDir"]["medium"] == "Memory"


def pod_command(container: dict[str, Any]) -> list[str]:
    return [*container["command"], *container["args"]]


@pytest.mark.parametrize("pod", ["PyTorchJob-Master", "PyTorchJob-Worker", "MPIJob-Launcher"])
def test_a_start_and_a_restart_have_the_same_command_without_a_shell(pod):
    (container,) = PODS[pod]["containers"]
    command = pod_command(container)
    assert command[-4:] == ["--run-dir", "$(RUN)", "--resume", "auto"]
    assert all(isinstance(word, str) for word in command)
    assert "RUN" in [each["name"] for each in container["env"]]
    flags = command[command.index("dualtrain.main") + 1 :]
    config = parse([word.replace("$(RUN)", "/runs/one") for word in flags])
    assert (config.output.run_dir, config.output.resume) == ("/runs/one", "auto")


def assert_type(value: Any, kind: str, models: Any, core: Any) -> None:
    """Assert that ``value`` fits the OpenAPI type ``kind``: the type has all fields of ``value``, and their values fit."""
    inner = re.fullmatch(r"(?:list\[|dict\(str, )(.*)[\])]", kind)
    if inner:
        for each in value.values() if isinstance(value, dict) else value:
            assert_type(each, inner[1], models, core)
        return
    plain = {"str": str, "int": int, "bool": bool, "object": object}
    if kind in plain:
        assert isinstance(value, plain[kind]), (value, kind)
        return
    model = getattr(models, kind, None) or getattr(core, kind)
    names = {field: name for name, field in model.attribute_map.items()}
    for field, each in value.items():
        assert field in names, f"{kind} has no field {field}"
        assert_type(each, model.openapi_types[names[field]], models, core)


@pytest.mark.skipif(importlib.util.find_spec("kubeflow") is None, reason="needs kubeflow-training: bash tests/extras.sh")
def test_all_fields_of_the_manifests_exist_in_the_operators_openapi_types():
    from kubeflow.training import models
    from kubernetes import client

    assert_type(JOBS["PyTorchJob"], "KubeflowOrgV1PyTorchJob", models, client)
    # The package has only v1 of MPIJob: check the parts that v2beta1 has in common with v1.
    assert_type(JOBS["MPIJob"]["spec"]["runPolicy"], "KubeflowOrgV1RunPolicy", models, client)
    assert_type(replicas("MPIJob"), "dict(str, KubeflowOrgV1ReplicaSpec)", models, client)
