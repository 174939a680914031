"""Sources of named tensors that are read one at a time, and operations on them. Entry point: `StateSource`."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import hashlib
import json
import math
import pathlib
import pickle
import warnings
import zipfile
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftlens.checkpoints.unsupported import STATE_DICT_KEYS, conversion_hint, refuse_lfs_pointer
from driftlens.utils.errors import CheckpointError, NumericsError
from driftlens.utils.variants import ModelChange

# Number types by their names in safetensors headers.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

K = TypeVar("K", bound=Hashable)

# Bytes up to which a file is read at once: opening a small file takes longer than reading a tensor of it.
SMALL_FILE = 16 << 20


@dataclass(frozen=True)
class TensorHeader:
    """Shape and dtype of a tensor that is not read yet; `parts` lists names and shapes of concatenated tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[str, tuple[int, ...]], ...] = field(default=(), compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the tensor in memory."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class LazyTensors(Mapping[K, Tensor], Generic[K]):
    """A mapping of tensors that are read at every access and not cached."""

    def __init__(self, keys: Collection[K], read: Callable[[K], Tensor]) -> None:
        self._keys = keys
        self._read = read

    def __getitem__(self, key: K) -> Tensor:
        if key not in self._keys:
            raise KeyError(key)
        return self._read(key)

    def __contains__(self, key: object) -> bool:
        # The inherited method would read the tensor.
        return key in self._keys

    def __iter__(self) -> Iterator[K]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class StateSource(Protocol):
    """A state dict whose tensors are read one at a time, from a file, shards, a live module or another source."""

    @property
    def name(self) -> str:
        """The name used in messages: the path, or the role of a live module."""
        ...

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """Shape and dtype of every tensor, known without reading tensors."""
        ...

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Read a tensor, or its rows [start, stop), to the CPU in its stored dtype.

        Do not write to it, since it may share memory with the source.
        """
        ...


class InMemorySource:
    """A source of tensors that are in memory or memory-mapped; none is copied."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self.name = name
        self.headers = {key: TensorHeader(tuple(value.shape), value.dtype) for key, value in tensors.items()}
        self._tensors = tensors

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Return a tensor, or its rows [start, stop); on the CPU without a copy."""
        require_key(self, key)
        tensor = self._tensors[key].detach()
        return (tensor if rows is None else tensor[slice(*rows)]).cpu()


class CastSource:
    """A source that casts tensors to given dtypes when they are read; others keep their stored dtype."""

    def __init__(self, source: StateSource, dtypes: Mapping[str, torch.dtype]) -> None:
        self.name = source.name
        self.headers: Mapping[str, TensorHeader] = {
            key: replace(header, dtype=dtypes.get(key, header.dtype)) for key, header in source.headers.items()
        }
        self._source = source

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Read a tensor, or its rows [start, stop), and cast it."""
        return self._source.read(key, rows).to(self.headers[key].dtype)


class InterpolatedSource:
    """Weights interpolated between two checkpoints: base + share * (end - base), in the dtypes of `end`."""

    def __init__(self, base: StateSource, end: StateSource, share: float) -> None:
        self.name, self.headers = end.name, end.headers
        self._base, self._end, self._share = base, end, share

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Read a tensor, or its rows [start, stop), interpolated in float64."""
        end = self._end.read(key, rows)
        if not end.is_floating_point() or self._share == 1 or key not in self._base.headers:
            return end
        start = self._base.read(key, rows).double()
        return ((1 - self._share) * start + self._share * end.double()).to(end.dtype)


def cast_source(source: StateSource, dtype: torch.dtype | None) -> StateSource:
    """Return a source that casts floating-point tensors to one dtype when read; None keeps stored dtypes."""
    if dtype is None:
        return source
    return CastSource(source, {key: dtype for key, header in source.headers.items() if header.dtype.is_floating_point})


class SafetensorsSource:
    """A `.safetensors` file as a source: the header and small files are read at once, other tensors when requested."""

    def __init__(self, path: pathlib.Path) -> None:
        self.name = str(path)
        self._path = path
        with _open_safetensors(path) as file:
            keys: list[str] = file.keys()
            self.headers = {key: _tensor_header(self.name, key, file.get_slice(key)) for key in keys}
            is_small = path.stat().st_size <= SMALL_FILE
            # Copied, since a mapped file that is cut short meanwhile would kill the process.
            self._tensors = {key: file.get_tensor(key).clone() for key in keys} if is_small else {}
        if not self.headers:
            raise CheckpointError(f"{path} holds no tensors", hint="The file is empty; save the model again.")

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Read a tensor, or its rows [start, stop); only these bytes are read."""
        require_key(self, key)
        if key in self._tensors:
            tensor = self._tensors[key]
            return (tensor if rows is None else tensor[slice(*rows)]).clone()
        # Opened anew for each read: the file stays mapped only as long as the tensor lives, so that resident
        # memory is what is in use, and changes to a returned tensor do not affect later reads.
        with _open_safetensors(self._path) as file:
            read: Tensor = file.get_tensor(key) if rows is None else file.get_slice(key)[slice(*rows)]
            return read


@contextlib.contextmanager
def _open_safetensors(path: pathlib.Path) -> Iterator[Any]:
    """Open a safetensors file; raise a `CheckpointError` with the file's name if it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a complete safetensors file: {error}",
            hint="It may be truncated; copy or download it again.",
        ) from error


def _tensor_header(name: str, key: str, piece: Any) -> TensorHeader:
    dtype = DTYPES.get(piece.get_dtype())
    if dtype is None:
        raise CheckpointError(
            f"{name}: tensor {key!r} has the unsupported dtype {piece.get_dtype()}",
            hint="Save the model in float16 or wider; quantized weights can't be compared.",
            key=key,
        )
    return TensorHeader(tuple(piece.get_shape()), dtype)


def promote_dtypes(*dtypes: torch.dtype) -> torch.dtype:
    """Return the narrowest dtype that represents all given dtypes; one-byte floats count as float16."""
    if len({*dtypes}) == 1:
        return dtypes[0]
    # `torch.promote_types` refuses one-byte floats.
    halves = (torch.float16 if dtype.is_floating_point and dtype.itemsize == 1 else dtype for dtype in dtypes)
    return functools.reduce(torch.promote_types, halves)


class EmbeddingTable(Tensor):
    """An embedding matrix kept in its stored dtype that behaves like a tensor of the computation dtype.

    The embeddings of 128,000 tokens in float32 take more memory than the rest of a small language model. `embedding`
    converts only the rows of a batch, with the same numbers; other functions convert all.
    """

    _wide: torch.dtype

    @classmethod
    def wrap(cls, stored: Tensor, dtype: torch.dtype) -> EmbeddingTable:
        """Wrap a stored embedding matrix [rows, width] without a copy."""
        table = stored.detach().as_subclass(cls)
        table._wide = dtype
        return table

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func` with the matrix in the dtype of the computation."""
        named = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            # With `max_norm`, the lookup also rescales rows of the table in place.
            if func is F.embedding and isinstance(args[1], cls) and named.get("max_norm") is None:
                return func(args[0], args[1].as_subclass(Tensor), *args[2:], **named).to(args[1]._wide)
            if func == Tensor.dtype.__get__:  # type: ignore[attr-defined]
                return args[0]._wide
            if func is Tensor.detach or func == Tensor.data.__get__:  # type: ignore[attr-defined]
                # `state_dict` detaches tensors; the subclass must survive.
                return cls.wrap(_unwrap_embedding_table(args[0]), args[0]._wide)
            if getattr(func, "__name__", "") in ("size", "dim", "numel", "is_floating_point") or func in _ASKS:
                # These ask about the matrix, not about its entries.
                return func(*(_unwrap_embedding_table(value) for value in args), **named)
            return func(
                *map(_convert_embedding_tables, args),
                **{name: _convert_embedding_tables(value) for name, value in named.items()},
            )


_ASKS = [getattr(Tensor, name).__get__ for name in ("shape", "device", "is_meta", "requires_grad", "ndim", "layout")]


def _unwrap_embedding_table(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, EmbeddingTable) else value


def _convert_embedding_tables(value: Any) -> Any:
    if isinstance(value, EmbeddingTable):
        return value.as_subclass(Tensor).to(value._wide)
    return type(value)(map(_convert_embedding_tables, value)) if type(value) in (tuple, list) else value


def module_source(module: nn.Module, name: str) -> StateSource:
    """Return a live module's `state_dict()` as a source; later in-place changes of the module are visible."""
    state = module.state_dict()
    # A module's extra state may be anything; only tensors are weights.
    return InMemorySource(name, {key: value for key, value in state.items() if isinstance(value, Tensor)})


class CompositeSource:
    """A source that combines tensors of other sources: shards as one model, renamed keys, a missing tensor added."""

    def __init__(self, name: str, places: Mapping[str, tuple[StateSource, str]]) -> None:
        self.name = name
        self.headers = {key: source.headers[stored] for key, (source, stored) in places.items()}
        self._places = places

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Read a tensor, or its rows [start, stop), from the source that has it."""
        require_key(self, key)
        source, stored = self._places[key]
        return source.read(stored, rows)


def rename_keys(source: StateSource, mapping: Mapping[str, str]) -> StateSource:
    """Return a source with keys renamed by a mapping new -> old; keys outside the mapping are hidden."""
    for stored in mapping.values():
        require_key(source, stored)
    return CompositeSource(source.name, {key: (source, stored) for key, stored in mapping.items()})


def require_key(source: StateSource, key: str) -> None:
    """Raise an error that suggests the most similar key if `source` has no tensor `key`."""
    if key in source.headers:
        return
    near = difflib.get_close_matches(key, source.headers, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"It holds {len(source.headers)} tensors."
    raise CheckpointError(f"{source.name} holds no tensor {key!r}", hint=hint, key=key)


def content_digest(source: StateSource, keys: Iterable[str] | None = None) -> str:
    """Compute the SHA-256 digest of a source's keys, dtypes, shapes and bytes, in sorted key order."""
    digest = hashlib.sha256()
    for key in sorted(source.headers if keys is None else keys):
        tensor = source.read(key)
        # Bytes alone would not tell a matrix from its reshaped copy, or int32 from float32.
        digest.update(json.dumps([key, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes in row-major order, without a copy if possible."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    # As bytes, because numpy has neither bfloat16 nor one-byte floats.
    return memoryview(flat.view(torch.uint8).numpy().data)


# Hint for NaN and infinite values.
BROKEN = "It is damaged, or overflowed in a cast; save it again from the original."


def check_finite(name: str, key: str, tensor: Tensor, hint: str = BROKEN) -> None:
    """Refuse NaN and infinity in floating-point tensors.

    Args:
        name: the source's name.
        key: the tensor's name.
        tensor: its values.
        hint: the remedy.
    """
    if not tensor.is_floating_point():
        return
    # One-byte floats know neither sums nor `isfinite`; float32 holds all their values.
    wide = tensor if tensor.dtype.itemsize > 1 else tensor.float()
    # A finite sum proves that every entry is finite, in a fifth of the time of an entrywise test. The reverse
    # does not hold: finite entries may add up to infinity.
    if torch.isfinite(wide.sum()):
        return
    if bad := int((~torch.isfinite(wide)).sum()):
        raise NumericsError(
            f"{name}: tensor {key!r} holds {bad} NaN or infinite values out of {tensor.numel()}", hint=hint, key=key
        )


# Elements compared per tensor when a model is not read completely.
LOOKED_AT = 1 << 12
_ORDERED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def count_differences(start: Tensor, end: Tensor, dtype: torch.dtype) -> ModelChange:
    """Count elements that differ between two tensors of one shape, and differences that vanish in `dtype`."""
    name = str(dtype).removeprefix("torch.")
    wide = promote_dtypes(start.dtype, end.dtype, torch.float32)
    start, end = start.to(wide), end.to(wide)
    differs = start != end
    norm = float(start.double().square().sum())
    if not (changed := int(differs.sum())):
        return ModelChange(name, start=norm)
    # In steps of `dtype`: rounding removes a change of 0, and one of 1 is as small as the type allows.
    apart = (_order_preserving_integers(start.to(dtype)) - _order_preserving_integers(end.to(dtype)))[differs]
    steps = {count: int((apart.abs() == count).sum()) for count in (0, 1)}
    energy = float((end - start).double().square().sum())
    return ModelChange(name, start.numel(), changed, steps[0], steps[1], energy, norm)


def _order_preserving_integers(tensor: Tensor) -> Tensor:
    """Map floats to integers of the same order, so that adjacent floats differ by one; both zeros become 0."""
    bits = tensor.contiguous().view(_ORDERED[tensor.dtype.itemsize]).long()
    # Floats are stored as sign and magnitude: as integers, the negative ones would sort in reverse.
    most = (1 << (8 * tensor.dtype.itemsize - 1)) - 1
    return torch.where(bits < 0, -(bits & most), bits)


Rows = tuple[int, int] | None


def _estimate_change(
    source: StateSource, key: str, other: Callable[[Rows], Tensor], dtype: torch.dtype, rows: Rows = None
) -> ModelChange:
    """Estimate from its first rows how a tensor, or rows of it, change; norms are scaled up to all rows."""
    shape, few = source.headers[key].shape, None
    if shape:
        start_row, stop_row = rows or (0, shape[0])
        shape = (stop_row - start_row, *shape[1:])
        few = (start_row, min(stop_row, start_row + max(1, LOOKED_AT // max(1, math.prod(shape[1:])))))
    start = source.read(key, few)
    change, scale = count_differences(start, other(few), dtype), math.prod(shape) / max(1, start.numel())
    return replace(change, energy=scale * change.energy, start=scale * change.start)


def stored_change(source: StateSource, key: str, value: Tensor, dtype: torch.dtype, rows: Rows = None) -> ModelChange:
    """Count how new values of a tensor differ from a source's once they are rounded to the stored `dtype`.

    Args:
        source: the unchanged model.
        key: the tensor's name.
        value: the changed values.
        dtype: the number type.
        rows: the rows [start, stop) that `value` replaces; all if None.
    """
    start_row = 0 if rows is None else rows[0]
    return _estimate_change(
        source,
        key,
        lambda few: value if few is None else value[few[0] - start_row : few[1] - start_row].cpu(),
        dtype,
        rows,
    )


def task_vector_change(base: StateSource, expert: StateSource) -> ModelChange:
    """Estimate how an expert differs from its base, from the first entries of every tensor, in the coarser dtype."""
    total = ModelChange("")
    for key, header in base.headers.items():
        own = expert.headers.get(key)
        if own is not None and own.shape == header.shape and header.dtype.is_floating_point:
            narrow = header.dtype if header.dtype.itemsize < own.dtype.itemsize else own.dtype
            total += _estimate_change(base, key, functools.partial(expert.read, key), narrow)
    return total


def open_weights_file(path: pathlib.Path) -> StateSource:
    """Open the weights in one `.safetensors` or PyTorch file."""
    refuse_lfs_pointer(path)
    return SafetensorsSource(path) if path.suffix.lower() == ".safetensors" else _open_torch_file(path)


# The first version whose `weights_only` reader has no known vulnerability.
_SAFE_TORCH = (2, 10)
# Types that `torch.load` may build in addition to its own: training scripts save their command line.
_SAFE_TYPES: list[Any] = [argparse.Namespace]


def _open_torch_file(path: pathlib.Path) -> StateSource:
    """Open a PyTorch checkpoint, memory-mapped if possible; weights may be nested under `state_dict` or `model`."""
    content, tensors = _load_torch_file(path), dict[str, Tensor]()
    if isinstance(content, Mapping):
        inner = (content[key] for key in STATE_DICT_KEYS if isinstance(content.get(key), Mapping))
        content = next(inner, content)
        tensors = {key: value for key, value in content.items() if isinstance(key, str) and isinstance(value, Tensor)}
    if not tensors:
        raise CheckpointError(
            f"{path} holds a {type(content).__name__} without tensors, expected weights",
            hint=f"Save `model.state_dict()` as safetensors, or under {', '.join(STATE_DICT_KEYS)}.",
        )
    # Half of a model must not pass for all of it.
    nested = [key for key, value in content.items() if key not in tensors and _has_nested_tensors(value)]
    if nested:
        raise CheckpointError(
            f"{path}: the entry {str(nested[0])[:40]!r} also holds weights, which would be ignored",
            hint=f"Save all weights as safetensors, or under {', '.join(STATE_DICT_KEYS)}.",
        )
    for key, value in tensors.items():
        if value.layout != torch.strided or value.is_quantized:
            raise CheckpointError(f"{path}: tensor {key!r} is sparse or quantised", hint="Save it dense.")
    # DistributedDataParallel holds the model as its submodule `module`.
    prefix = "module." if all(key.startswith("module.") for key in tensors) else ""
    return InMemorySource(str(path), {key.removeprefix(prefix): value for key, value in tensors.items()})


def _has_nested_tensors(value: Any) -> bool:
    entries = value.values() if isinstance(value, Mapping) else ()
    return any(isinstance(entry, Tensor) or _has_nested_tensors(entry) for entry in entries)


def _load_torch_file(path: pathlib.Path) -> Any:
    """Load a PyTorch file with `weights_only=True`, which runs no code of the file."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < _SAFE_TORCH:
        raise CheckpointError(
            f"{path} can run code when torch {torch.__version__} reads it (CVE-2026-24747)",
            hint=f"Install torch {_SAFE_TORCH[0]}.{_SAFE_TORCH[1]} or newer, or convert the file to safetensors.",
        )
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(_SAFE_TYPES):
            warnings.simplefilter("ignore")
            # Only the zip format, which PyTorch writes since 1.6, can be mapped.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # a damaged file can raise anything
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].strip() or type(error).__name__
        # PyTorch goes from the cause to the advice to allow the type, which would run the file's code.
        reason = reason.splitlines()[0].partition(". ")[0].partition(" was not an allowed global")[0]
        if isinstance(error, pickle.UnpicklingError) or "TorchScript" in reason:
            raise CheckpointError(
                f"{path} holds objects other than tensors ({reason})", hint=conversion_hint(path)
            ) from error
        raise CheckpointError(
            f"{path} is not a complete PyTorch checkpoint ({reason})",
            hint="It may be truncated; copy or download it again.",
        ) from error
