"""Pickles that would touch a file if they were unpickled, made of every way a pickle has to call something."""

from __future__ import annotations

import functools
import io
import os
import pathlib
import pickle
import zipfile
from collections.abc import Callable
from typing import Any

import torch


class Calls:
    """Pickles as a call of `function`; `setter` is called with what it returns and `state`."""

    def __init__(
        self, function: Callable[..., Any], *arguments: object, setter: object = None, state: object = None
    ) -> None:
        self.reduced = (function, arguments, *((state, None, None, setter) if setter else ()))

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def text(*lines: str) -> bytes:
    """A pickle of protocol 0, opcode by opcode."""
    return "\n".join(lines).encode()


def hostile(canary: pathlib.Path) -> dict[str, bytes]:
    """Name -> a plain pickle that touches `canary` when Python unpickles it."""
    command, source = f"touch '{canary}'", f"open({str(canary)!r}, 'w').close()"
    weights = {"weight": torch.zeros(2)}
    calls = {
        "os.system": Calls(os.system, command),
        "builtins.eval": Calls(eval, source),
        "builtins.exec": Calls(exec, source),
        "pathlib.touch": Calls(pathlib.Path.touch, canary),
        "functools.partial": Calls(functools.partial(os.system, command)),
        "a setter of state": Calls(str, str(canary), setter=os.mknod, state=0o600),
        "nested in a call": Calls(torch._utils._rebuild_parameter, Calls(os.system, command), False, {}),
        "in a tensor's file": Calls(
            torch.storage._load_from_bytes, pickle.dumps(Calls(os.system, command), protocol=2)
        ),
    }
    found = {
        f"{name}, protocol {protocol}": pickle.dumps({**weights, "extra": what}, protocol=protocol)
        for name, what in calls.items()
        for protocol in (2, 4)
    }
    found["instance of a function"] = text(f"(S{command!r}", "ios", "system", ".")
    found["object of a function"] = text("(cos", "system", f"S{command!r}", "o.")
    found["global by text"] = text("cos", "system", f"(S{command!r}", "tR.")
    found["global from the stack"] = (
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c" + bytes([len(command)]) + command.encode() + b"\x85R."
    )
    return found


def in_archive(content: bytes, records: dict[str, bytes], *, packed: bool = False) -> bytes:
    """A zip file as `torch.save` makes them, around any pickle and any storages."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archive:
        for name, part in {"data.pkl": content, "byteorder": b"little", **records}.items():
            archive.writestr(f"archive/{name}", part)
    return memory.getvalue()


def in_old_file(content: bytes) -> bytes:
    """A file of PyTorch before 1.6 around any pickle without storages."""
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
    parts = (0x1950A86A20F9469CFC6C, 1001, system)
    return b"".join(pickle.dumps(part, protocol=2) for part in parts) + content + pickle.dumps([], protocol=2)


class _WithStorages(pickle.Pickler):
    def persistent_id(self, what: Any) -> Any:
        return what.pid if isinstance(what, Place) else None


class Place:
    """Pickles as the persistent id of a storage."""

    def __init__(self, *pid: object) -> None:
        self.pid = pid


def float_storage(key: str = "0", count: object = 4, kind: Any = torch.FloatStorage) -> Place:
    return Place("storage", kind, key, "cpu", count)


def tensor_pickle(**tensors: Calls) -> bytes:
    memory = io.BytesIO()
    _WithStorages(memory, protocol=2).dump(dict(tensors))
    return memory.getvalue()


def rebuilt(storage: object, offset: object, size: object, stride: object) -> Calls:
    """Pickles as the call that rebuilds a tensor."""
    return Calls(torch._utils._rebuild_tensor_v2, storage, offset, size, stride, False, {})
