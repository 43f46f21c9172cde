"""The manifest of examples/replicas fits the schemas of Kubernetes, the commands that it starts, and itself."""

import kubernetes_validate
import pytest
import yaml
from conftest import REPO

from jshadow.cli.fields import command_of
from jshadow.cli.main import parser
from jshadow.serving.http.access import OPEN

OBJECTS = list(yaml.safe_load_all((REPO / "examples" / "replicas" / "kubernetes.yaml").read_text()))
NAMES = {(one["kind"], one["metadata"]["name"]): one for one in OBJECTS}
PODS = {name: one["spec"]["template"] for (kind, name), one in NAMES.items() if kind == "Deployment"}
CONTAINERS = {name: pod["spec"]["containers"][0] for name, pod in PODS.items()}
WORKER = CONTAINERS["jshadow-worker"]


def test_every_object_fits_its_schema():
    assert len(NAMES) == len(OBJECTS) == 11
    for version in ("1.29.0", kubernetes_validate.latest_version()):
        for one in OBJECTS:
            kubernetes_validate.validate(one, version, strict=True)


def test_selectors_find_the_pods_and_what_is_named_is_there():
    assert sorted(PODS) == ["jshadow-router", "jshadow-worker"]
    named = []
    for (kind, name), one in NAMES.items():
        if selector := one.get("spec", {}).get("selector"):
            labels = (selector if kind == "Service" else selector["matchLabels"]).items()
            assert [pod for pod in PODS if labels <= PODS[pod]["metadata"]["labels"].items()] == [name]
        if kind == "Service":
            ports = {port["name"] for port in CONTAINERS[name]["ports"]}
            assert {port["targetPort"] for port in one["spec"]["ports"]} <= ports
        if kind == "RoleBinding":
            named += [(other["kind"], other["name"]) for other in (one["roleRef"], *one["subjects"])]
    for pod in PODS.values():
        [container] = pod["spec"]["containers"]
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        assert {mount["name"] for mount in container.get("volumeMounts", [])} == volumes.keys()
        named += [("Secret", one["secret"]["secretName"]) for one in volumes.values() if "secret" in one]
        named += [("Secret", source["secretRef"]["name"]) for source in container.get("envFrom", [])]
        named += [("ServiceAccount", name) for key, name in pod["spec"].items() if key == "serviceAccountName"]
        probes = [probe for name, probe in container.items() if name.endswith("Probe")]
        assert {probe["httpGet"]["port"] for probe in probes} <= {port["name"] for port in container["ports"]}
    [ingress] = [one for one in OBJECTS if one["kind"] == "Ingress"]
    paths = ingress["spec"]["rules"][0]["http"]["paths"]
    services = {path["path"]: path["backend"]["service"] for path in paths}
    questions = dict.fromkeys(("/v1/chat/completions", "/v1/completions"), "jshadow-router")
    assert {path: service["name"] for path, service in services.items()} == questions | {"/": "jshadow-worker"}
    assert {service["port"]["name"] for service in services.values()} == {"http"}
    named += [("Service", service["name"]) for service in services.values()]
    assert {kind for kind, _ in named} >= {"Secret", "ServiceAccount", "Service"}
    assert set(named) <= NAMES.keys()


def test_the_worker_is_a_command_of_this_version_that_is_asked_and_ended_in_order():
    program, *rest = WORKER["command"]
    assert program == "jshadow"
    options = command_of(parser().parse_args([*rest, *WORKER["args"]]))
    assert (options.host, options.port) == ("0.0.0.0", WORKER["ports"][0]["containerPort"])
    mounts = {mount["name"]: mount["mountPath"] for mount in WORKER["volumeMounts"]}
    keys = NAMES["Secret", "jshadow-keys"]["stringData"]
    assert [f"{mounts['keys']}/{name}" for name in keys] == [str(options.api_key_file)]
    assert {"name": "TMPDIR", "value": mounts["cache"]} in WORKER["env"]
    spec = PODS["jshadow-worker"]["spec"]
    assert options.library_disk_gib < int(spec["volumes"][0]["emptyDir"]["sizeLimit"].removesuffix("Gi"))
    paths = [WORKER[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")]
    assert paths == ["/health", "/ready", "/health"]
    assert set(paths) <= set(OPEN)  # kubelet has no key
    program, seconds = WORKER["lifecycle"]["preStop"]["exec"]["command"]
    ready = WORKER["readinessProbe"]
    assert program == "sleep"
    assert int(seconds) > ready["periodSeconds"] * ready["failureThreshold"]
    assert int(seconds) + options.drain < spec["terminationGracePeriodSeconds"]
    assert int(WORKER["resources"]["limits"]["nvidia.com/gpu"]) == 1


def test_the_router_is_a_command_of_its_version():
    router_args = pytest.importorskip("vllm_router.launch_router", reason="vllm-router has wheels for Linux only")
    router = CONTAINERS["jshadow-router"]
    assert router["command"] == ["vllm-router"]
    options = router_args.parse_router_args(router["args"])
    assert options.policy == "consistent_hash"
    assert options.service_discovery
    assert options.selector == PODS["jshadow-worker"]["metadata"]["labels"]
    assert options.service_discovery_port == WORKER["ports"][0]["containerPort"]
    assert options.health_check_endpoint == WORKER["readinessProbe"]["httpGet"]["path"]
    assert [options.port, options.prometheus_port] == [port["containerPort"] for port in router["ports"]]
