"""The programs of a model that pools: packed texts to hidden states, and its head; both traced apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mllm_compile.compiler.graph_text import GraphDumper
from mllm_compile.compiler.lowered import BuiltModel, Lowered
from mllm_compile.compiler.lowering import lower
from mllm_compile.compiler.pieces import packed_operands
from mllm_compile.compiler.rewriting import lowered_of, rewrite_graph
from mllm_compile.config.folders.model_folder import ModelFolder
from mllm_compile.config.folders.sentence_files import read_sentence_files
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.kernels.text_attention import add_text_attention
from mllm_compile.model.refusals import refusing
from mllm_compile.process.no_gc import gc_paused
from mllm_compile.process.progress import Reporter
from mllm_compile.runtime.program.spec import PoolingPrograms
from mllm_compile.store.key import max_traced_tokens

if TYPE_CHECKING:
    from mllm_compile.model.trace import Trace


def lower_any(
    config: ResolvedConfig, built: BuiltModel, model: ModelFolder, dump_dir: Path, reporter: Reporter
) -> Lowered:
    """The programs of a model that pools, or of one that generates, less those for images and adapters; raises as
    lower_pooling and lower."""
    if config.model.pools:
        return lower_pooling(config, built, model, dump_dir, reporter)
    return lower(config, built, dump_dir, reporter)


def lower_pooling(
    config: ResolvedConfig, built: BuiltModel, model: ModelFolder, dump_dir: Path, reporter: Reporter
) -> Lowered:
    """Traces, checks and rewrites a model that pools, and its head.

    Args:
        model: its folder, with sentence-transformers' files where it has some.
        dump_dir: gets a text file for each graph after its passes.

    Raises:
        UnsupportedModelError: the model would not be served right.
        CheckpointError: the folder's files do not fit each other.
        CompileError: a pass failed.
    """
    from mllm_compile.model.pooling.plan import plan_pooling
    from mllm_compile.model.pooling.supported import check_texts
    from mllm_compile.model.pooling.trace import trace_body

    hf_model, device = built.hf_model, config.runtime.device
    most = max_traced_tokens(config)
    with reporter.stage("trace"), gc_paused():
        body = trace_body(hf_model, device, most)
        is_causal = check_texts(body, hf_model)
        files = read_sentence_files(model.path) if config.model.task == "embed" else None
        tokens = config.model.classifier_from_token
        ids = None if tokens is None else _ids_of(tokens, model)
        facts, head = plan_pooling(hf_model, model.config, files, ids, is_causal, device, most)
        facts = replace(facts, score_template=config.model.score_template)
    rewriting = refusing(f"{hf_model.model.config.model_type!r} models cannot be rewritten")
    dump = GraphDumper(dump_dir)
    with reporter.stage("passes"), gc_paused(), rewriting:
        lowered = _rewrite(config, built, body)
        of_head = () if head is None else (_rewrite(config, built, head),)
    for name, one in zip(("body", "head"), (lowered, *of_head), strict=False):
        dump(name, one.graph, f"after {len(one.reports)} passes")
    programs = PoolingPrograms(facts, of_head[0].program if of_head else None)
    return replace(lowered, program=replace(lowered.program, pooling=programs), of_head=of_head)


def _rewrite(config: ResolvedConfig, built: BuiltModel, trace: Trace) -> Lowered:
    from mllm_compile.passes.pipeline import OF_TEXTS, pass_names

    not_of_texts = {name: "it is for models that generate" for name in pass_names() if name not in OF_TEXTS}
    rewritten = rewrite_graph(config, built, trace, not_of_texts)
    return lowered_of(
        config, built, rewritten, lambda graph, program: add_text_attention(config, program, packed_operands(graph))
    )


def _ids_of(tokens: tuple[str, str], model: ModelFolder) -> tuple[int, int]:
    """The ids of the tokens that say no and yes."""
    from mllm_compile.errors import ConfigError
    from mllm_compile.text.tokenizer import load_tokenizer

    tokenizer: Any = load_tokenizer(model.path)
    ids = [None if tokenizer is None else tokenizer.token_to_id(token) for token in tokens]
    no, yes = ids
    if no is None or yes is None:
        raise ConfigError(
            f"model.classifier_from_token is {list(tokens)}: the model's tokenizer has no token "
            f"{tokens[ids.index(None)]!r}. Name two tokens of its vocabulary."
        )
    return no, yes
