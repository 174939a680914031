"""Chat templates rendered apart: they are programs of whoever made the tokenizer, and get so much time and memory.

The sandbox of the library keeps them from reading and calling what they should not, and from nothing else: a loop
without end, or a text doubled forty times, would take this process with it. So they run in another one, which starts
when it is first needed and ends with this one. This file is also what that process runs.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

SECONDS, SECONDS_PER_MESSAGE = 3.0, 0.005
"""Of the processor, for all messages of a call and for each."""
MOST_MEMORY = 512 << 20
"""Bytes beyond what the libraries take."""
_IN_TURN = threading.Lock()


def rendered(template: str, tokens: Mapping[str, Any], messages: Sequence[str]) -> list[str]:
    """What a model reads where a user says each message and it is its turn to answer.

    Args:
        template: in Jinja, as tokenizers carry it.
        tokens: special tokens by the names under which templates know them.
        messages: one conversation each.

    Raises:
        ValueError: the template fails, or takes more than it may; the message says which.
    """
    asked = {"template": template, "tokens": tokens, "messages": list(messages)}
    with _IN_TURN:
        worker = _worker()
        try:
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.write(json.dumps(asked, default=str) + "\n")
                worker.stdin.flush()
            answer = worker.stdout.readline()
        except BaseException:  # cancelled: its answer would be taken for that of the next call
            _end(worker)
            raise
        if not answer.endswith("\n"):
            _end(worker)
            raise ValueError(
                f"it takes too long: {len(messages)} messages took more than {_seconds(messages):.3g} s"
            )
    found = json.loads(answer)
    if "error" in found:
        raise ValueError(found["error"])
    return cast("list[str]", found["texts"])


class _Worker(subprocess.Popen[str]):
    stdin: IO[str]
    stdout: IO[str]


@functools.cache
def _worker() -> _Worker:
    command = [sys.executable, "-P", str(Path(__file__).resolve())]
    pipe = subprocess.PIPE
    worker = _Worker(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, encoding="ascii")
    atexit.register(_end, worker)
    return worker


def _end(worker: _Worker) -> None:
    worker.kill()
    worker.communicate()
    atexit.unregister(_end)
    _worker.cache_clear()


def _seconds(messages: Sequence[str]) -> float:
    return SECONDS + SECONDS_PER_MESSAGE * len(messages)


def _serve() -> None:
    """Answer line by line until nobody asks any more; whoever takes too long is ended by the timer."""
    from transformers.utils.chat_template_utils import render_jinja_template

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    _limit_memory()
    for line in sys.stdin:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, _seconds(asked["messages"]))
        said = [[{"role": "user", "content": message}] for message in asked["messages"]]
        try:
            texts, _ = render_jinja_template(
                said, chat_template=asked["template"], add_generation_prompt=True, **asked["tokens"]
            )
            answer = json.dumps({"texts": texts})
        except MemoryError:
            answer = json.dumps({"error": f"it takes more than {MOST_MEMORY >> 20} MiB of memory"})
        except Exception as error:  # whatever somebody's template raises
            answer = json.dumps({"error": str(error)[:1000]})
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


def _limit_memory() -> None:
    if sys.platform == "linux":
        import resource

        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + MOST_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    _serve()
