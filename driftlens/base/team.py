"""The processes of one job: who does what, sums over all of them, and one end for all.

Every process runs the same program on the same files. What is divided goes by task: each process looks at tasks of its
own, sums of moments and solved weights go through torch.distributed, small things (results, decisions, errors) through
its store. Alone, every question is answered at once.

An error in one process is everybody's: it is posted in the store, and whoever waits for the others, or begins a new
batch, raises it too. A process that ends without a word is missed by the others within seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import psutil

import driftlens.base.errors
from driftlens.base.division import balanced, shared
from driftlens.base.errors import Cancelled, DriftLensError, RunError, SpecError
from driftlens.base.progress import CancelToken, ProgressEvent, ProgressSink

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

_LOOK_SECONDS = 0.25
"""Between two looks at what became of the others."""
_BEAT_SECONDS = 2.0
"""Between two signs of life; ten may be missed before a process counts as dead."""
_SILENT_SECONDS = 20.0
"""Without a sign of life from another machine's process, it counts as dead."""
_JOIN_SECONDS = 300.0
"""For all processes to start: a scheduler may hand out its machines minutes apart."""
_TOLD_SECONDS = 8.0
"""How long a process that failed leaves it to the first one to say why."""
_HEARD_SECONDS = 1.0
"""How long the first one, which said it, waits for the others to know."""
LESS_MEMORY = (
    "Lower data.defaults.batch_size, or take `--device cpu`. Finished phases are kept: --resume goes on."
)
_PAIRS = 1 << 30
"""Numbers of messages between two begin here; those that all count begin at 0."""
_INLINE = 1 << 16
"""Bytes that go through the store; more go from process to process."""


class MemoryElsewhere(RunError):
    """Memory was too little in another process; all may begin anew with less, see `Team.begin_anew`."""


class Team:
    """This process among those of a job; alone unless `joined` made it."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None, store: Any = None) -> None:
        """`group` is a process group of torch.distributed, `store` one of its stores; neither is needed alone."""
        self.rank, self.size = rank, size
        self._group, self._store = group, _Store(store, size)
        self._whole_store, self._beginnings = store, 0
        self._number = self._last_pair = 0
        self._looked = 0.0
        self._sending: list[threading.Thread] = []
        self._pairs: dict[tuple[int, int], int] = {}
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._peers: dict[int, tuple[str, int, float]] = {}
        self._error: BaseException | None = None
        self._is_posted = False
        self._common: list[BaseException] = []
        self._sink: ProgressSink | None = None
        self._shown = ProgressEvent("", 0, None)
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True)
        if size > 1:
            self._introduce()

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and talks."""
        return self.rank == 0

    def owners(self, items: Sequence[str], weights: Mapping[str, float] | None = None) -> dict[str, int]:
        """Which process has which item, so that all have about as much to do; the same in every process."""
        given = weights or {}
        costs = [given.get(item, 1.0) for item in items]
        return dict(zip(items, self.balanced(costs), strict=True))

    def balanced(self, costs: Sequence[float]) -> list[int]:
        """A process for each of some pieces of work: the largest first, each to whom has least."""
        return balanced(costs, self.size)[0]

    def shares(self, counts: Mapping[str, int]) -> dict[str, list[tuple[int, int, int]]]:
        """Who takes which of some batches of every item, see `division.shared`."""
        return shared(counts, self.size)

    def once(self, work: Callable[[], T]) -> T:
        """What the first process makes; the others wait for it. What it raises, all raise."""
        if self.size == 1:
            return work()
        key = self._key("once")
        if self.leads:
            value, error = self._outcome(work)
            self._store.set(key, pickle.dumps((value, error)))
        else:
            value, error = pickle.loads(self._awaited(key))
        if error is not None:
            raise self._agreed(error)
        return cast("T", value)

    def at(self, owner: int, work: Callable[[], T]) -> T | None:
        """What one process makes, for the first; None elsewhere, where nobody waits."""
        made = self.pieces([(owner, 0, 0)], lambda *_: work(), to=0)
        return None if made is None else made[0]

    def pieces(
        self, runs: Sequence[tuple[int, int, int]], work: Callable[[int, int], T], *, to: int | None = None
    ) -> list[T] | None:
        """What processes make of their runs of one item, in order, for the first of them or `to`; None elsewhere."""
        if self.size == 1:
            return [work(first, last) for _, first, last in runs]
        to, keys = runs[0][0] if to is None else to, [self._key("piece") for _ in runs]
        pieces = []
        for key, (rank, first, last) in zip(keys, runs, strict=True):
            if rank == self.rank:
                # The others may be past the place where they could hear of an error.
                value = self.final(functools.partial(work, first, last))
                if rank != to:
                    self._send(key, pickle.dumps(value), to=to)
                    return None
                pieces.append(value)
            elif self.rank == to:
                pieces.append(pickle.loads(self._received(key, rank)))
        return pieces if self.rank == to else None

    def gather(self, value: T) -> list[T]:
        """The value of every process, by rank."""
        if self.size == 1:
            return [value]
        key = self._key("all")
        self._store.set(f"{key}/{self.rank}", pickle.dumps(value))
        return [
            value if rank == self.rank else pickle.loads(self._awaited(f"{key}/{rank}"))
            for rank in range(self.size)
        ]

    def together(self, work: Callable[[], T]) -> list[T]:
        """What every process makes of its own share, by rank; an error of one is raised by all, which may go on."""
        if self.size == 1:
            return [work()]
        outcomes = self.gather(self._outcome(work))
        for _, error in outcomes:
            if error is not None:
                raise self._agreed(error)
        return [cast("T", value) for value, _ in outcomes]

    def each(self, items: Sequence[str], work: Callable[[str], T]) -> dict[str, T]:
        """What is made of every item, each in one process, for all."""
        if self.size == 1:
            return {item: work(item) for item in items}
        owners = self.owners(items)
        parts = self.together(lambda: {item: work(item) for item in items if owners[item] == self.rank})
        return {item: parts[owners[item]][item] for item in items}

    def meet(self) -> None:
        """Wait until all are here."""
        self.gather(None)

    def sum(self, tensors: Sequence[Tensor], to: int) -> None:
        """Put sums over all processes in the place of one's tensors, of one dtype and device; one reduction to it."""
        if self.size == 1 or not tensors:
            return
        import torch

        flat = self._spoken(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        options = torch.distributed.ReduceOptions()
        options.rootRank, options.rootTensor = to, 0
        self._collective(lambda: self._group.reduce([flat], options))
        if self.rank == to:
            _unpack(flat, tensors)

    def add(self, tensors: Sequence[Tensor], of: int, to: int) -> None:
        """Add the tensors of one process to those of another, in place; the first goes on at once.

        Those two alone call this, as often and in the same order. The other waits, so an error must not be kept until
        all meet: see `final`.
        """
        import torch

        self._pairs[of, to] = number = self._pairs.get((of, to), self._last_pair) + 1
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()
        if self.rank == of:
            self._give(flat, to, _PAIRS + number)
        else:
            more = torch.empty_like(flat)
            self._take(more, of, _PAIRS + number)
            _unpack(flat.add_(more), tensors)

    def final(self, work: Callable[[], T]) -> T:
        """Work in whose middle others wait for this process: what it raises ends the job."""
        try:
            return work()
        except BaseException as error:
            if self.size > 1:
                self._post(error)
            raise

    def share(self, tensors: Sequence[Tensor], of: int) -> None:
        """Put the tensors of one process, of one dtype and device, in the place of everybody's: one broadcast."""
        if self.size == 1 or not tensors:
            return
        import torch

        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = of, 0
        flat = self._spoken(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        self._collective(lambda: self._group.broadcast([flat], options))
        if self.rank != of:
            _unpack(flat, tensors)

    def _spoken(self, flat: Tensor) -> Tensor:
        """On the host, where the processes have no common language for its device."""
        return flat if _language(flat.device.type) else flat.cpu()

    def agrees(self, error: BaseException) -> bool:
        """Whether all processes have raised an error at the same place, so that they may go on together."""
        return self.size == 1 or error in self._common

    def token(self) -> CancelToken:
        """A token that a process's work polls: it also hears of the others."""
        return CancelToken() if self.size == 1 else _Heard(self)

    def begin_anew(self, error: BaseException, wish: T) -> list[T]:
        """Where memory was too little in one process: what all wish who have raised that or heard of it, by rank.

        What was under way is forgotten, sums half added up too: all begin again at the same place. If something else
        went wrong first, that is raised.
        """
        if self.size == 1:
            return [wish]
        self._post(error)
        first = _error_of(self._store.get("failed"))
        if not isinstance(first, MemoryElsewhere):
            raise first
        import torch

        dist: Any = torch.distributed
        self._beginnings += 1
        self._store = _Store(dist.PrefixStore(f"anew{self._beginnings}", self._whole_store), self.size)
        used, self._number = (self._number, max(self._pairs.values(), default=0)), 0
        self._error, self._is_posted = None, False
        self._pairs.clear()
        by_rank = self.gather((wish, used))
        # No message of before is taken for one that comes now.
        self._number, self._last_pair = (
            max(numbers) for numbers in zip(*(used for _, used in by_rank), strict=True)
        )
        return [wish for wish, _ in by_rank]

    def progress(self, sink: ProgressSink) -> ProgressSink:
        """A sink for one bar of all processes: while the first waits for another's task, it shows how far that is."""
        if self.size == 1:
            return sink

        def show(event: ProgressEvent) -> None:
            self._shown = event
            sink(event)

        def post(event: ProgressEvent) -> None:
            self._store.set(f"event/{self.rank}/{self._number}", json.dumps(dataclasses.asdict(event)))

        self._sink = show if self.leads else post
        return self._sink

    def fail(self, error: BaseException) -> bool:
        """Post what ends this process; returns whether it is left to this one to say so."""
        if self.size == 1:
            return True
        is_posted = self._post(error)
        if self.leads:
            return True
        with contextlib.suppress(RuntimeError):  # the store may be gone with the process that held it
            until = time.monotonic() + _TOLD_SECONDS
            while (
                not (is_told := self._store.check(["told"])) and time.monotonic() < until and not self._lost()
            ):
                time.sleep(0.05)
            if is_told or self._store.check(["told"]):
                self._store.set(f"heard/{self.rank}", "1")
                return False
            return True
        # A signal that stops the first process comes to all.
        return not (is_posted and isinstance(error, Cancelled | KeyboardInterrupt))

    def told(self) -> None:
        """The first process has said why the job ends; it stays until the others know, for it may hold the store."""
        if self.size == 1 or not self.leads:
            return
        with contextlib.suppress(RuntimeError):
            self._store.set("told", "1")
            until = time.monotonic() + _HEARD_SECONDS
            others = {*range(1, self.size)}
            while others and time.monotonic() < until:
                # Whoever stops it twice waits no longer for that.
                with contextlib.suppress(KeyboardInterrupt):
                    others = {rank for rank in others if not self._store.check([f"heard/{rank}"])} - {
                        *self._lost()
                    }
                    time.sleep(0.02)

    def leave(self) -> None:
        """The end, where nobody needs the others any more; the first process may hold the store, so it goes last."""
        if self.size == 1:
            return
        self.meet()
        if self.leads:
            for rank in range(1, self.size):
                self._awaited(f"left/{rank}")
        else:
            self._store.set(f"left/{self.rank}", "1")
        self.close()

    def close(self) -> None:
        """No sign of life is given any more."""
        self._over.set()
        if self._beating.is_alive():
            self._beating.join()

    def look(self, *, at_once: bool = False) -> None:
        """Raise what another process failed with, if one did; found out a few times a second, or `at_once`."""
        if self.size == 1 or (time.monotonic() - self._looked < _LOOK_SECONDS and not at_once):
            return
        self._looked = time.monotonic()
        if self._error is None:
            self._error = self._heard()
        if self._error is not None:
            raise self._error

    def _agreed(self, error: DriftLensError) -> DriftLensError:
        self._common.append(error)
        return error

    def _post(self, error: BaseException) -> bool:
        """Say what ended this process, unless another one's end came first; from now on there is no team."""
        self._error = self._error or error
        with contextlib.suppress(RuntimeError):
            self._store.compare_set("failed", "", _described(error, self.rank))
            self._is_posted = True
        return self._is_posted

    def _introduce(self) -> None:
        process, namespace = psutil.Process(), Path("/proc/self/ns/pid")
        # Numbers of processes mean something only within a container.
        place = f"{socket.gethostname()} {namespace.readlink() if namespace.is_symlink() else ''}"
        me = place, process.pid, process.create_time()
        self._beating.start()
        self._peers = dict(enumerate(self.gather(me)))

    def _beat(self) -> None:
        """Say now and then that this process lives; torch lets other threads run while it computes."""
        with contextlib.suppress(RuntimeError):
            number = 0
            while not self._over.wait(_BEAT_SECONDS if number else 0):
                self._store.set(f"beat/{self.rank}", str(number := number + 1))

    def _heard(self) -> BaseException | None:
        try:
            if self._store.check(["failed"]):
                self._is_posted = True
                return _error_of(self._store.get("failed"))
            lost = self._lost()
        except _StoreGone as gone:
            return gone
        if not lost:
            return None
        # Its last words may be on their way.
        with contextlib.suppress(RuntimeError):
            if self._store.check(["failed"]):
                return _error_of(self._store.get("failed"))
        message, hint = _ended(lost[0], self.size)
        return RunError(message, hint=hint)

    def _lost(self) -> list[int]:
        """Processes that are not there any more."""
        host, _, _ = self._peers.get(self.rank, ("", 0, 0.0))
        others = ((rank, peer) for rank, peer in self._peers.items() if rank != self.rank)
        return [
            rank
            for rank, (place, pid, started) in others
            if not (_runs(pid, started) if place == host else self._beats(rank))
        ]

    def _beats(self, rank: int) -> bool:
        beat, now = self._store.get(f"beat/{rank}"), time.monotonic()
        if self._seen.get(rank, (b"", 0.0))[0] != beat:
            self._seen[rank] = beat, now
        return now - self._seen[rank][1] < _SILENT_SECONDS

    def _key(self, kind: str) -> str:
        """A name that all processes give to the same step; once one has ended, no step is the same any more."""
        if self._error is not None:
            raise self._error
        self._number += 1
        return f"{kind}/{self._number}"

    def _outcome(self, work: Callable[[], T]) -> tuple[T | None, DriftLensError | None]:
        try:
            return work(), None
        except DriftLensError as error:
            return None, error

    def _awaited(self, key: str, of: int | None = None) -> bytes:
        """What comes under a key; where it is known `of` which process, its progress is shown meanwhile."""
        pause, looked = 0.0005, self._looked
        while not self._store.check([key]):
            self.look()
            if of is not None and looked != self._looked:
                self._show(of)
                looked = self._looked
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        if of is not None:
            self._show(of)
        return cast("bytes", self._store.get(key))

    def _show(self, rank: int) -> None:
        key = f"event/{rank}/{self._number}"
        if self._sink is not None and self._store.check([key]):
            event = ProgressEvent(**json.loads(self._store.get(key)))
            if event.phase == self._shown.phase and event.done > self._shown.done:
                self._sink(dataclasses.replace(event, seconds=max(event.seconds, self._shown.seconds)))

    def _collective(self, begin: Callable[[], Any]) -> None:
        """A collective, from its beginning, where nccl connects, to its end; signals and others are heard meanwhile.

        It begins when all are here: once it has begun nobody can leave it before the last one has come.
        """
        key = self._key("here")
        if self._store.add(key, 1) == self.size:
            self._store.set(f"{key}/all", "1")
        else:
            self._awaited(f"{key}/all")
        begun: list[Any] = []
        self._finished(lambda: begun.append(begin()))
        pause = 0.0001
        while not begun[0].is_completed():
            self.look()
            time.sleep(pause)
            pause = min(1.5 * pause, 0.002)
        self._finished(begun[0].wait)

    def _finished(self, wait: Callable[[], object]) -> None:
        try:
            wait()
        except RuntimeError as error:  # a connection that breaks is a process that ends
            until = time.monotonic() + 3.0
            while time.monotonic() < until:
                self.look()
                time.sleep(_LOOK_SECONDS)
            raise RunError(
                f"the connection to another process broke: {str(error).splitlines()[0][:200]}",
                hint="What was finished is kept; repeat the command with --resume.",
            ) from error

    def _send(self, key: str, data: bytes, *, to: int) -> None:
        """To another process; what is long goes while this one works on."""
        self._store.set(key, len(data).to_bytes(8, "big") + (data if len(data) <= _INLINE else b""))
        if len(data) <= _INLINE:
            return
        import torch

        self._give(torch.frombuffer(bytearray(data), dtype=torch.uint8), to, _number(key))

    def _give(self, tensor: Tensor, to: int, tag: int) -> None:
        def send() -> None:
            with contextlib.suppress(RuntimeError):
                self._group.send([tensor], to, tag).wait()

        self._sending = [thread for thread in self._sending if thread.is_alive()]
        self._sending.append(threading.Thread(target=send, daemon=True))
        self._sending[-1].start()

    def _received(self, key: str, owner: int) -> bytes:
        received = self._awaited(key, owner)
        self._store.delete_key(key)
        size = int.from_bytes(received[:8], "big")
        if size <= _INLINE:
            return received[8:]
        import torch

        tensor = torch.empty(size, dtype=torch.uint8)
        self._take(tensor, owner, _number(key))
        return tensor.numpy().tobytes()

    def _take(self, tensor: Tensor, owner: int, tag: int) -> None:
        broken: list[RuntimeError] = []

        def receive() -> None:
            try:
                self._group.recv([tensor], owner, tag).wait()
            except RuntimeError as error:
                broken.append(error)

        thread = threading.Thread(target=receive, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK_SECONDS)
            self.look()

        def check() -> None:
            if broken:
                raise broken[0]

        self._finished(check)


class _StoreGone(RunError, RuntimeError):
    """The store went with the process that held it, as a rule the first one."""


class _Store:
    """A store of torch.distributed, whose calls raise `_StoreGone` where it is not there any more."""

    def __init__(self, store: Any, size: int) -> None:
        self._store, self._size = store, size

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def through(*given: Any) -> Any:
            try:
                return call(*given)
            except RuntimeError as error:
                message, hint = _ended(0, self._size)
                raise _StoreGone(message, hint=hint) from error

        return through


def _ended(rank: int, size: int) -> tuple[str, str]:
    """What is said of a process that is not there any more, and what to do."""
    return (
        f"process {rank} of {size} ended without a word: it was killed, or had no memory left",
        "What was finished is kept; repeat the command with --resume, with any number of processes.",
    )


def _number(key: str) -> int:
    return int(key.rpartition("/")[2])


ALONE = Team()
"""Where nobody has formed a team."""


def _unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    start = 0
    for tensor in tensors:
        tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()


def _runs(pid: int, started: float) -> bool:
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - started) < 2
    except psutil.Error:
        return False


def _described(error: BaseException, rank: int) -> str:
    if isinstance(error, KeyboardInterrupt):
        error = Cancelled("cancelled")
    elif isinstance(error, OSError) and not isinstance(error, DriftLensError):
        error = RunError(f"process {rank}: {error}", hint="What was finished is kept.")
    if isinstance(error, DriftLensError):
        return json.dumps([type(error).__name__, error.message, error.hint])
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):  # torch's, not imported here
        error_of_memory = f"process {rank} has too little memory: {str(error).partition(chr(10))[0]}"
        return json.dumps([MemoryElsewhere.__name__, error_of_memory, LESS_MEMORY])
    return json.dumps(["", f"in process {rank}: {type(error).__name__}: {error}", ""])


def _error_of(posted: bytes) -> BaseException:
    name, message, hint = json.loads(posted)
    kinds = {**vars(driftlens.base.errors), MemoryElsewhere.__name__: MemoryElsewhere}
    kind = kinds.get(name) if name else None
    return RuntimeError(message) if kind is None else kind(message, hint=hint)


class _Heard(CancelToken):
    """Asks the team too: what stops one process stops all."""

    def __init__(self, team: Team) -> None:
        super().__init__()
        self._team = team

    def check(self) -> None:
        # A launcher stops all as soon as one is gone: that one is the reason.
        self._team.look(at_once=self.is_set)
        super().check()


@contextlib.contextmanager
def joined() -> Iterator[Team]:
    """The team that the environment speaks of, as torchrun and its kin set it up; alone where it speaks of none."""
    size = members()
    if size == 1:
        yield Team()
        return
    import torch

    from driftlens.base.devices import use_device

    dist: Any = torch.distributed
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=_JOIN_SECONDS)))
        backend, place = "gloo", use_device(int(os.environ.get("LOCAL_RANK", "0")))
        if place is not None and (own := _language(place.type)):
            backend = f"cpu:gloo,{place.type}:{own}"
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(days=7),  # who waits looks after the others itself
        )
    except (RuntimeError, ValueError, KeyError) as error:
        raise SpecError(
            f"the {size} processes of the job don't find together: {str(error).splitlines()[0][:200]}",
            hint="Start with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in every process.",
        ) from error
    team = Team(rank, size, dist.group.WORLD, dist.PrefixStore("team", store))
    yield team
    team.leave()
    dist.destroy_process_group()


def _language(kind: str) -> str | None:
    """What torch's processes talk by about tensors on devices of this kind: gloo of the host's, a maker's own, None."""
    import torch

    languages: dict[str, str] = torch.distributed.Backend.default_device_backend_map
    own = languages.get(kind)
    return own if kind == "cpu" or own != "gloo" else None


def members() -> int:
    """How many processes the environment says there are; 1 where it doesn't say who this one is."""
    said = os.environ.get("WORLD_SIZE", "1")
    return int(said) if said.isdecimal() and int(said) > 1 and "RANK" in os.environ else 1
