"""The manifest of examples/replicas fits the schemas of Kubernetes, the commands that it starts, and itself."""

import kubernetes_validate
import pytest
import yaml
from conftest import REPO

from jshadow.cli.main import parser
from jshadow.serving.http.access import OPEN

MANIFEST = (REPO / "examples" / "replicas" / "kubernetes.yaml").read_text()
OBJECTS = list(yaml.safe_load_all(MANIFEST))
PODS = {one["metadata"]["name"]: one["spec"]["template"] for one in OBJECTS if one["kind"] == "Deployment"}
CONTAINERS = {name: pod["spec"]["containers"][0] for name, pod in PODS.items()}
NAMES = {(one["kind"], one["metadata"]["name"]) for one in OBJECTS}
VERSIONS = ("1.29.0", kubernetes_validate.latest_version())


def matched(labels):
    """The deployments whose pods have these labels."""
    return [name for name, pod in PODS.items() if labels.items() <= pod["metadata"]["labels"].items()]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_fits_its_schema(version):
    assert len(NAMES) == len(OBJECTS) == 11
    for one in OBJECTS:
        kubernetes_validate.validate(one, version, strict=True)


def test_selectors_find_the_pods():
    assert sorted(PODS) == ["jshadow-router", "jshadow-worker"]
    for one in OBJECTS:
        name, spec = one["metadata"]["name"], one.get("spec", {})
        if one["kind"] == "Service":
            assert matched(spec["selector"]) == [name]
            ports = {port["name"] for port in CONTAINERS[name]["ports"]}
            assert {port["targetPort"] for port in spec["ports"]} <= ports
        elif "selector" in spec:
            assert matched(spec["selector"]["matchLabels"]) == [name]


def test_what_is_named_is_there():
    for pod in PODS.values():
        [container] = pod["spec"]["containers"]
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        assert {mount["name"] for mount in container.get("volumeMounts", [])} == volumes.keys()
        secrets = [volume["secret"]["secretName"] for volume in volumes.values() if "secret" in volume]
        secrets += [source["secretRef"]["name"] for source in container.get("envFrom", [])]
        assert {("Secret", name) for name in secrets} <= NAMES
        if "serviceAccountName" in pod["spec"]:
            assert ("ServiceAccount", pod["spec"]["serviceAccountName"]) in NAMES
        ports = {port["name"] for port in container["ports"]}
        probes = [probe for name, probe in container.items() if name.endswith("Probe")]
        assert {probe["httpGet"]["port"] for probe in probes} <= ports
    [binding] = [one for one in OBJECTS if one["kind"] == "RoleBinding"]
    for named in (binding["roleRef"], *binding["subjects"]):
        assert (named["kind"], named["name"]) in NAMES


def test_the_ingress_gives_questions_to_the_router_and_the_rest_to_workers():
    [ingress] = [one for one in OBJECTS if one["kind"] == "Ingress"]
    paths = ingress["spec"]["rules"][0]["http"]["paths"]
    services = {path["path"]: path["backend"]["service"]["name"] for path in paths}
    assert services == {
        "/v1/chat/completions": "jshadow-router",
        "/v1/completions": "jshadow-router",
        "/": "jshadow-worker",
    }
    assert {("Service", name) for name in services.values()} <= NAMES
    assert {path["backend"]["service"]["port"]["name"] for path in paths} == {"http"}


def test_the_worker_is_a_command_of_this_version():
    worker = CONTAINERS["jshadow-worker"]
    program, *rest = worker["command"]
    assert program == "jshadow"
    options = parser().parse_args([*rest, *worker["args"]])
    assert (options.host, options.port) == ("0.0.0.0", worker["ports"][0]["containerPort"])
    mounts = {mount["name"]: mount["mountPath"] for mount in worker["volumeMounts"]}
    [keys] = [one for one in OBJECTS if one["metadata"]["name"] == "jshadow-keys"]
    assert [f"{mounts['keys']}/{name}" for name in keys["stringData"]] == [str(options.api_key_file)]
    environment = {one["name"]: one["value"] for one in worker["env"]}
    assert environment["TMPDIR"] == mounts["cache"]
    cache = PODS["jshadow-worker"]["spec"]["volumes"][0]["emptyDir"]["sizeLimit"]
    assert options.library_disk_gib < int(cache.removesuffix("Gi"))


def test_the_worker_is_asked_and_ended_in_order():
    worker, spec = CONTAINERS["jshadow-worker"], PODS["jshadow-worker"]["spec"]
    paths = [worker[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")]
    assert paths == ["/health", "/ready", "/health"]
    assert set(paths) <= set(OPEN)  # kubelet has no key
    drain = parser().parse_args([*worker["command"][1:], *worker["args"]]).drain
    program, seconds = worker["lifecycle"]["preStop"]["exec"]["command"]
    ready = worker["readinessProbe"]
    assert program == "sleep"
    assert int(seconds) > ready["periodSeconds"] * ready["failureThreshold"]
    assert int(seconds) + drain < spec["terminationGracePeriodSeconds"]
    assert int(worker["resources"]["limits"]["nvidia.com/gpu"]) == 1


def test_the_router_is_a_command_of_its_version():
    router_args = pytest.importorskip("vllm_router.launch_router", reason="vllm-router has wheels for Linux only")
    router, worker = CONTAINERS["jshadow-router"], CONTAINERS["jshadow-worker"]
    assert router["command"] == ["vllm-router"]
    options = router_args.parse_router_args(router["args"])
    assert options.policy == "consistent_hash"
    assert options.service_discovery
    assert options.selector == PODS["jshadow-worker"]["metadata"]["labels"]
    assert options.service_discovery_port == worker["ports"][0]["containerPort"]
    assert options.health_check_endpoint == worker["readinessProbe"]["httpGet"]["path"]
    assert [options.port, options.prometheus_port] == [port["containerPort"] for port in router["ports"]]
