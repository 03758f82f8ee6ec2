"""The arguments of the deployment."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Options(BaseModel):
    """Arguments of `serve run mllm_compile.serve_ray:app`, or `args` of a Serve config file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    """A config, a runtime's folder, or a model, at a path that each node has."""

    revision: str = ""
    """Any text. Another one replaces the replicas, such as when the model at its path has changed."""

    serve_options: tuple[str, ...] = ()
    """Further options of `mllm-compile serve`, such as --api-key-file."""

    min_replicas: Annotated[int, Field(ge=0, le=1024)] = 1
    """Replicas that there are at least."""

    max_replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    """Replicas that there are at most."""

    target_ongoing_requests: Annotated[float, Field(gt=0)] = 32
    """Requests of a replica, waiting ones too, that Ray aims at when it chooses their number."""

    max_ongoing_requests: Annotated[int, Field(ge=1)] = 1024
    """Requests that a replica takes at most; others wait in the ingress."""

    upscale_delay_s: Annotated[float, Field(ge=0)] = 10.0
    """Seconds of too many requests before a replica is started."""

    downscale_delay_s: Annotated[float, Field(ge=0)] = 600.0
    """Seconds of too few before one ends."""

    shutdown_timeout_s: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """Seconds that a replica's requests have to end before it does."""

    num_gpus: Annotated[float, Field(ge=0)] | None = None
    """GPUs of a replica; None: one for each rank, or none where the cluster has none."""

    num_cpus: Annotated[float, Field(ge=0)] = 1
    """CPUs that Ray reserves for a replica."""

    @model_validator(mode="after")
    def _in_order(self) -> Options:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas is {self.min_replicas} and max_replicas {self.max_replicas}; expected less")
        return self
