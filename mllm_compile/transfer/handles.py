"""Tensors that another process of this machine holds out by handles: vLLM's, SGLang's and this project's forms.

A handle names CUDA memory (CUDA IPC) or shared memory; here it is read and bounded by what its sender says of it.
`opened.py` opens it, and holds it against the memory itself. Pickles are read by their opcodes.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from mllm_compile.errors import WeightUpdateError
from mllm_compile.transfer.announcement import Announcement, dtype_of
from mllm_compile.transfer.opcodes import Made, Name, read_pickle
from mllm_compile.transfer.table import SIZE, is_dtype, shape_of

CPU = "cpu"  # the key of a handle of shared memory, where CUDA's have the GPU's UUID
_HANDLE_BYTES = 64
_CUDA_MALLOC, _SEGMENT = ord("c"), ord("e")  # torch's second byte: the kind of memory (CUDACachingAllocator.cpp)
_HEADER_BYTES = 64  # ahead of the data in torch's shared memory (RefcountedMapAllocator)
_REDUCTIONS = "torch.multiprocessing.reductions"
_CUDA_TENSORS = ("rebuild_cuda_tensor", "_rebuild_cuda_tensor_modified")  # the latter as SGLang's trainers have it
_KNOWN = {
    SIZE,
    *(Name(_REDUCTIONS, name) for name in ("rebuild_tensor", "rebuild_typed_storage", "rebuild_storage_filename")),
    *(Name("torch.storage", name) for name in ("UntypedStorage", "TypedStorage")),
    Name("torch", "Tensor"),
    Name("torch.nn.parameter", "Parameter"),
}
_METADATA = "FlattenedTensorMetadata"
_OF_ANY_MODULE = (*_CUDA_TENSORS, _METADATA)  # trainers have copies of them


class CudaMemory(NamedTuple):
    """An allocation of a GPU.

    Attributes:
        handle: 64 bytes of CUDA's.
        counter: the file and the place of torch's count of receivers, which is to fall; None: nobody counts.
        event: the handle of the event behind which the memory has its numbers; None: it has them.
    """

    handle: bytes
    counter: tuple[str, int] | None = None
    event: bytes | None = None


NO_MEMORY = CudaMemory(bytes(_HANDLE_BYTES))  # of a tensor without numbers


class SharedMemory(NamedTuple):
    """A file of shared memory.

    Attributes:
        is_counted: it begins with torch's count of receivers, which is to fall.
    """

    name: str
    is_counted: bool = False


class Given(NamedTuple):
    """A contiguous tensor in another process' memory.

    Attributes:
        begin: its first byte in that memory.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    memory: CudaMemory | SharedMemory
    begin: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def by_json(announced: Announcement, handles: Any, sizes: Sequence[int] | None, device: str) -> list[Given]:
    """The tensors of /update_weights, with handles as JSON: of each tensor {device: {handle or name, offset}}.

    Args:
        handles: a list of such objects, or one of a buffer that holds all tensors, one behind the other.
        sizes: bytes of each in that buffer.
        device: the engine's: a GPU's UUID, or cpu.

    Raises:
        WeightUpdateError: they are malformed, or none is for this device.
    """

    def memory(handle: Any) -> tuple[CudaMemory | SharedMemory, int]:
        key, one = _chosen(handle, device)
        offset = one.get("offset", 0) if isinstance(one, dict) else None
        if not isinstance(one, dict) or type(offset) is not int or offset < 0:
            raise WeightUpdateError("ipc_handles: expected objects with handle or name, and offset")
        if key == CPU:
            return SharedMemory(_text(one.get("name"))), offset
        return CudaMemory(_cuda_handle(_decoded(one.get("handle")))), offset

    if isinstance(handles, dict):
        one, offset = memory(handles)
        return _in_one_buffer(announced, sizes, one, offset)
    _expect_one_each(announced, handles)
    return [Given(*row, *memory(handle)) for row, handle in zip(_rows(announced), handles, strict=True)]


def by_vllms_pickle(announced: Announcement, pickled: str, sizes: Sequence[int] | None, device: str) -> list[Given]:
    """Likewise of vLLM's `ipc_handles_pickled`: {UUID: arguments of torch's rebuild_cuda_tensor}."""
    handles = read_pickle(_decoded(pickled), "ipc_handles_pickled", _is_known)
    if isinstance(handles, dict):
        buffer = _tensor("the buffer", _chosen(handles, device)[1])
        given = _in_one_buffer(announced, sizes, buffer.memory, buffer.begin)
        if sum(announced.sizes) > buffer.num_bytes:
            raise WeightUpdateError(f"the buffer has {buffer.num_bytes:,} bytes; expected {sum(announced.sizes):,}")
        return given
    _expect_one_each(announced, handles)
    found = []
    for (name, dtype, shape), handle in zip(_rows(announced), handles, strict=True):
        one = _tensor(name, _chosen(handle, device)[1])
        if (one.dtype, one.shape) != (dtype, shape):
            raise WeightUpdateError(
                f"tensor {name!r}: announced {dtype} {list(shape)}, and its handle is of {one.dtype} {list(one.shape)}"
            )
        found.append(one)
    return found


def by_sglangs_pickle(pickled: str) -> list[Given]:
    """The tensors of /update_weights_from_tensor: [(name, tensor)], or a flattened bucket."""
    content = read_pickle(_decoded(pickled), "serialized_named_tensors", _is_known)
    if isinstance(content, dict):
        return _bucket(content)
    if not isinstance(content, list) or not all(isinstance(row, tuple) and len(row) == 2 for row in content):
        raise WeightUpdateError("serialized_named_tensors: expected a list of (name, tensor), or a flattened bucket")
    return [_tensor(_text(name), tensor) for name, tensor in content]


# Buffers of several tensors ---------------------------------------------------------------------------------------


def _in_one_buffer(
    announced: Announcement, sizes: Sequence[int] | None, memory: CudaMemory | SharedMemory, begin: int
) -> list[Given]:
    """Tensors one behind the other, as vLLM packs them."""
    if sizes is not None and list(sizes) != announced.sizes:
        raise WeightUpdateError("tensor_sizes: expected the bytes of each tensor's shape and dtype")
    found = []
    for row, size in zip(_rows(announced), announced.sizes, strict=True):
        found.append(Given(*row, memory, begin))
        begin += size
    return found


def _bucket(content: Mapping[Any, Any]) -> list[Given]:
    """SGLang's flattened bucket: metadata count its values, or its bytes where it is uint8."""
    flat, rows = _tensor("the bucket", content.get("flattened_tensor")), content.get("metadata")
    if not isinstance(rows, list):
        raise WeightUpdateError("the bucket has no list of metadata")
    found = []
    for row in rows:
        fields = row.state if isinstance(row, Made) and row.what.name == _METADATA else None
        if not isinstance(fields, dict):
            raise WeightUpdateError(f"the bucket has metadata that are no {_METADATA}")
        start, shape, dtype = fields.get("start_idx"), shape_of(fields.get("shape")), fields.get("dtype")
        if type(start) is not int or start < 0 or shape is None or not (isinstance(dtype, Name) and is_dtype(dtype)):
            raise WeightUpdateError("the bucket has metadata without start_idx, shape or dtype")
        own = dtype_of(dtype.name)
        one = Given(_text(fields.get("name")), own, shape, flat.memory, flat.begin + start * flat.dtype.itemsize)
        if flat.dtype not in (own, torch.uint8) or one.begin + one.num_bytes > flat.begin + flat.num_bytes:
            raise WeightUpdateError(f"tensor {one.name!r} is beyond its bucket, or of another dtype")
        found.append(one)
    return found


# One tensor -------------------------------------------------------------------------------------------------------


def _tensor(name: str, what: Any) -> Given:
    """A tensor as torch's reductions describe it: (function, arguments), or the arguments of CUDA's alone."""
    function, arguments = Name(_REDUCTIONS, _CUDA_TENSORS[0]), what
    if isinstance(what, Made):
        function, arguments = what.what, what.arguments
    elif isinstance(what, tuple) and len(what) == 2 and isinstance(what[0], Name):
        function, arguments = what
    try:
        return (_cuda_tensor if function.name in _CUDA_TENSORS else _shared_tensor)(name, arguments)
    except WeightUpdateError:
        raise
    except (TypeError, ValueError) as error:
        raise WeightUpdateError(f"tensor {name[:200]!r} has no handle of torch's ({str(error)[:100]})") from None


def _cuda_tensor(name: str, arguments: Any) -> Given:
    (_, size, stride, offset, _, dtype, _, handle, storage_bytes, begin, _, counter, place, event, waits) = arguments
    memory = CudaMemory(
        _cuda_handle(handle),
        (_ascii(counter), _number(place)) if counter else None,
        _event(event) if waits else None,
    )
    return _within(name, dtype, size, stride, offset, storage_bytes, memory, begin)


def _shared_tensor(name: str, arguments: Any) -> Given:
    _, storage, (offset, size, stride, _) = arguments
    if not isinstance(storage, Made) or storage.what.name != "rebuild_typed_storage":
        raise ValueError("its storage is none of shared memory")
    untyped, dtype = storage.arguments
    if not isinstance(untyped, Made) or untyped.what.name != "rebuild_storage_filename":
        raise ValueError("its storage is none of shared memory")
    _, _, handle, num_bytes = untyped.arguments
    memory = SharedMemory(_ascii(handle), is_counted=True)
    return _within(name, dtype, size, stride, offset, num_bytes, memory, _HEADER_BYTES)


def _within(
    name: str, dtype: Any, size: Any, stride: Any, offset: Any, num_bytes: Any, memory: Any, begin: Any
) -> Given:
    """The tensor, if it is contiguous and within its storage."""
    shape = shape_of(size)
    if shape is None or not is_dtype(dtype) or any(one < 0 for one in shape):
        raise ValueError("it has no shape or dtype")
    own, start = dtype_of(dtype.name), _number(begin)
    one = Given(name, own, shape, memory, start + _number(offset) * own.itemsize)
    if prod(shape) > 1 and stride != _contiguous(shape):
        raise WeightUpdateError(f"tensor {name[:200]!r} is not contiguous. Send tensor.contiguous().")
    if one.begin + one.num_bytes > start + _number(num_bytes):
        raise WeightUpdateError(f"tensor {name[:200]!r} is beyond its storage of {num_bytes:,} bytes.")
    return one


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[index + 1 :]) for index in range(len(shape)))


def _cuda_handle(handle: Any) -> bytes:
    """CUDA's 64 bytes, bare or behind the two by which torch says what they are."""
    if isinstance(handle, bytes) and len(handle) == _HANDLE_BYTES:
        return handle
    if isinstance(handle, bytes) and len(handle) > 2 and handle[1] == _SEGMENT:
        raise WeightUpdateError(
            "the handle is of an expandable segment, whose memory other processes cannot open. Leave "
            "expandable_segments out of PYTORCH_CUDA_ALLOC_CONF, or send by NCCL."
        )
    if isinstance(handle, bytes) and len(handle) == _HANDLE_BYTES + 2 and handle[1] == _CUDA_MALLOC:
        return handle[2:]
    raise WeightUpdateError(f"a handle of CUDA memory has {_HANDLE_BYTES} bytes; got something else")


def _event(event: Any) -> bytes:
    if not isinstance(event, bytes) or len(event) != _HANDLE_BYTES:
        raise ValueError("it has no event")
    return event


# Small things -----------------------------------------------------------------------------------------------------


def _is_known(name: Name) -> bool:
    if name.name == "rebuild_storage_fd":
        raise WeightUpdateError(
            "the tensors are shared by file descriptors, which children alone can take. Call "
            "torch.multiprocessing.set_sharing_strategy('file_system') at the sender."
        )
    return name in _KNOWN or name.name in _OF_ANY_MODULE or is_dtype(name)


def _chosen(handle: Any, device: str) -> tuple[str, Any]:
    """The handle for this engine's device; shared memory is for any."""
    if not isinstance(handle, dict) or not handle:
        raise WeightUpdateError("ipc_handles: expected objects by the GPU's UUID, or by cpu")
    for key in (device, CPU):
        if key in handle:
            return key, handle[key]
    others = ", ".join(str(key)[:50] for key in list(handle)[:4])
    raise WeightUpdateError(f"the handles are of {others}, and the engine is on {device}. Send from that device.")


def _expect_one_each(announced: Announcement, handles: Any) -> None:
    if not isinstance(handles, list) or len(handles) != len(announced.names):
        raise WeightUpdateError(f"ipc_handles: expected one for each of {len(announced.names)} tensors")


def _rows(announced: Announcement) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    return list(zip(*announced, strict=True))


def _decoded(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise WeightUpdateError("a handle is no base64") from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise WeightUpdateError(f"expected a name, got {type(value).__name__}")
    return value


def _ascii(value: Any) -> str:
    if not isinstance(value, bytes):
        raise ValueError("it names no file")
    return value.decode("ascii")


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("it has no offset or size")
    return value
