"""The server as a deployment of Ray Serve: `serve run mllm_compile.serve_ray:app model=CONFIG.yaml`.

A replica (replica.py) is `mllm-compile serve` with an engine of its own. The ingress (ingress.py) takes requests, and
passes their bytes on to the replica that its router (router.py) chooses, as `--replicas` does. Ray starts replicas by
the requests that they have, and replaces them where the model or its runtime is another: each ends when its requests
have.
"""

from mllm_compile.serve_ray.build import app
from mllm_compile.serve_ray.options import Options

__all__ = ["Options", "app"]
