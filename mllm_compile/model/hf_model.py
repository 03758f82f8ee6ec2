"""Transformers' own model, built without its weights: on meta, then as fake tensors of the target device.

Owns the traced model and the buffers that no checkpoint holds (non-persistent ones, computed once on the CPU).
runtime/weights/loader.py loads weights; checkpoint/plan.py assigns checkpoint tensors to parameters.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.files.served_part import SERVED_PART
from mllm_compile.model.positions_hook import position_offset
from mllm_compile.model.refusals import first_line, refusing
from mllm_compile.model.replaced_methods import rescale_outputs
from mllm_compile.model.rope_hook import follow_rope
from mllm_compile.model.written_attention.indexed import choice_of
from mllm_compile.runtime.media.tower import SOUND_INPUT
from mllm_compile.runtime.program.spec import HiddenProjection, ModelSizes
from mllm_compile.runtime.speculation.block import DraftBlock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import PreTrainedConfig, PreTrainedModel

    from mllm_compile.model.sources.cross import CrossAttention
    from mllm_compile.runtime.attention.layer import KeyChoice, LayerSpec
    from mllm_compile.runtime.schedule.rope_lengths import RopeLengths


NO_LIMIT = 2**31 - 1


class Heads(NamedTuple):
    """The sizes of one layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class HFModel:
    """A model on meta, and the values that its code gives to buffers.

    Attributes:
        model: every parameter on meta, in its final dtype.
        constants: buffer name → value on the CPU; these are in no checkpoint.
        unknown_constants: names of such buffers whose value could not be computed.
        position_offset: the position that the model gives a text's first token.
        tables: buffers of a checkpoint that its code fills with several numbers, as constants are: one table's numbers
            may follow from another's.
        rope: how its RoPE follows the length of a text; None: it does not.
        choice: what the indexer of its sparse attention chooses (written_attention/indexed.py); None: it has none.
        chooses_keys: it is served beyond the length up to which it chooses all (written_attention/chosen.py).
        hidden_states: places of those that its programs give beside logits (hidden_states.py).
        projection: of a head that drafts, how it reads another model's hidden states, where they are several.
        block: of a head that drafts several tokens in one pass.
        cross: what of an encoder-decoder attends to its encoder; None: it is another model.
        unused_parts: of a whole model that it is a part of, the others.
    """

    model: PreTrainedModel
    constants: dict[str, torch.Tensor]
    unknown_constants: frozenset[str]
    position_offset: int = 0
    tables: dict[str, torch.Tensor] = field(default_factory=dict)
    rope: RopeLengths | None = None
    choice: KeyChoice | None = None
    chooses_keys: bool = False
    hidden_states: tuple[int, ...] = ()
    projection: HiddenProjection | None = None
    block: DraftBlock | None = None
    cross: CrossAttention | None = None
    unused_parts: tuple[str, ...] = ()

    @property
    def text_config(self) -> PreTrainedConfig:
        return self.model.config.get_text_config(decoder=True)

    @property
    def context_len(self) -> int:
        """Positions that the model was made for, of those at which its attention is full."""
        said = getattr(self.text_config, "max_target_positions", None) if self.cross is not None else None
        positions = self._size("max_position_embeddings", said or NO_LIMIT) - self.position_offset
        return positions if self.choice is None or self.chooses_keys else min(positions, self.choice.full_length)

    def sizes(self, layers: Sequence[LayerSpec] = ()) -> ModelSizes:
        """The sizes in the model's config; heads are the largest of `layers`, where they are given; 0 of a model
        without attention.

        Raises:
            UnsupportedModelError: the config does not say what every causal LM has.
        """
        heads = [Heads(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers]
        heads = heads or self.heads_of_layers()
        return ModelSizes(
            num_hidden_layers=self._size("num_hidden_layers"),
            num_attention_heads=max((one.num_heads for one in heads), default=0),
            num_kv_heads=max((one.num_kv_heads for one in heads), default=0),
            head_dim=max((one.head_dim for one in heads), default=0),
            hidden_size=self._size("hidden_size"),
            vocab_size=self._size("vocab_size"),
            context_len=self.context_len,
            is_table_of_positions=self.position_offset > 0,
            is_sparse_beyond=self.choice is not None and not self.chooses_keys,
        )

    def embedding_and_head(self) -> tuple[str, str]:
        """The names of the weights of tokens' embeddings and of the head, the same where they are tied."""
        names = {id(module): name for name, module in self.model.named_modules()}
        modules = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        embedding, head = (f"{names[id(module)]}.weight" for module in modules)
        return embedding, head

    def heads_of_layers(self) -> list[Heads]:
        """The heads of each layer, as the config says; none where it names no heads, as of a model without attention.

        Raises:
            UnsupportedModelError: the config does not say what every causal LM has.
        """
        hidden_size = self._size("hidden_size")
        found = []
        for config in layer_configs(self.text_config, self._size("num_hidden_layers")):
            if getattr(config, "num_attention_heads", None) is None:
                continue
            num_heads = self._size("num_attention_heads", config=config)
            num_kv_heads = self._size("num_key_value_heads", num_heads, config)
            found.append(Heads(num_heads, num_kv_heads, self._size("head_dim", hidden_size // num_heads, config)))
        return found

    def _size(self, name: str, otherwise: int | None = None, config: PreTrainedConfig | None = None) -> int:
        """Reads a size under its usual name: Transformers' attribute maps give each config these names."""
        with refusing(f"config.json of this {self.model.config.model_type!r} model"):
            value = getattr(self.text_config if config is None else config, name, None)
        # XLNet says -1 where it has no limit.
        value = otherwise if value is None or (value == -1 and otherwise == NO_LIMIT) else value
        if type(value) is not int or value < 1:
            raise UnsupportedModelError(
                f"config.json of this {self.model.config.model_type!r} model says no {name} (got {value!r})"
            )
        return value


def layer_configs(config: PreTrainedConfig, num_layers: int = 1) -> list[PreTrainedConfig]:
    """The configs of layers that may differ in any size (in newer versions of Transformers); else the model's own,
    `num_layers` times."""
    is_of_layers = getattr(config, "is_heterogeneous", False)
    return list(config.per_layer_config) if is_of_layers else [config] * num_layers


def read_config(folder: Path, trust_remote_code: bool) -> PreTrainedConfig:
    """
    Raises:
        UnsupportedModelError: Transformers cannot read it.
    """
    from transformers import AutoConfig

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # each config class has checks of its own
        raise UnsupportedModelError(
            f"Transformers cannot read {folder}/config.json: {first_line(error)}. Check it, or install a newer "
            "transformers."
        ) from error
    return config


def build_on_meta(folder: Path, dtype: torch.dtype, trust_remote_code: bool = False) -> HFModel:
    """Builds the causal LM of a model folder on meta, with our attention implementation.

    Raises:
        UnsupportedModelError: Transformers knows no causal LM for this config, or building it fails.
    """
    config = read_config(folder, trust_remote_code)
    part = getattr(config, SERVED_PART, None)
    if part is None:
        return build_config_on_meta(config, dtype, trust_remote_code)
    if SERVED_PART not in config.sub_configs:
        raise UnsupportedModelError(
            f"{folder}/config.json is of a {config.model_type!r} model, which has no {SERVED_PART}; expected none. "
            "Remove that section."
        )
    others = tuple(name.removesuffix("_config") for name in config.sub_configs if name != SERVED_PART)
    built = build_config_on_meta(part, dtype, trust_remote_code)
    ignored = built.model._keys_to_ignore_on_load_unexpected or []
    built.model._keys_to_ignore_on_load_unexpected = [*ignored, *(rf"^{name}\." for name in others)]
    return replace(built, unused_parts=others)


def build_config_on_meta(config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool = False) -> HFModel:
    """Like build_on_meta, from a config object."""
    from mllm_compile.model.attention_hook import ATTENTION_IMPLEMENTATION, register_attention_hook

    register_attention_hook()
    _know_text_config(config)
    with_encoder = class_with_encoder(config)
    try:
        with torch.device("meta"), _in_class_tables(type(config), ATTENTION_IMPLEMENTATION):
            model = (with_encoder or auto_class(type(config))).from_config(
                config,
                attn_implementation=ATTENTION_IMPLEMENTATION,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
            )
    except Exception as error:
        if isinstance(error, KeyError):
            _refuse_unknown_activation(config, error)
        raise UnsupportedModelError(
            f"{config.model_type!r} is not a causal language model that Transformers can build with a custom attention "
            f"implementation: {first_line(error)}"
        ) from error
    model.eval().requires_grad_(False)
    _keep_made_tables(model)
    rescale_outputs(model)
    constants, unknown, tables = compute_constants(model)
    rope, of_rope = follow_rope(model)
    if with_encoder is not None:
        from mllm_compile.model.sources.cross import find_cross_attention

        return HFModel(model, constants | of_rope, unknown, tables=tables, cross=find_cross_attention(model))
    return HFModel(model, constants | of_rope, unknown, position_offset(model), tables, rope, choice_of(model))


def class_with_encoder(config: PreTrainedConfig) -> Any:
    """Transformers' class that builds the model with an encoder and a decoder that config.json names; None: it names
    none that generates."""
    from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

    if not getattr(config, "is_encoder_decoder", False):
        return None
    named, classes = getattr(config, "architectures", None) or (), (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq)
    for one in classes:
        mapping: Any = one._model_mapping
        if type(config) in mapping and mapping[type(config)].__name__ in named:
            return one
    return None


def auto_class(config_class: type[PreTrainedConfig]) -> Any:
    """Transformers' class that builds a causal LM of this config. It is the class that takes images if no other exists,
    or if the other has the text alone, and images have grids (model/towers/visual_grids.py) or a checkpoint's tensors
    for images no place in it."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

    with_images: Any = AutoModelForImageTextToText._model_mapping.get(config_class, None)
    if with_images is None:
        # A decoder that takes sounds is listed beside encoder-decoders, where it is no causal LM.
        of_both: Any = AutoModelForSeq2SeqLM._model_mapping.get(config_class, None)
        takes = set() if of_both is None else set(inspect.signature(of_both.forward).parameters)
        takes_sounds = SOUND_INPUT in takes and "decoder_input_ids" not in takes
        return AutoModelForSeq2SeqLM if takes_sounds and not _is_causal_lm(config_class) else AutoModelForCausalLM
    takes_grids = "image_grid_thw" in inspect.signature(with_images.forward).parameters
    if takes_grids or not _is_causal_lm(config_class):
        return AutoModelForImageTextToText
    of_text: Any = AutoModelForCausalLM._model_mapping[config_class]
    takes_whole = of_text is with_images or of_text.config_class is config_class
    is_lenient = bool(of_text._keys_to_ignore_on_load_unexpected)
    return AutoModelForCausalLM if takes_whole or is_lenient else AutoModelForImageTextToText


def _know_text_config(config: PreTrainedConfig) -> None:
    """Has Transformers build the causal LM that a config names whose class is known for the whole config alone: that of
    a text model which was saved without its images."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if _is_causal_lm(type(config)):
        return
    for name in set(getattr(config, "architectures", None) or ()) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        model_class = getattr(transformers, name, None)
        if getattr(model_class, "config_class", None) is type(config):
            transformers.AutoModelForCausalLM.register(type(config), model_class, exist_ok=True)


def _is_causal_lm(config_class: type[PreTrainedConfig]) -> bool:
    from transformers import AutoModelForCausalLM

    return config_class in AutoModelForCausalLM._model_mapping


@contextmanager
def _in_class_tables(config_class: type[PreTrainedConfig], name: str) -> Iterator[None]:
    """Within the context, tables that give a class for each attention implementation give the eager one for `name`: it
    writes its attention out (written_attention/)."""
    model_class = auto_class(config_class)._model_mapping.get(config_class, None)
    module = sys.modules.get(getattr(model_class, "__module__", ""))
    tables = [table for table in vars(module or object).values() if isinstance(table, dict)]
    added = [table for table in tables if isinstance(table.get("eager"), type) and name not in table]
    for table in added:
        table[name] = table["eager"]
    try:
        yield
    finally:
        for table in added:
            del table[name]


def _refuse_unknown_activation(config: PreTrainedConfig, error: KeyError) -> None:
    """Raises UnsupportedModelError if the error names an activation that Transformers does not know."""
    from transformers.activations import ACT2FN

    for key in ("hidden_act", "hidden_activation", "activation_function"):
        name = getattr(config.get_text_config(), key, None)
        if isinstance(name, str) and name not in ACT2FN and error.args == (name,):
            closest = next(iter(difflib.get_close_matches(name, ACT2FN, n=1)), None)
            hint = f" Did you mean {closest!r}?" if closest else ""
            raise UnsupportedModelError(
                f"{key} is {name!r} in the model's config.json, an activation that Transformers does not know.{hint}"
            ) from error


def head_key(model: Any) -> str:
    """The name of the head's parameter, which is the embedding's where they are tied; empty where there is no head."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    return next((name for name, one in model.named_parameters() if one is weight), "")


def tied_head(model: Any) -> str:
    """The name of the head's weight, where it is the embedding too; else an empty one."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or getattr(head, "weight", None) is not getattr(embedding, "weight", None):
        return ""
    return next(f"{name}.weight" for name, module in model.named_modules() if module is head)


def _keep_made_tables(model: Any) -> None:
    """Makes buffers of tables that the code makes and that no checkpoint need hold, as Marian's positions are."""
    for name, module in model.named_modules():
        key = f"{name}.weight"
        if hasattr(module, "create_weight") and key in (model._keys_to_ignore_on_load_missing or ()):
            table = module._parameters.pop("weight")
            module.register_buffer("weight", table.data, persistent=False)
            others = model._keys_to_ignore_on_load_unexpected or []
            model._keys_to_ignore_on_load_unexpected = [*others, re.escape(key)]


def compute_constants(
    model: PreTrainedModel,
) -> tuple[dict[str, torch.Tensor], frozenset[str], dict[str, torch.Tensor]]:
    """Values of the buffers (rotary frequencies, embedding scales), computed on the CPU.

    Non-persistent ones are in no checkpoint; `_init_weights` of the sub-model that holds them is what fills them when
    Transformers loads one.

    Returns:
        Of non-persistent ones, buffer name → value, and the names of those that `_init_weights` does not fill; and of
        persistent ones HFModel.tables.
    """
    constants: dict[str, torch.Tensor] = {}
    tables: dict[str, torch.Tensor] = {}
    unknown: set[str] = set()
    for module_name, module in model.named_modules():
        owner = _owner(model, module_name)
        names = [name for name, buffer in module._buffers.items() if buffer is not None]
        # From two different beginnings: filled buffers come out the same.
        first, second = (_initialised(owner, module, names, filler) for filler in (0, 1))
        for name in names:
            full_name = f"{module_name}.{name}" if module_name else name
            value = first.get(name)
            is_constant = name in module._non_persistent_buffers_set
            if value is None or not torch.equal(value, second[name]):
                unknown.update([full_name] if is_constant else [])
            elif is_constant:
                constants[full_name] = value
            elif value.unique().numel() > 1 or not value.isfinite().all():  # bounds that bound nothing
                tables[full_name] = value
    return constants, frozenset(unknown), tables


def _owner(model: PreTrainedModel, module_name: str) -> PreTrainedModel:
    """The innermost sub-model that the module is in, or is."""
    from transformers import PreTrainedModel

    owner, module = model, model
    for name in filter(None, module_name.split(".")):
        module = getattr(module, name)
        owner = module if isinstance(module, PreTrainedModel) else owner
    return owner


def _initialised(
    owner: PreTrainedModel, module: torch.nn.Module, names: list[str], filler: int
) -> dict[str, torch.Tensor]:
    """The module's buffers after `_init_weights`, which finds them on the CPU and full of `filler`; {} if it fails."""
    meta_buffers = {name: module._buffers[name] for name in names}
    if not meta_buffers:
        return {}
    try:
        for name, meta in meta_buffers.items():
            module._buffers[name] = torch.full_like(meta, filler, device="cpu")  # type: ignore[arg-type]
        with torch.no_grad(), torch.device("cpu"):
            owner._init_weights(module)
            if owner is not module:  # which may fill its layers' buffers itself
                owner._init_weights(owner)
        return {name: module._buffers[name].detach().cpu().clone() for name in names}  # type: ignore[union-attr]
    except Exception:
        return {}  # a module that mixes these with parameters, which are on meta: supported.py asks if any is needed
    finally:
        module._buffers.update(meta_buffers)


def fake_copy(model: PreTrainedModel, mode: FakeTensorMode, device: str) -> dict[int, str]:
    """Replaces every parameter and buffer by a fake tensor of `device`, ties kept.

    Returns:
        id of each fake parameter or buffer → its (first) fully-qualified name.
    """
    fakes: dict[int, torch.Tensor] = {}
    names: dict[int, str] = {}
    originals: list[torch.Tensor] = []  # kept alive: ids of collected tensors are reused

    def fake(tensor: torch.Tensor, name: str) -> torch.Tensor:
        if id(tensor) not in fakes:
            with mode:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            if isinstance(tensor, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, requires_grad=False)
            originals.append(tensor)
            fakes[id(tensor)] = copy
            names[id(copy)] = name
        return fakes[id(tensor)]

    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for tensors in (module._parameters, module._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is not None:
                    tensors[name] = fake(tensor, prefix + name)
    return names
