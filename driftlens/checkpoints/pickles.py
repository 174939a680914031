"""Pickled PyTorch checkpoints read without running anything in them: tensors come out, objects stay inert.

A pickle is a program for a small stack machine. The one here knows numbers, text, lists, mappings and the calls that
rebuild tensors; it imports nothing, and nothing it puts on its stack can be called. An object of a class it doesn't
know becomes an `Inert` of that name which holds the object's state; a call of anything else is refused by name. Read
are PyTorch's archives (zip), its format before 1.6, and plain pickles of modules. Nothing here needs torch.
"""

from __future__ import annotations

import io
import math
import mmap
import pathlib
import pickletools
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from driftlens.base.errors import CheckpointError
from driftlens.checkpoints.refusals import NESTS

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
"""What PyTorch's format before 1.6 begins with."""
LONGEST_NAME = 1_000
"""Characters of a name, which may end up in a message or in the header of a file."""
_MOST_AXES, _MOST_NUMBER = 64, 1 << 63
"""As torch has them."""

BYTES = {
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8, "BOOL": 1},
    **{"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1},
}
"""Of one number, by the names that safetensors files have for their types."""
_STORAGES = {
    "torch.storage.UntypedStorage": "U8",
    "torch.DoubleStorage": "F64",
    "torch.FloatStorage": "F32",
    "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16",
    "torch.ComplexFloatStorage": "C64",
    "torch.LongStorage": "I64",
    "torch.IntStorage": "I32",
    "torch.ShortStorage": "I16",
    "torch.CharStorage": "I8",
    "torch.ByteStorage": "U8",
    "torch.BoolStorage": "BOOL",
}
_WITHOUT_STORAGE = {
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.uint64": "U64",
    "torch.uint32": "U32",
    "torch.uint16": "U16",
}
"""Types of number that PyTorch writes as bytes, and says beside them what they are."""
_INERT_CALLS = frozenset(
    """torch.device torchvision.transforms.functional.InterpolationMode numpy.dtype numpy.core.multiarray.scalar
    numpy._core.multiarray.scalar numpy.core.multiarray._reconstruct numpy._core.multiarray._reconstruct
    pathlib.PosixPath pathlib.WindowsPath pathlib.PurePosixPath pathlib.PureWindowsPath argparse.Namespace
    types.SimpleNamespace""".split()  # noqa: SIM905 - a list would take a line each
)
"""Calls whose result is no weight and is left inert."""
_PYTHONS_OWN = _INERT_CALLS | frozenset(
    """collections.OrderedDict collections.defaultdict copyreg._reconstructor _codecs.encode builtins.object
    builtins.set builtins.frozenset builtins.list builtins.dict builtins.tuple builtins.int builtins.float
    builtins.bool builtins.str builtins.bytes builtins.getattr""".split()  # noqa: SIM905
)
"""What a checkpoint may name of Python's own library."""
_OLD_NAMES = {"__builtin__": "builtins", "copy_reg": "copyreg"}


@dataclass(frozen=True)
class Global:
    """The name of a class or function in a pickle; only the name."""

    name: str


@dataclass
class Inert:
    """What stands for an object of the class `kind`, which is never imported; `state` would be its attributes."""

    kind: str
    state: Any = None

    def attribute(self, name: str) -> Any:
        """An attribute, or None where the state has no such."""
        return self.state.get(name) if isinstance(self.state, dict) else None


@dataclass(frozen=True)
class Storage:
    """A run of numbers in the file: their type, how many, and the memory that they are mapped into with their place."""

    kind: str
    count: int
    place: Callable[[], tuple[mmap.mmap, int]] = field(repr=False)


@dataclass(frozen=True)
class Stored:
    """A tensor that lies in a file: a storage, and how the tensor is laid out in it (all counted in numbers)."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Unpickled:
    """What a file holds: `top` is what was pickled, `tensors` the state dict in it, `modules` those of a module.

    A pickle may ask for any number of steps and any memory, so a process with limits goes first: `weight_files`.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.modules: dict[str, Inert] = {}
        self.top = _unpickled(path)
        self.tensors = dict(self._weights(self.top))

    def _weights(self, top: Any) -> Iterator[tuple[str, Stored]]:
        """The state dict in what was unpickled: a module's, or a mapping, itself or within a training checkpoint."""
        if isinstance(top, dict):
            top = next((top[key] for key in NESTS if isinstance(top.get(key), dict | Inert)), top)
        if isinstance(top, Inert):
            yield from self._walked(top, "")
            return
        for key, value in _named_in(top):
            if isinstance(value, Stored):
                yield key, value
            elif self._holds_weights(value):
                raise CheckpointError(
                    f"its entry {key[:40]!r} holds weights too, which would be left out",
                    hint=f"Save the weights alone, as a flat state dict or under one of {', '.join(NESTS)}.",
                    key=key[:40],
                )

    def _holds_weights(self, value: Any) -> bool:
        """Whether it is a mapping with tensors at names, a module or an array of NumPy's."""
        if isinstance(value, Inert):
            is_module = value.attribute("_parameters") or value.attribute("_modules")
            return bool(is_module) or value.kind.endswith(".multiarray._reconstruct")
        inner = [entry for _, entry in _named_in(value)]
        return any(isinstance(entry, Stored) or self._holds_weights(entry) for entry in inner)

    def _walked(self, module: Inert, prefix: str) -> Iterator[tuple[str, Stored]]:
        """Parameters, kept buffers and those of submodules, as `Module.state_dict` lists them."""
        if len(prefix) > LONGEST_NAME:
            raise CheckpointError("its modules are nested without end", hint="Don't use this file.")
        self.modules[prefix.removesuffix(".")] = module
        dropped = module.attribute("_non_persistent_buffers_set")
        left_out = {name for name in dropped if isinstance(name, str)} if isinstance(dropped, list) else set()
        for name, value in _named_in(module.attribute("_parameters")):
            if isinstance(value, Stored):
                yield f"{prefix}{name}", value
        for name, value in _named_in(module.attribute("_buffers")):
            if isinstance(value, Stored) and name not in left_out:
                yield f"{prefix}{name}", value
        for name, child in _named_in(module.attribute("_modules")):
            if isinstance(child, Inert):
                yield from self._walked(child, f"{prefix}{name}.")


def _named_in(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((key, entry) for key, entry in value.items() if isinstance(key, str))


# --- the three kinds of file

FindStorage = Callable[[str, str, int], Storage]


def _unpickled(path: pathlib.Path) -> Any:
    """What was pickled into `path`, its tensors still in the file."""
    with path.open("rb") as file:
        # Mapped: what a pickle claims to hold is read only as far as the file goes; what is written stays in memory.
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return _from_zip(path, content) if content[:2] == b"PK" else _from_stream(content)


def _from_zip(path: pathlib.Path, content: mmap.mmap) -> Any:
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        (main,) = (name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1)
        prefix = main.removesuffix("data.pkl")
        if f"{prefix}byteorder" in entries and archive.read(f"{prefix}byteorder") != b"little":
            raise CheckpointError("its numbers are big-endian", hint="Save it again where they are not.")
        program = archive.read(main)

    def storage(kind: str, key: str, count: int) -> Storage:
        entry = entries.get(f"{prefix}data/{key}")
        if entry is None or entry.file_size != count * BYTES[kind]:
            held = "none" if entry is None else f"{entry.file_size:,}"
            raise CheckpointError(
                f"storage {key[:40]!r} should have {count * BYTES[kind]:,} bytes, the archive holds {held}",
                hint="Copy or download it again, if it was cut short on the way.",
            )
        # An entry's own header says once more how long its name is, and what else stands before its bytes.
        name, extra = struct.unpack_from("<HH", content, entry.header_offset + 26)
        start = entry.header_offset + 30 + name + extra
        if start + entry.file_size > len(content):
            raise EOFError("there are no numbers for some tensors")
        return Storage(kind, count, lambda: (content, start))

    return _Machine(storage).run(io.BytesIO(program))


def _from_stream(stream: mmap.mmap, *, nested: bool = False) -> Any:
    """What is in a file of PyTorch before 1.6, or in a plain pickle."""
    sizes: dict[str, tuple[str, int]] = {}
    places: dict[str, int] = {}

    def storage(kind: str, key: str, count: int) -> Storage:
        if sizes.setdefault(key, (kind, count)) != (kind, count):
            raise CheckpointError("a storage is said to be of two kinds", hint="Don't use this file.")
        return Storage(kind, count, lambda: (stream, places[key]))

    first = _Machine(storage, nested=nested).run(stream)
    if first != _MAGIC and not sizes:
        return first
    version, system, top, keys = (_Machine(storage, nested=nested).run(stream) for _ in range(4))
    if version != _PROTOCOL or dict(_named_in(system)).get("little_endian") is not True:
        raise CheckpointError("it is of another version of PyTorch's format", hint="Save it again.")
    for key in keys:
        if not isinstance(key, str):
            raise TypeError("the key of a storage is no text")
        kind, count = sizes[key]
        places[key] = stream.tell() + 8
        if int.from_bytes(stream.read(8), "little") != count:
            raise CheckpointError("a storage is not as long as it should be", hint="Copy the file again.")
        stream.seek(places[key] + count * BYTES[kind])  # refused beyond the end
    if sizes.keys() != places.keys():
        raise EOFError("there are no numbers for some tensors")
    return top


# --- the machine

_MARK = object()
_VALUES = frozenset(
    """INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE
    SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8""".split()  # noqa: SIM905
)
_CONSTANTS: dict[str, Callable[[], Any]] = {
    **{"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": list, "EMPTY_TUPLE": tuple},
    **{"NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "MARK": lambda: _MARK},
}


class _Machine:
    """Carries out one pickle; `storage` finds (dtype, key, how many numbers) in the file around it.

    Sets become lists, and mappings keep text and numbers as keys only: of what a file builds, nothing is hashed or
    compared that it could make deep enough to last for ever.
    """

    def __init__(self, storage: FindStorage, *, nested: bool = False) -> None:
        self._storage = storage
        self._nested = nested
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, stream: Any) -> Any:
        """What the pickle at the stream's position leaves; the stream stands behind it afterwards."""
        for opcode, argument, _ in pickletools.genops(stream):
            if opcode.name in _VALUES:
                self._stack.append(argument)
            elif opcode.name in _CONSTANTS:
                self._stack.append(_CONSTANTS[opcode.name]())
            else:
                self._do(opcode.name, argument)
        (result,) = self._stack
        return result

    def _do(self, name: str, argument: Any) -> None:
        stack = self._stack
        match name:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "POP":
                stack.pop()
            case "POP_MARK":
                self._since_mark()
            case "DUP":
                stack.append(stack[-1])
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack[-int(name[-1]) :] = [tuple(stack[-int(name[-1]) :])]
            case "TUPLE":
                stack.append(tuple(self._since_mark()))
            case "LIST" | "FROZENSET":
                stack.append(self._since_mark())
            case "DICT":
                stack.append(_filled({}, self._since_mark()))
            case "APPEND":
                _extended(stack[-2], [stack.pop()])
            case "APPENDS" | "ADDITEMS":
                items = self._since_mark()
                _extended(stack[-1], items)
            case "SETITEM":
                _filled(stack[-3], stack[-2:])
                del stack[-2:]
            case "SETITEMS":
                items = self._since_mark()
                _filled(stack[-1], items)
            case "GLOBAL":
                stack.append(_named(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                stack[-2:] = [_named(*stack[-2:])]
            case "REDUCE":
                stack[-2:] = [self._called(*stack[-2:])]
            case "NEWOBJ":
                stack[-2:] = [_made(stack[-2])]
            case "NEWOBJ_EX":
                stack[-3:] = [_made(stack[-3])]
            case "OBJ":
                stack.append(_made(self._since_mark()[0]))
            case "INST":
                self._since_mark()
                stack.append(_made(_named(*argument.split(" ", 1))))
            case "BUILD":
                self._build(stack[-2], stack.pop())
            case "BINPERSID":
                stack.append(self._found(stack.pop()))
            case _:
                raise CheckpointError(
                    f"its pickle uses {name}, as none of weights does", hint="Save it again."
                )

    def _since_mark(self) -> list[Any]:
        """What was put on the stack since the last mark, taken off it with the mark."""
        start = next(place for place in reversed(range(len(self._stack))) if self._stack[place] is _MARK)
        items = self._stack[start + 1 :]
        del self._stack[start:]
        return items

    def _called(self, what: Any, given: Any) -> Any:
        """The result of a call, for the few that rebuild tensors and containers."""
        if not isinstance(what, Global) or not isinstance(given, tuple):
            raise TypeError(f"a {type(what).__name__} is called")
        match what.name:
            case "torch._utils._rebuild_tensor" | "torch._utils._rebuild_tensor_v2":
                return _stored(*given[:4])
            case "torch._utils._rebuild_tensor_v3":
                return _stored(_of_kind(given[0], given[6]), *given[1:4])
            case "torch.serialization._get_layout":
                raise CheckpointError("it holds a sparse tensor", hint="Save it dense.")
            case "torch._utils._rebuild_parameter" | "torch._utils._rebuild_parameter_with_state":
                return given[0]
            case "torch._tensor._rebuild_from_type_v2":
                return self._called(given[0], given[2])
            case "torch.storage._load_from_bytes" if not self._nested:
                return _from_stream(_mapped(given[0]), nested=True)
            case "collections.OrderedDict" if given:
                return _filled({}, [part for key, value in given[0] for part in (key, value)])
            case "collections.OrderedDict" | "collections.defaultdict" | "builtins.dict":
                return {}
            case "builtins.set" | "builtins.frozenset" | "builtins.list" | "torch.Size":
                return tuple(*given) if what.name == "torch.Size" else list(*given)
            case "_codecs.encode" if given[1:] == ("latin1",) and isinstance(given[0], str):
                return given[0].encode("latin1")
            case "copyreg._reconstructor":
                return _made(given[0])
            # As Python 3.11.0 to 3.11.3 pickles members of enumerations.
            case "builtins.getattr" if len(given) == 2 and isinstance(given[0], Global):
                return Inert(_named(given[0].name, given[1]).name)
            case name if name in _INERT_CALLS:
                return Inert(name)
        raise _unknown(what.name)

    def _build(self, target: Any, state: Any) -> None:
        """Give an object its state; attributes of a mapping (a state dict's versions) are left out."""
        if isinstance(target, Inert):
            parts = state if isinstance(state, tuple) else (state,)  # with __slots__: attributes, then slots
            target.state = {key: value for part in parts for key, value in _named_in(part)}
        elif not isinstance(target, dict):
            raise TypeError(f"a {type(target).__name__} takes no state")

    def _found(self, place: Any) -> Any:
        """The storage, or in old files the class of a module, that a persistent id names."""
        match place:
            case ("storage", Global(name=kind), str(key), _, int(count)) if kind in _STORAGES and count >= 0:
                return self._storage(_STORAGES[kind], key, count)
            case ("storage", Global() as kind, str(key), _, int(count), None):
                return self._found(("storage", kind, key, None, count))
            case ("storage", Global(name=kind), *_):
                raise CheckpointError(f"it holds numbers in a {kind}", hint="Save them as float32.")
            case ("module", Global() as kind, *_):
                return kind
        raise CheckpointError("its pickle refers to something outside the file", hint="Don't use this file.")


def _named(module: Any, name: Any) -> Global:
    if not isinstance(module, str) or not isinstance(name, str):
        raise TypeError("a name is no text")
    full = f"{_OLD_NAMES.get(module, module)}.{name}"
    if len(full) > LONGEST_NAME or not full.isprintable():  # it may end up in a message
        raise TypeError("a name can't be one")
    # Of Python's own library no class is part of a model; its names are known without importing anything.
    if full.split(".")[0] in sys.stdlib_module_names and full not in _PYTHONS_OWN:
        raise _unknown(full)
    return Global(full)


def _unknown(name: str) -> CheckpointError:
    return CheckpointError(
        f"it uses {name}, which is no part of weights and may run code (nothing was run)", found=name
    )


def _made(kind: Any) -> Any:
    """A new object of a class: inert, and of mappings a plain one."""
    if not isinstance(kind, Global):
        raise TypeError(f"a {type(kind).__name__} is taken for a class")
    return {} if kind.name in ("collections.OrderedDict", "collections.defaultdict") else Inert(kind.name)


def _extended(target: Any, items: list[Any]) -> None:
    if isinstance(target, list):
        target.extend(items)
    elif not isinstance(target, Inert):
        raise TypeError(f"a {type(target).__name__} takes no items")


def _filled(target: Any, items: list[Any]) -> Any:
    """A mapping with the items, key and value in turn, put in; entries under keys that name no tensor are left out."""
    if isinstance(target, dict):
        pairs = zip(items[::2], items[1::2], strict=True)
        target.update((key, value) for key, value in pairs if isinstance(key, str | int | float))
    elif not isinstance(target, Inert):
        raise TypeError(f"a {type(target).__name__} takes no items")
    return target


def _mapped(content: bytes) -> mmap.mmap:
    memory = mmap.mmap(-1, len(content))
    memory.write(content)
    memory.seek(0)
    return memory


def _of_kind(storage: Any, dtype: Any) -> Storage:
    """The storage, whose bytes are numbers of another type."""
    if not isinstance(storage, Storage) or storage.kind != "U8" or not isinstance(dtype, Global):
        raise TypeError("the bytes of a tensor are none")
    if dtype.name not in _WITHOUT_STORAGE:
        raise CheckpointError(f"it holds numbers of the type {dtype.name}", hint="Save them as float32.")
    kind = _WITHOUT_STORAGE[dtype.name]
    return Storage(kind, storage.count // BYTES[kind], storage.place)


def _stored(storage: Any, offset: Any, size: Any, stride: Any) -> Stored:
    """The tensor, if its storage holds all of it."""
    if (
        not isinstance(storage, Storage)
        or max(len(size), len(stride)) > _MOST_AXES
        or not all(type(number) is int and 0 <= number < _MOST_NUMBER for number in (offset, *size, *stride))
    ):
        raise TypeError("a tensor is not laid out in whole numbers of a storage")
    count = math.prod(size)
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if count and (last >= storage.count or count > storage.count):
        raise CheckpointError(
            f"a tensor of shape {list(size)} reaches beyond its storage of {storage.count:,} numbers",
            hint="Don't use this file: no program saves such tensors.",
        )
    return Stored(storage, offset, tuple(size), tuple(stride))
