"""Options of vLLM's and SGLang's command lines: each is an option here, or is answered with the nearest way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from mllm_compile.cli import make_app, run
from mllm_compile.cli.foreign_options import _ANSWERS, advice_on
from mllm_compile.config.schema import EngineConfig

TINY = "configs/tiny.yaml"
PAGE = (Path(__file__).parents[2] / "docs/coming-from-vllm.md").read_text(encoding="utf-8")
SERVE = {
    option
    for one in typer.main.get_command(make_app()).commands["serve"].params
    for option in one.opts
    if option.startswith("--")
}

# Of vLLM's FrontendArgs (0052233) and of its engine's arguments.
VLLM = """
lora-modules chat-template chat-template-content-format trust-request-chat-template default-chat-template-kwargs
response-role return-tokens-as-token-ids enable-auto-tool-choice exclude-tools-when-tool-choice-none tool-call-parser
tool-parser-plugin log-config-file max-log-len enable-prompt-tokens-details enable-per-request-metrics
enable-server-load-tracking enable-force-include-usage enable-tokenizer-info-endpoint enable-log-outputs
enable-log-deltas log-error-stack host port uds uvicorn-log-level disable-uvicorn-access-log
disable-access-log-for-endpoints allow-credentials allowed-origins allowed-methods allowed-headers api-key ssl-keyfile
ssl-certfile ssl-ca-certs enable-ssl-refresh ssl-cert-reqs ssl-ciphers root-path middleware enable-request-id-headers
disable-fastapi-docs h11-max-incomplete-event-size h11-max-header-count enable-offline-docs
model task runner convert tokenizer hf-config-path skip-tokenizer-init revision code-revision tokenizer-revision
tokenizer-mode trust-remote-code allowed-local-media-path allowed-media-domains load-format download-dir
model-loader-extra-config use-tqdm-on-load config-format dtype max-model-len guided-decoding-backend reasoning-parser
logits-processors logits-processor-pattern model-impl distributed-executor-backend pipeline-parallel-size
tensor-parallel-size data-parallel-size enable-expert-parallel max-parallel-loading-workers disable-custom-all-reduce
block-size gpu-memory-utilization swap-space kv-cache-dtype num-gpu-blocks-override enable-prefix-caching
no-enable-prefix-caching cpu-offload-gb calculate-kv-scales disable-sliding-window seed max-logprobs disable-log-stats
disable-log-requests enable-log-requests quantization rope-scaling rope-theta hf-token hf-overrides enforce-eager
max-seq-len-to-capture mm-processor-kwargs limit-mm-per-prompt disable-mm-preprocessor-cache enable-lora max-loras
max-lora-rank device otlp-traces-endpoint collect-detailed-traces speculative-config served-model-name
num-scheduler-steps enable-chunked-prefill no-enable-chunked-prefill max-num-batched-tokens max-num-seqs
long-prefill-token-threshold scheduling-policy preemption-mode disable-cascade-attn generation-config
override-generation-config enable-sleep-mode kv-transfer-config compilation-config additional-config
enable-eplb structured-outputs-config attention-backend api-server-count headless config stream-interval
async-scheduling nnodes node-rank all2all-backend speculative-model num-speculative-tokens ngram-prompt-lookup-max
ngram-prompt-lookup-min
""".split
SGLANG = """
model-path tokenizer-path context-length mem-fraction-static chunked-prefill-size max-running-requests tp tp-size
dp-size ep-size disable-radix-cache disable-cuda-graph cuda-graph-bs schedule-policy grammar-backend log-level
enable-metrics tool-call-parser reasoning-parser chat-template is-embedding lora-paths json-model-override-args
random-seed enable-torch-compile enable-cache-report dist-init-addr speculative-algorithm speculative-draft-model-path
speculative-num-steps speculative-eagle-topk speculative-num-draft-tokens speculative-token-map
""".split


@pytest.mark.parametrize("name", [*VLLM(), *SGLANG()])
def test_an_option_of_another_server_is_one_here_or_is_answered(name):
    option = f"--{name}"
    if option in SERVE:
        return
    advice = advice_on(option, ["serve", TINY, option])
    assert advice is not None and option in advice
    assert len(advice) > len(option) + 30


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["-tp", "2"], "-tp is no option, but runtime.tensor_parallel_size of the config"),
        (["-pp", "2"], "-pp is no option, but runtime.pipeline_parallel_size of the config"),
        (
            ["--enable-auto-tool-choice"],
            "there is no option --enable-auto-tool-choice: tool calls and reasoning are read",
        ),
        (["--tool-call-parser=hermes"], "there is no option --tool-call-parser: "),
        (["--model", "m"], "give the model first: mllm-compile serve MODEL"),
        (["--chat-template", "x.jinja"], "put chat_template.jinja into a copy of its folder"),
        (["--no-enable-prefix-caching"], "runtime: {enable_prefix_cache: false}} into a .yaml file"),
        (["--hf-overrides", "{}"], "change the files in a copy of it"),
    ],
)
def test_the_answer_says_what_to_do(args, said, capsys):
    assert run(["serve", TINY, *args]) == 2
    assert said in capsys.readouterr().err


def test_every_name_of_the_pages_table_is_answered():
    rows = [
        row.split("|")[1]
        for row in PAGE.partition("| vLLM | here |")[2].partition("\n\n")[0].splitlines()
        if "|" in row
    ]
    written = [name for row in rows for name in re.findall(r"`(-{0,2}[a-z][a-z_0-9-]*)(?:[= {…\"][^`]*)?`", row)]
    names = {name if name.startswith("--") else "--" + name.replace("_", "-") for name in written}
    assert len(names) > 25
    # Arguments of methods, and commands.
    names -= {"--vllm", "--use-tqdm", "--generate", "--chat-template-kwargs", "--prompt-token-ids"}
    unanswered = [name for name in names if name not in SERVE and advice_on(name, [name]) is None]
    assert not unanswered


def test_no_answer_hides_an_option_or_a_key_of_the_config():
    keys = {
        key.replace("_", "-")
        for section in EngineConfig.model_fields.values()
        for key in section.annotation.model_fields
    }
    keys -= {"model"}  # of drafts; the model itself is an argument
    assert not _ANSWERS.keys() & (keys | {option.lstrip("-") for option in SERVE})


def test_what_nobody_knows_stays_a_mistake(capsys):
    assert advice_on("--frobnicate", ["--frobnicate"]) is None
    assert run(["serve", TINY, "--frobnicate"]) == 2
    assert "No such option: --frobnicate" in capsys.readouterr().err
