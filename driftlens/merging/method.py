"""What a merge method is, and the registry that finds them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from driftlens.errors import SpecError
from driftlens.registry import Registry

StateDict = Mapping[str, Tensor]


MergeFunction = Callable[..., dict[str, Tensor]]
"""(base, experts by task, *, parameters) -> merged parameters under the base's names; inputs are not modified."""


@dataclass(frozen=True)
class MergeMethod:
    """A merge function and what is known of it.

    Attributes:
        name: under which the spec calls it.
        title: what reports print.
        source: paper.
        laws: what holds for all inputs; the contract tests check each law of each method.
        function: the computation.
        needs_base: whether the result depends on the base.
        elementwise: whether each tensor is merged by itself, so that a model can be merged tensor by tensor.
    """

    name: str
    title: str
    source: str
    laws: frozenset[str]
    function: MergeFunction
    needs_base: bool
    elementwise: bool

    def resolve(self, parameters: Mapping[str, object]) -> dict[str, object]:
        """All parameters of the method, those given over the defaults.

        Raises:
            SpecError: a parameter the method does not have, or a value that is not a finite number.
        """
        signature = inspect.signature(self.function)
        known = {
            name: p.default
            for name, p in signature.parameters.items()
            if p.kind is inspect.Parameter.KEYWORD_ONLY
        }
        for name, value in parameters.items():
            if name not in known:
                raise SpecError(
                    f"merge method {self.name!r} has no parameter {name!r}",
                    hint=f"It takes {', '.join(known) or 'none'}.",
                )
            if isinstance(known[name], float):
                _require_finite(self.name, name, value)
        return {**known, **parameters}


def _require_finite(method: str, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
        raise SpecError(f"merge method {method!r} wants a finite number for {name!r}, got {value!r}")


class _MergeMethods(Registry[MergeMethod]):
    def method(
        self,
        name: str,
        *,
        title: str,
        source: str,
        laws: set[str],
        needs_base: bool = True,
        elementwise: bool = True,
    ) -> Callable[[MergeFunction], MergeFunction]:
        """Decorator that files a merge function with what is known of it, and returns it unchanged."""

        def file(function: MergeFunction) -> MergeFunction:
            entry = MergeMethod(name, title, source, frozenset(laws), function, needs_base, elementwise)
            self.register(name)(entry)
            return function

        return file


merge_methods = _MergeMethods("merge method", "driftlens.merging")
