"""One contest: candidates are tried in turn or side by side, and each that is finished is kept before the next one.

The arena, comparisons of merges, sweeps and `--auto` differ in what a candidate is, in how some of them are tried (an
`Attempts`) and in where what became of them is kept (a `Ledger`); what was stopped goes on with those that are missing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from driftlens.base.errors import Cancelled, DriftLensError, RunError, SpecError
from driftlens.base.settings import resolve
from driftlens.base.team import ALONE, Team
from driftlens.jobs.study.reopening import Kept

C = TypeVar("C")
T = TypeVar("T")
Asked = TypeVar("Asked", contravariant=True)
Known = TypeVar("Known", covariant=True)


class Candidate(NamedTuple):
    """What was asked for by a method and settings over the published ones, and what it is called."""

    name: str
    method: str
    settings: Mapping[str, object]


def candidates(
    given: Sequence[tuple[str, Mapping[str, object]]],
    every: Iterable[str],
    owner_of: Callable[[str], Callable[..., Any]],
    name_of: Callable[[str, Mapping[str, object]], str],
    *,
    kind: str = "",
) -> list[Candidate]:
    """The candidates asked for by method and settings, `all` being every method; no file is opened."""
    asked = [
        (method, settings)
        for name, settings in given
        for method in (sorted(every) if name == "all" and not settings else (name,))
    ]
    by_name: dict[str, Candidate] = {}
    for method, settings in asked:
        resolved = resolve(owner_of(method), settings, f"{kind} {method!r}" if kind else method)
        # YAML reads `off` as false; a name says what the method reads.
        said = {key: resolved[key] if isinstance(value, bool) else value for key, value in settings.items()}
        name = name_of(method, said)
        if name in by_name:
            raise SpecError(f"{name} is asked for twice", hint="Name every candidate once.")
        by_name[name] = Candidate(name, method, settings)
    return list(by_name.values())


@dataclass(frozen=True)
class Outcome(Generic[Known]):
    """What became of one candidate: what was measured of it, in how many seconds it was made, or why it can't be."""

    value: Known | None = None
    seconds: float = 0.0
    error: DriftLensError | None = None


Attempts = Callable[[Sequence[C]], Iterable[tuple[C, Outcome[T]]]]
"""Tries some candidates, and gives each with what became of it as soon as that is known, in any order."""


class Ledger(Protocol[Asked, T]):
    """Where outcomes are kept beyond the end of the process."""

    def read(self, candidate: Asked) -> Outcome[T] | None:
        """What an earlier sitting has kept of a candidate; None where it is still to be tried."""
        ...

    def write(self, candidate: Asked, outcome: Outcome[T]) -> None:
        """Keep what became of a candidate, whole or not at all."""
        ...


Scored = Mapping[str, Mapping[str, NDArray[np.float64]]]
"""Numbers of one candidate by two names, for example a fold and a task; one per sample."""


class KeptScores(Generic[Asked]):
    """A `Ledger` of numbers in a folder, which the first process writes; a candidate is known again by a name."""

    def __init__(self, kept: Kept, name_of: Callable[[Asked], str], team: Team = ALONE) -> None:
        self._kept, self._name_of, self._team = kept, name_of, team
        self._started = time.perf_counter() - team.once(lambda: kept.seconds)

    @property
    def seconds(self) -> float:
        """What the work took until now, over all sittings."""
        return time.perf_counter() - self._started

    def read(self, candidate: Asked) -> Outcome[Scored] | None:
        """As of a `Ledger`."""
        tensors = self._team.once(lambda: self._kept.read(self._name_of(candidate)))
        if not tensors:
            return None
        value, seconds = dict[str, dict[str, NDArray[np.float64]]](), float(tensors.pop(_SECONDS))
        for name, tensor in tensors.items():
            outer, inner = json.loads(name)
            value.setdefault(outer, {})[inner] = tensor.numpy()
        return Outcome(value, seconds)

    def write(self, candidate: Asked, outcome: Outcome[Scored]) -> None:
        """As of a `Ledger`."""
        assert outcome.value is not None
        if self._team.leads:
            tensors = {
                json.dumps([outer, inner]): torch.from_numpy(numbers)
                for outer, by_name in outcome.value.items()
                for inner, numbers in by_name.items()
            }
            tensors[_SECONDS] = torch.tensor(outcome.seconds, dtype=torch.float64)
            self._kept.write(self._name_of(candidate), tensors, self.seconds)


_SECONDS = "seconds"


def contest(
    entered: Iterable[C], attempts: Attempts[C, T], ledger: Ledger[C, T] | None = None
) -> Iterator[tuple[C, Outcome[T]]]:
    """Every candidate with what became of it: first those that are kept, then the others, each kept when it is known.

    What failed is not kept: a later sitting tries it once more, for the reason may be gone. Without a ledger the
    attempts know by themselves what is there.
    """
    missing = []
    for candidate in entered:
        outcome = None if ledger is None else ledger.read(candidate)
        if outcome is None:
            missing.append(candidate)
        else:
            yield candidate, outcome
    for candidate, outcome in attempts(missing) if missing else ():
        if ledger is not None and outcome.error is None:
            ledger.write(candidate, outcome)
        yield candidate, outcome


def one_by_one(attempt: Callable[[C], Outcome[T]], team: Team = ALONE) -> Attempts[C, T]:
    """Attempts at one candidate after the other, in which one that can't be made leaves the others alone."""

    def attempts(entered: Sequence[C]) -> Iterator[tuple[C, Outcome[T]]]:
        for candidate in entered:
            outcome: Outcome[T]
            try:
                outcome = attempt(candidate)
            except (Cancelled, RunError):  # the job's own trouble, which all candidates share
                raise
            except DriftLensError as error:
                if not team.agrees(error):
                    raise
                outcome = Outcome(error=error)
            yield candidate, outcome

    return attempts


def require_any(outcomes: Iterable[Outcome[Any]]) -> None:
    """Refuse to go on where every candidate failed."""
    errors = [outcome.error for outcome in outcomes]
    if errors and None not in errors:
        raise next(error for error in errors if error is not None)
