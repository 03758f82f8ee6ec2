"""Manifests of examples/clusters: their commands parse, their probes and services meet, their fields are known."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from mllm_compile.cli import make_app
from mllm_compile.serve_ray import Options
from mllm_compile.server.app import paths_of
from mllm_compile.server.options import ServeOptions

ROOT = Path(__file__).parents[2]
CLUSTERS = ROOT / "examples" / "clusters"
FILES = {path.stem: list(yaml.safe_load_all(path.read_text())) for path in sorted(CLUSTERS.glob("*.yaml"))}
DOCUMENTS = [
    pytest.param(name, document, id=f"{name}-{document['kind']}")
    for name, documents in FILES.items()
    for document in documents
    if "kind" in document
]
# What LeaderWorkerSet sets in each pod (kubernetes-sigs/lws), with values of its second one.
LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "mllm-0.mllm"}
# Fields of the custom resources and charts, seen in November 2026; a path of (…) is a list's item.
KNOWN = {
    "LeaderWorkerSet": {
        "spec": "replicas leaderWorkerTemplate rolloutStrategy startupPolicy networkConfig",
        "spec.leaderWorkerTemplate": "size restartPolicy workerTemplate leaderTemplate subGroupPolicy",
    },
    "RayService": {
        "spec": "serveConfigV2 rayClusterConfig serveService upgradeStrategy excludeHeadPodFromServeSvc",
        "spec.rayClusterConfig": "rayVersion headGroupSpec workerGroupSpecs enableInTreeAutoscaling autoscalerOptions",
        "spec.rayClusterConfig.headGroupSpec": "rayStartParams template serviceType headService enableIngress",
        "spec.rayClusterConfig.workerGroupSpecs.0": "groupName replicas minReplicas maxReplicas numOfHosts "
        "rayStartParams template idleTimeoutSeconds suspend",
    },
}
CHARTS = {
    "router": {
        "": "servingEngineSpec routerSpec",
        "routerSpec": "enableRouter replicaCount serviceDiscovery staticBackends staticModels routingLogic sessionKey "
        "engineScrapeInterval requestStatsWindow",
    },
    "llm_d": {
        "": "inferencePool inferenceExtension",
        "inferencePool": "targetPorts modelServerType modelServers apiVersion",
        "inferenceExtension": "replicas image extProcPort pluginsConfigFile pluginsCustomConfig flags",
    },
}

# What their values may be: a type, or the words of an enumeration. A name with ! has to be there.
VALUES: dict[str, dict[str, type | str]] = {
    "LeaderWorkerSet": {
        "spec.replicas": int,
        "spec.leaderWorkerTemplate.size": int,
        "spec.leaderWorkerTemplate.restartPolicy": "RecreateGroupOnPodRestart RecreateGroupAfterStart None",
        "spec.leaderWorkerTemplate.workerTemplate!": dict,
    },
    "RayService": {
        "spec.serveConfigV2!": str,
        "spec.rayClusterConfig.rayVersion": str,
        **{f"spec.rayClusterConfig.{group}.rayStartParams!": dict for group in ("headGroupSpec", "workerGroupSpecs.0")},
        **{f"spec.rayClusterConfig.{group}.template!": dict for group in ("headGroupSpec", "workerGroupSpecs.0")},
        "spec.rayClusterConfig.workerGroupSpecs.0.groupName!": str,
        **{f"spec.rayClusterConfig.workerGroupSpecs.0.{name}!": int for name in ("minReplicas", "maxReplicas")},
        "spec.rayClusterConfig.workerGroupSpecs.0.replicas": int,
    },
    "router": {
        "servingEngineSpec.enableEngine": bool,
        "routerSpec.enableRouter": bool,
        **{f"routerSpec.{name}": int for name in ("replicaCount", "engineScrapeInterval", "requestStatsWindow")},
        "routerSpec.serviceDiscovery": "k8s static",
        **{f"routerSpec.{name}": str for name in ("staticBackends!", "staticModels!", "sessionKey!")},
        "routerSpec.routingLogic": "roundrobin session prefixaware kvaware disaggregated_prefill",
    },
}


def at(document: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        document = document[int(name) if isinstance(document, list) else name]
    return document


def pods(value: Any) -> Iterator[dict[str, Any]]:
    """All templates of pods in a manifest."""
    if isinstance(value, dict):
        if "containers" in value.get("spec", ()):
            yield value
        for inner in value.values():
            yield from pods(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from pods(inner)


def parsed(words: list[str]) -> dict[str, Any]:
    """The options of a `serve` command, read by our own command line."""
    assert words[:2] == ["mllm-compile", "serve"]
    serve = typer.main.get_command(make_app()).commands["serve"]  # type: ignore[attr-defined]
    named = [re.sub(r"\$\((\w+)\)", lambda found: LWS[found[1]], word) for word in words[2:]]
    return serve.make_context("serve", named).params


def test_there_is_a_manifest_of_each_kind():
    kinds = {document["kind"] for documents in FILES.values() for document in documents if "kind" in document}
    assert kinds == {"Deployment", "Service", "LeaderWorkerSet", "RayService"}
    assert set(CHARTS) <= set(FILES)


@pytest.mark.parametrize(("name", "document"), DOCUMENTS)
def test_commands_parse_and_probes_ask_paths_of_the_server(name, document):
    paths = {path for method, path in paths_of(ServeOptions(model="x")) if method == "GET"}
    for pod in pods(document):
        for container in pod["spec"]["containers"]:
            ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
            if words := [*container.get("command", ()), *container.get("args", ())]:
                options = parsed(words)
                assert options["host"] == "0.0.0.0", "other pods reach it"
                assert not ports or ports["http"] == options["port"]
                assert pod["spec"]["terminationGracePeriodSeconds"] > float(options["shutdown_timeout"].rstrip("s"))
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                if kind in container:
                    asked = container[kind]["httpGet"]
                    assert asked["path"] in paths and asked["port"] in ports
            mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
            assert mounted <= {volume["name"] for volume in pod["spec"].get("volumes", ())}


def test_a_group_of_nodes_gets_its_size_its_rank_and_its_leader():
    (group, _) = FILES["leader_worker_set"]
    for pod in pods(group):
        (container,) = pod["spec"]["containers"]
        options = parsed(container["command"])
        told = [options[name] for name in ("nnodes", "node_rank", "master_addr")]
        assert told == [2, 1, LWS["LWS_LEADER_ADDRESS"]]
        assert {one["name"] for one in container["env"]} == {"MLLM_NODES_SECRET"}
    assert at(group, "spec.leaderWorkerTemplate.size") == 2


def test_services_find_pods_with_the_port():
    services = [(name, one) for name, documents in FILES.items() for one in documents if one.get("kind") == "Service"]
    assert len(services) == 2
    for name, service in services:
        wanted = service["spec"]["selector"].items()
        found = [pod for one in FILES[name] for pod in pods(one) if wanted <= pod["metadata"]["labels"].items()]
        assert len(found) == 1
        ports = {port["name"] for port in found[0]["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    backends = FILES["router"][0]["routerSpec"]["staticBackends"].split(",")
    assert backends == [f"http://{service['metadata']['name']}:8000" for _, service in services[-1:]]


@pytest.mark.parametrize(
    ("document", "known"),
    [
        *((document, KNOWN[document["kind"]]) for _, document in (one.values for one in DOCUMENTS)
          if document["kind"] in KNOWN),
        *((FILES[name][0], known) for name, known in CHARTS.items()),
    ],
)  # fmt: skip
def test_fields_are_known(document, known):
    for path, names in known.items():
        assert set(at(document, path)) <= set(names.split()), path


@pytest.mark.parametrize("name", VALUES)
def test_values_are_of_the_kinds_that_the_resources_definitions_ask_for(name):
    documents = [one for of in FILES.values() for one in of if one.get("kind") == name] or FILES[name]
    for path, wanted in VALUES[name].items():
        try:
            value = at(documents[0], path.rstrip("!"))
        except KeyError:
            assert not path.endswith("!"), f"{path} is missing"
            continue
        assert value in wanted.split() if isinstance(wanted, str) else type(value) is wanted, path


def test_what_ray_starts_with_is_text():
    cluster = FILES["ray_service"][0]["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    router = FILES["router"][0]["routerSpec"]
    assert len(router["staticBackends"].split(",")) == len(router["staticModels"].split(","))


def test_rays_application_takes_its_arguments():
    application = yaml.safe_load(FILES["ray_service"][0]["spec"]["serveConfigV2"])["applications"][0]
    module, _, name = application["import_path"].partition(":")
    builder = getattr(importlib.import_module(module), name)
    (given,) = inspect.signature(builder).parameters.values()
    assert given.annotation is Options, "else Ray hands the arguments on as they are"
    assert Options.model_validate(application["args"]).num_gpus == 1


def test_rays_own_cluster_lists_each_host_once_and_starts_one_head():
    (cluster,) = FILES["ray_cluster"]
    hosts = [cluster["provider"]["head_ip"], *cluster["provider"]["worker_ips"]]
    assert len(set(hosts)) == len(hosts) == 2
    head, worker = (" ".join(cluster[f"{kind}_start_ray_commands"]) for kind in ("head", "worker"))
    assert "--head --port=6379" in head and "--address=$RAY_HEAD_IP:6379" in worker


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")
def test_rays_own_schema_takes_the_cluster_and_no_wrong_name():
    jsonschema = pytest.importorskip("jsonschema")
    from ray.autoscaler._private.util import prepare_config, validate_config

    (cluster,) = FILES["ray_cluster"]
    validate_config(prepare_config(deepcopy(cluster)))
    with pytest.raises(jsonschema.ValidationError, match="docker_image"):
        validate_config(prepare_config(deepcopy(cluster) | {"docker_image": "mllm-ray:latest"}))


@pytest.mark.parametrize(("name", "document"), DOCUMENTS)
@pytest.mark.skipif(importlib.util.find_spec("kubernetes_validate") is None, reason="needs kubernetes-validate")
def test_kubernetes_own_schemas_take_them(name, document):
    import kubernetes_validate

    version = kubernetes_validate.latest_version()
    if document["apiVersion"] in ("v1", "apps/v1"):
        kubernetes_validate.validate(document, version, strict=True)
    for pod in pods(document) if document["kind"] in KNOWN else ():
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **pod}
        kubernetes_validate.validate(whole, version, strict=True)
