"""A backend of attention and states has all that its attention has."""

import inspect
from types import SimpleNamespace
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch

from mllm_compile.runtime.attention import capture
from mllm_compile.runtime.attention.base import AttentionBackend
from mllm_compile.runtime.attention.torch_backend import TorchAttnBackend
from mllm_compile.runtime.state import hybrid_backend
from mllm_compile.runtime.state.hybrid_backend import HybridAttnBackend

CONTRACTS = {one for one in vars(capture).values() if inspect.isabstract(one) and one.__module__ == capture.__name__}


def public(contract) -> set[str]:
    return {name for name in vars(contract) if not name.startswith("_")}


def contracts() -> dict[str, type]:
    """The property of a backend → the contract that it returns."""
    properties = {name: one for name, one in vars(AttentionBackend).items() if isinstance(one, property)}
    returned = {name: get_args(get_type_hints(one.fget)["return"]) for name, one in properties.items()}
    return {name: types[0] for name, types in returned.items() if types and types[0] in CONTRACTS}


class Noting:
    """Stands for a backend or one of its contracts: notes which of its members are asked for."""

    def __init__(self, called: set[str], **given) -> None:
        self._called = called
        self.__dict__.update(given)

    def __getattr__(self, name: str):
        self._called.add(name)
        return lambda *args: 0


def hybrid_of(attention, monkeypatch) -> HybridAttnBackend:
    """One whose layers with a state need nothing of a batch."""
    of_prompts = SimpleNamespace(num_bytes=16, capture=lambda work: None, write=lambda memory, prompts: True)
    monkeypatch.setattr(hybrid_backend, "PromptStates", of_prompts)
    monkeypatch.setattr(hybrid_backend, "CommonAttentionMetadata", SimpleNamespace(of=lambda batch: None))
    held = SimpleNamespace(begin=lambda batch: None, begin_captured=lambda rows, seq_lens: None)
    mixed = SimpleNamespace(capture=lambda num_tokens: None, fill=lambda num_tokens, common: None)
    return HybridAttnBackend(attention, SimpleNamespace(), held, mixed)


def call_all(owner, contract) -> None:
    """Uses each public member of a contract; sizes are 32, all else a tensor."""
    for name in public(contract):
        member = inspect.getattr_static(contract, name)
        if isinstance(member, property):
            getattr(owner, name)
            continue
        given = [
            32 if "int" in str(one.annotation) else np.zeros(64) if one.annotation == "np.ndarray" else torch.zeros(64)
            for one in list(inspect.signature(member).parameters.values())[1:]
        ]
        getattr(owner, name)(*given)


def test_a_backend_has_one_property_for_each_contract():
    assert CONTRACTS and set(contracts().values()) == CONTRACTS
    assert len(contracts()) == len(CONTRACTS)


@pytest.mark.parametrize("contract", [AttentionBackend, *sorted(CONTRACTS, key=lambda one: one.__name__)])
def test_python_refuses_a_backend_that_leaves_a_member_out(contract):
    assert contract.__abstractmethods__ == public(contract) - {"forward"}


@pytest.mark.parametrize("attribute", sorted(contracts()))
def test_each_member_of_a_contract_reaches_attention_through_the_backend_of_states(attribute, monkeypatch):
    called: set[str] = set()
    attention = Noting(called, mixed_obstacle=None, **{attribute: Noting(called)})
    owner = getattr(hybrid_of(attention, monkeypatch), attribute)
    call_all(owner, contracts()[attribute])
    assert called >= public(contracts()[attribute])


def test_what_is_known_of_attention_is_known_beside_states(monkeypatch):
    attention = SimpleNamespace(query_blocks=8.25, reads_pages=lambda batch: False, mixed_obstacle="it has a window")
    backend = hybrid_of(attention, monkeypatch)
    assert backend.query_blocks == 8.25
    assert not backend.reads_pages(SimpleNamespace())
    assert (backend.mixed_obstacle, backend.mixed) == ("it has a window", None)


def test_states_are_captured_where_their_attention_is(monkeypatch):
    backend = hybrid_of(TorchAttnBackend(), monkeypatch)
    assert [name for name in contracts() if getattr(backend, name) is not None] == ["cascades"]
    assert backend.reads_pages(SimpleNamespace())
    alone = hybrid_of(None, monkeypatch)
    served = {name for name in contracts() if getattr(alone, name) is not None}
    assert served == {"decodes", "mixed", "prompts", "verifies"}
    assert not alone.reads_pages(SimpleNamespace()), "no layer has keys and values"


def test_no_step_is_captured_for_a_contract_that_is_not_there():
    with pytest.raises(RuntimeError, match="does not capture such steps"):
        capture.needed(TorchAttnBackend().mixed)
