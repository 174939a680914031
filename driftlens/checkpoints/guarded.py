"""What a stranger's file may blow up is done in a process of its own, which gets so much time, memory and output.

A chat template and a tokenizer are programs of whoever made them, an adapter's patterns may match for ever, a pickle
may ask for any number of steps. Sandboxes keep them from reading and calling what they should not, and from nothing
else: a loop without end would take this process with it. So another one, which serves all that follow, does it first.

Nothing of a file is imported or called there either: a request names one of `_PREPARED`, and what comes back is JSON.
This file is also what that process runs, so it imports nothing of ours and no library before it is asked for it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

SECONDS = 3.0
"""Of the processor. Llama 3.1's template takes 7 ms and 15 us a message, ten patterns on 500 modules less.

What takes hundreds of times as long has no end in sight.
"""
MOST_MEMORY = 512 << 20
"""Bytes beyond what the libraries take: 10,000 messages of 10 kB, held as texts and as an answer, take 200 MB."""
MOST_ANSWER = 256 << 20
"""Characters of an answer, for systems that don't limit memory."""
_PATIENCE, _SLOWEST = 120.0, 20.0
"""Seconds by the clock to start and import, and how many of them a busy machine may take for one of the processor."""
_IN_TURN = threading.Lock()


def guarded(work: str, *arguments: Any, seconds: float = SECONDS, memory: int = MOST_MEMORY) -> Any:
    """The result of some work on what a stranger made, which is data: texts, numbers, lists of them.

    Args:
        work: `template`, `tokenizer`, `patterns` or `pickle`; what each takes and returns stands at its function below.
        arguments: of the work, as JSON takes them.
        seconds: of the processor that it may take; where the process can't stop by itself, a little more.
        memory: bytes that it may take beyond what the libraries do. Not every system limits it.

    Raises:
        ValueError: the work fails, or takes more than it may; the message says which.
    """
    with _IN_TURN:
        worker = _worker()
        timer = threading.Timer(_PATIENCE + _SLOWEST * seconds, worker.kill)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.write(json.dumps([work, arguments, seconds, memory], default=str) + "\n")
                worker.stdin.flush()
            answer = worker.stdout.readline(MOST_ANSWER)
        except BaseException:  # cancelled: its answer would be taken for that of the next request
            _end(worker)
            raise
        finally:
            timer.cancel()
        if not answer.endswith("\n"):
            _end(worker)
            raise ValueError(_death(worker.returncode, len(answer), seconds, memory))
    result, failure = json.loads(answer)
    if failure:
        raise ValueError(failure)
    return result


class _Worker(subprocess.Popen[str]):
    stdin: IO[str]
    stdout: IO[str]


@functools.cache
def _worker() -> _Worker:
    # Isolated, so that no file of the folder that we work in is taken for a library; where ours lie, it is told.
    command = [sys.executable, "-I", str(Path(__file__).resolve())]
    # Threads of tokenizers would each set memory aside, which counts.
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"}
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    worker = _Worker(command, stdin=pipe, stdout=pipe, stderr=nowhere, encoding="ascii", env=environment)
    atexit.register(_end, worker)
    worker.stdin.write(json.dumps([str(Path(entry).resolve()) for entry in sys.path]) + "\n")
    return worker


def _end(worker: _Worker) -> None:
    worker.kill()
    worker.wait()
    worker.stdin.close()
    worker.stdout.close()
    atexit.unregister(_end)
    _worker.cache_clear()


def _too_long(seconds: float) -> str:
    return f"it takes too long: more than {seconds:.3g} s of the processor"


def _too_large(memory: int) -> str:
    return f"it takes more than {memory >> 20} MiB of memory"


def _death(code: int, answered: int, seconds: float, memory: int) -> str:
    """Why there is no answer, as the way the process ended tells."""
    if answered:
        return f"it gives more than {MOST_ANSWER:,} characters"
    if code in (-signal.SIGPROF, -signal.SIGKILL):
        return _too_long(seconds)
    return f"{_too_large(memory)}, or breaks its library down (exit status {code})"


# --- in the process itself


def _serve() -> None:
    """Do what each line asks and answer with one, until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    signal.signal(signal.SIGVTALRM, _stop)
    # What a library prints must not stand among the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    sys.path[:] = json.loads(sys.stdin.readline())
    prepared = functools.cache(lambda work: _PREPARED[work]())
    for line in sys.stdin:
        work, arguments, seconds, memory = json.loads(line)
        result, failure = None, ""
        try:
            carry_out = prepared(work)
            with _limited(seconds, memory):
                result = carry_out(*arguments)
            text = json.dumps([result, ""])
        except MemoryError:
            failure = _too_large(memory)
        except TimeoutError as error:
            failure = str(error) or _too_long(seconds)
        except BaseException as error:  # what libraries in Rust break down with is no Exception
            failure = str(error)[:1000] or type(error).__name__
        answers.write((json.dumps([None, failure]) if failure else text) + "\n")
        answers.flush()


def _stop(*_: object) -> None:
    raise TimeoutError


@contextlib.contextmanager
def _limited(seconds: float, memory: int) -> Iterator[None]:
    """A block that is stopped after so long, and gets no more memory than what the process has now and so much."""
    # Code of Python's hears the first alarm; one inside a library's loop is ended by the second.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    signal.setitimer(signal.ITIMER_PROF, seconds + 1)
    try:
        with _limited_memory(memory):
            yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


@contextlib.contextmanager
def _limited_memory(memory: int) -> Iterator[None]:
    if sys.platform != "linux":  # others take the limit and don't keep it
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + memory
    resource.setrlimit(
        resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _templates() -> Callable[..., list[str]]:
    """Chat templates, rendered in the sandbox of the library."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # it takes seconds, and nobody here computes
    from transformers.utils.chat_template_utils import render_jinja_template

    def texts(template: str, tokens: Mapping[str, Any], messages: Sequence[str]) -> list[str]:
        """What a model reads where a user says each message, a conversation each, and it is its turn to answer.

        `tokens` are special tokens by the names under which templates know them.
        """
        said = [[{"role": "user", "content": message}] for message in messages]
        rendered: list[str] = render_jinja_template(
            said, chat_template=template, add_generation_prompt=True, **tokens
        )[0]
        return rendered

    return texts


def _tokenizers() -> Callable[..., bool]:
    """Tokenizers, built and tried out: whoever needs one builds it again, now that this is known to end."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    import transformers

    transformers.AutoTokenizer  # noqa: B018 - is imported when it is looked up

    def can_be_built(folder: str, kind: str) -> bool:
        """Whether the library builds a tokenizer from the files in a folder; `kind` names its class."""
        try:
            tokenizer = getattr(transformers, kind).from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except (MemoryError, TimeoutError):
            raise
        except Exception:  # a missing or broken file: the tokenizers library raises nothing more precise
            return False
        tokenizer.decode(tokenizer("a few words")["input_ids"])
        return True

    return can_be_built


def _patterns() -> Callable[..., list[int | None]]:
    """Patterns of an adapter, as peft reads them: each has to match the end of a module's path."""
    import re

    def first_matches(patterns: Sequence[str], modules: Sequence[str]) -> list[int | None]:
        """For each module the place of the first pattern that matches it, or None."""

        def matches(pattern: str, module: str) -> bool:
            try:
                return re.match(rf"(.*\.)?({pattern})$", module) is not None
            except TimeoutError:
                raise TimeoutError(f"{pattern[:80]!r} takes too long") from None
            except (re.error, RecursionError, OverflowError):
                raise ValueError(f"{pattern[:80]!r} is no pattern") from None

        return [
            next((place for place, pattern in enumerate(patterns) if matches(pattern, module)), None)
            for module in modules
        ]

    return first_matches


def _pickles() -> Callable[..., None]:
    """Pickled checkpoints, read by our own machine: whoever needs one reads it again, now that this is known to end."""
    from driftlens.checkpoints.pickles import Unpickled

    def can_be_read(path: str) -> None:
        try:
            Unpickled(Path(path))
        except (MemoryError, TimeoutError):
            raise
        except Exception:  # it is said again to whom it concerns
            return

    return can_be_read


_PREPARED: dict[str, Callable[[], Callable[..., Any]]] = {
    "template": _templates,
    "tokenizer": _tokenizers,
    "patterns": _patterns,
    "pickle": _pickles,
}
"""Name of a work -> what imports its libraries, outside of all limits, and returns the function that does it."""


if __name__ == "__main__":
    _serve()
