"""Options of vLLM's and SGLang's command lines that no command has, and what to do instead.

Those that are keys of the config under another name are config/mistakes.py's; this module has what is no key.
"""

from __future__ import annotations

import re

from mllm_compile.config.sources import unknown_option

_TWO_LETTERS = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-q": "--quantization",
    "-O": "--compilation-config",
}
# By reason, the names behind `--`.
_INSTEAD = {
    "give the model first: mllm-compile serve MODEL": "model model-tag model-path",
    "tool calls and reasoning are read without it, as the model's chat template writes them (docs/tool-calls.md)": """
        enable-auto-tool-choice tool-call-parser tool-parser-plugin reasoning-parser reasoning-parser-plugin
        exclude-tools-when-tool-choice-none""",
    "a template is the model's: put chat_template.jinja into a copy of its folder, and serve that": """
        chat-template chat-template-content-format trust-request-chat-template response-role""",
    "give chat_template_kwargs in each request": "default-chat-template-kwargs",
    "it comes from the model's folder: change the files in a copy of it, and serve that": """
        tokenizer tokenizer-mode tokenizer-revision tokenizer-path skip-tokenizer-init hf-config-path hf-overrides
        code-revision config-format rope-scaling rope-theta json-model-override-args override-generation-config
        generation-config disable-sliding-window""",
    "HF_HOME says where files of the hub are, and HF_TOKEN opens gated repositories": """
        download-dir hf-token ignore-patterns""",
    "no prompt is logged; --quiet leaves out the line a request has, --verbose shows more": """
        disable-log-requests enable-log-requests max-log-len enable-log-outputs enable-log-deltas log-level
        uvicorn-log-level disable-uvicorn-access-log disable-access-log-for-endpoints log-config-file log-error-stack
        log-requests log-requests-level""",
    "/metrics is always there": """
        disable-log-stats enable-metrics show-hidden-metrics-for-version enable-server-load-tracking
        enable-per-request-metrics""",
    "it is always on": """
        enable-chunked-prefill enable-prompt-tokens-details enable-tokenizer-info-endpoint enable-request-id-headers
        async-scheduling use-v2-block-manager enable-torch-compile enable-cache-report scheduling-policy schedule-policy
        compilation-level""",
    "ask for it in each request (docs/server.md)": """
        enable-force-include-usage return-tokens-as-token-ids stream-interval""",
    "give each by itself: --allowed-origin https://app.example": "allowed-origins",
    "a proxy before the server has that": """
        allow-credentials allowed-methods allowed-headers middleware ssl-ca-certs ssl-cert-reqs ssl-ciphers
        enable-ssl-refresh ssl-keyfile-password h11-max-header-count""",
    "heads have 256 KiB, and --max-body bounds bodies": "h11-max-incomplete-event-size",
    "/openapi.json is always there, and no page of it": "disable-fastapi-docs enable-offline-docs",
    "it is --enable-sleep-mode here, with --enable-rl": "enable-memory-saver",
    "images are data URLs, or of media.allowed_domains; no file is read for a request": "allowed-local-media-path",
    "images are prepared as the model's processor says, within docs/images.md's bounds": """
        limit-mm-per-prompt mm-processor-kwargs media-io-kwargs disable-mm-preprocessor-cache mm-processor-cache-gb
        disable-chunked-mm-input""",
    "the task is the checkpoint's, or model.task of the YAML (docs/encoders.md)": """
        runner convert override-pooler-config pooler-config is-embedding""",
    "up to 20 alternatives of a token are told": "max-logprobs",
    "there is one process for HTTP, and one for the engine": """
        api-server-count disable-frontend-multiprocessing worker-cls scheduler-cls""",
    "how much of the device's memory is used is runtime.mem_fraction_static; the rest follows": """
        swap-space num-gpu-blocks-override kv-cache-memory-bytes preemption-mode""",
    "what is captured is cudagraph: {mode: …, decode_requests: …}": """
        max-seq-len-to-capture compilation-config cuda-graph-sizes cudagraph-mode""",
    "scales of a KV cache in fp8 are the checkpoint's": "calculate-kv-scales",
    "the model is always Transformers' own, compiled": "model-impl",
    "code is not loaded from options": """
        logits-processors logits-processor-pattern enable-custom-logit-processor additional-config plugins""",
    "write what it would hold into a YAML, and give that as MODEL": "config",
    "it is --kv-transfer-config here (docs/apart.md)": "disaggregation-mode",
    "adapters are in the model's dtype, and read from their folders when they are needed": """
        lora-dtype fully-sharded-loras max-cpu-loras max-loaded-loras lora-eviction-policy""",
    "each step is as large as runtime.max_num_batched_tokens allows": """
        num-scheduler-steps multi-step-stream-outputs scheduler-delay-factor max-num-partial-prefills
        long-prefill-token-threshold disable-async-output-proc""",
    "spans are of requests: --otlp-traces-endpoint": "collect-detailed-traces enable-trace",
    "weights are read by one thread a rank, straight to their place": """
        max-parallel-loading-workers model-loader-extra-config use-tqdm-on-load""",
    "it is --master-addr and --master-port here (docs/parallel.md)": "dist-init-addr",
    "each node runs `serve`, and node 0 alone answers": "headless",
    "ranks are as docs/parallel.md has them": "ray-workers-use-nsight decode-context-parallel-size",
}
_ANSWERS = {name: reason for reason, names in _INSTEAD.items() for name in names.split()}


def advice_on(option: str, args: list[str]) -> str | None:
    """Advice on an option that no command has; None where nobody knows it.

    Args:
        option: as the parser names it: of `-tp` its first letter alone.
        args: the command line.
    """
    whole = next((arg for arg in args if re.match(rf"{re.escape(option)}\w*$", arg)), option)
    long = _TWO_LETTERS.get(whole, whole)
    name = long.lstrip("-").replace("_", "-")
    reason = _ANSWERS.get(name) or _ANSWERS.get(name.removeprefix("no-"))
    if reason is not None:
        return f"there is no option {whole}: {reason}"
    advice = unknown_option(long)
    return advice and advice.replace(long, whole, 1)
