"""Registries that find their entries by importing every module of one package on first use."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, TypeVar

from driftlens.errors import SpecError, did_you_mean

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Names to entries. Adding an entry means adding one file to `package`; no second file is edited.

    Args:
        kind: what an entry is called in messages, for example "merge method".
        package: dotted name of the package whose modules register themselves.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self.package = package
        self._entries: dict[str, T] = {}
        self._discovered = False

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that files an entry under `name` and returns it unchanged."""

        def file(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = entry
            return entry

        return file

    @contextmanager
    def temporary(self) -> Iterator[None]:
        """A block at whose end the entries registered inside are taken out again, as tests and plugins want."""
        before = dict(self)
        try:
            yield
        finally:
            self._entries.clear()
            self._entries.update(before)

    def __getitem__(self, name: str) -> T:
        """The entry called `name`.

        Raises:
            SpecError: no such entry; the message names those there are and the nearest one.
        """
        self._discover()
        try:
            return self._entries[name]
        except KeyError:
            raise SpecError(
                f"no {self.kind} called {name!r}; there are {', '.join(self)}",
                hint=did_you_mean(name, self._entries),
            ) from None

    def __contains__(self, name: object) -> bool:
        self._discover()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self._discover()
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        self._discover()
        return len(self._entries)

    def _discover(self) -> None:
        if self._discovered:
            return
        self._discovered = True
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self.package}.{module.name}")
