"""Builds the application that Ray Serve runs. Annotations are values here: by that of `app` Ray makes its argument."""

import importlib.util
from pathlib import Path
from typing import Any

from mllm_compile.config.schema import EngineConfig
from mllm_compile.config.sources import config_or_runtime, runtime_settings
from mllm_compile.errors import ConfigError
from mllm_compile.process.child_python import module_folders
from mllm_compile.serve_ray.options import Options

_ROUTER = "mllm_compile.serve_ray.router:PrefixRouter"


def app(options: Options) -> Any:
    """The application. Where it is deployed again with other options, replicas are replaced in turn.

    Raises:
        ConfigError: Ray Serve is not installed, or the config is not for a replica.
        MllmError: as of a config or a runtime that cannot be read.
    """
    missing = [name for name in ("ray", "aiohttp", "starlette") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"Ray Serve needs {', '.join(missing)}: pip install 'mllm-compile[ray,serve]'.")
    import ray
    from ray import serve
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig

    from mllm_compile.serve_ray.ingress import Ingress
    from mllm_compile.serve_ray.replica import Replica

    source = config_or_runtime(options.model)
    num_gpus = options.num_gpus if options.num_gpus is not None else _gpus_of(source, ray)
    autoscaling = AutoscalingConfig(
        min_replicas=options.min_replicas,
        max_replicas=options.max_replicas,
        target_ongoing_requests=options.target_ongoing_requests,
        upscale_delay_s=options.upscale_delay_s,
        downscale_delay_s=options.downscale_delay_s,
    )
    replica = serve.deployment(Replica).options(
        name="Replica",
        autoscaling_config=autoscaling,
        max_ongoing_requests=options.max_ongoing_requests,
        graceful_shutdown_timeout_s=options.shutdown_timeout_s,
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": num_gpus},
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
    )
    # One router sees all requests, of which it holds the bytes alone.
    ingress = serve.deployment(Ingress).options(
        name="Ingress",
        num_replicas=1,
        max_ongoing_requests=1 << 16,
        graceful_shutdown_timeout_s=options.shutdown_timeout_s,
    )
    return ingress.bind(replica.bind(options.model, options.serve_options, module_folders()))


def _gpus_of(source: EngineConfig | Path, ray: Any) -> float:
    """The GPUs of a replica.

    Raises:
        ConfigError: its ranks are to be started elsewhere than on its node.
    """
    settings = runtime_settings(source)
    if settings is None:
        return float(bool(ray.cluster_resources().get("GPU")))
    is_elsewhere = settings.distributed_executor_backend == "ray" or settings.nnodes > 1
    if is_elsewhere:
        key = "nnodes" if settings.nnodes > 1 else "distributed_executor_backend"
        raise ConfigError(
            f"runtime.{key} is {getattr(settings, key)}: a replica of Ray Serve has the ranks of its own node alone. "
            "Leave it out."
        )
    has_gpus = settings.device != "cpu" and ray.cluster_resources().get("GPU")
    return float(settings.num_ranks) if has_gpus else 0.0
