"""Plans what a model that pools makes of hidden states: its facts, and its head as a graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mllm_compile.config.folders.sentence_files import SentenceFiles
from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.hf_model import NO_LIMIT, HFModel
from mllm_compile.model.pooling.build import body_of, kinds_of_tokens, labels_of, reads_decoder
from mllm_compile.model.pooling.heads import (
    Classifier,
    DenseLayers,
    YesNo,
    add_dense_layers,
    check_yes_no,
    rule_of,
    trace_head,
)
from mllm_compile.model.trace import Trace
from mllm_compile.runtime.pooling.facts import Activation, PoolingFacts, PoolingRule

_ACTIVATIONS: dict[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
_OF_PROBLEMS: dict[str, Activation] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


def plan_pooling(
    hf_model: HFModel,
    config: Mapping[str, Any],
    files: SentenceFiles | None,
    yes_no: tuple[int, int] | None,
    is_causal: bool,
    device: str,
    most_rows: int,
) -> tuple[PoolingFacts, Trace | None]:
    """The facts, and the head's graph; None where hidden states are the answer.

    Args:
        hf_model: with real weights, as check_texts leaves it.
        config: its config.json.
        files: sentence-transformers' ones, of an embedder.
        yes_no: the ids of the tokens that say no and yes, of a reranker.
        is_causal: tokens see those before them alone.
        most_rows: rows that a step may have.

    Raises:
        UnsupportedModelError: its head would not be served right.
        CheckpointError: files do not fit each other.
    """
    model: Any = hf_model.model
    width = width_of(hf_model)
    common: dict[str, Any] = {
        "width": width,
        "kinds": kinds_of_tokens(body_of(model)),
        "max_length": _most_tokens(hf_model, files),
    }
    if yes_no is not None:
        _refuse_soft_cap(hf_model)
        facts = PoolingFacts(task="classify", rules=("last",), outputs=1, activation="sigmoid", **common)
        head = YesNo(model, *yes_no)
        check_yes_no(hf_model, head, width, device)
        return facts, trace_head(hf_model, head, width, device, most_rows)
    if _is_classifier(model):
        return _plan_classifier(hf_model, config, common, device, most_rows)
    rules: tuple[PoolingRule, ...] = ("last",) if is_causal else ("mean",)
    outputs = width
    if files is not None:
        rules = files.rules or ("token",)
        outputs = add_dense_layers(hf_model, files.dense, width * len(rules))
    facts = PoolingFacts(
        task="token_embed" if rules == ("token",) else "embed",
        rules=rules,
        outputs=outputs,
        dimensions=_dimensions(config),
        **common,
        **({} if files is None else _said_by(files)),
    )
    if files is None or not files.dense:
        return facts, None
    return facts, trace_head(hf_model, DenseLayers(model, files.dense), width * len(rules), device, most_rows)


def width_of(hf_model: HFModel) -> int:
    """Numbers of a hidden state."""
    return hf_model.sizes().hidden_size


def _is_classifier(model: Any) -> bool:
    return type(model).__name__.endswith(("ForSequenceClassification", "ForTokenClassification"))


def _plan_classifier(
    hf_model: HFModel, config: Mapping[str, Any], common: dict[str, Any], device: str, most_rows: int
) -> tuple[PoolingFacts, Trace]:
    model: Any = hf_model.model
    rule = rule_of(hf_model, common["width"], device)
    labels = labels_of(model.config)
    facts = PoolingFacts(
        task="token_classify" if rule == "token" else "classify",
        rules=(rule,),
        outputs=len(labels),
        labels=labels,
        activation=_activation(config, len(labels), getattr(model.config, "problem_type", None)),
        end_id=model.config.eos_token_id if reads_decoder(model) else None,
        **common,
    )
    return facts, trace_head(hf_model, Classifier(model), common["width"], device, most_rows)


def _activation(config: Mapping[str, Any], num_labels: int, problem: str | None) -> Activation:
    """The activation by sentence-transformers' entries of config.json, its kind of problem, or the number of labels."""
    section = config.get("sentence_transformers")
    said = section.get("activation_fn") if isinstance(section, dict) else None
    said = said or config.get("sbert_ce_default_activation_function")
    if said is not None:
        name = str(said).rpartition(".")[2]
        if name not in _ACTIVATIONS:
            raise UnsupportedModelError(
                f"config.json names the activation {said!r} for scores; served: {', '.join(_ACTIVATIONS)}"
            )
        return _ACTIVATIONS[name]
    if problem is not None:
        return _OF_PROBLEMS[problem]
    return "sigmoid" if num_labels == 1 else "softmax"


def _dimensions(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The lengths that embeddings may be cut to, as vLLM reads them: (0,) stands for any."""
    listed = config.get("matryoshka_dimensions")
    if isinstance(listed, list) and all(type(one) is int and one > 0 for one in listed):
        return tuple(sorted(listed))
    return (0,) if config.get("is_matryoshka") is True else ()


def _most_tokens(hf_model: HFModel, files: SentenceFiles | None) -> int:
    said = [length for length in (hf_model.context_len, 0 if files is None else files.max_length) if length]
    most = min(said)
    return 0 if most >= NO_LIMIT - hf_model.position_offset else most


def _said_by(files: SentenceFiles) -> dict[str, Any]:
    names = ("normalize", "pools_prompt", "lower_case", "prompts", "default_prompt", "similarity")
    return {name: getattr(files, name) for name in names}


def _refuse_soft_cap(hf_model: HFModel) -> None:
    if getattr(hf_model.text_config, "final_logit_softcapping", None):
        raise UnsupportedModelError(
            f"{hf_model.model.config.model_type!r} models cap their logits, which a score by classifier_from_token "
            "does not"
        )
