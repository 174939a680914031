"""Maps that travel beside a saved checkpoint, and the lines of Python that hook them into the library's own model."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

from driftlens.engine.pool import Attachments

ATTACHED_FILE = "attachments.safetensors"
"""Where a saved folder holds what is attached."""

_LOADER = """\
import torch
from safetensors.torch import load_file


def attach(model, task, file="{file}"):
    saved = {{tuple(key.split("/", 2)): value for key, value in load_file(file).items()}}
    for path in {{path for path, name, of in saved if of == task}}:
        def change(module, inputs, output, path=path):
            f = output[0] if isinstance(output, tuple) else output
            t = {{name: value.to(f) for (at, name, of), value in saved.items() if (at, of) == (path, task)}}
{code}
            return (f, *output[1:]) if isinstance(output, tuple) else f
        model.get_submodule(path).register_forward_hook(change)


"""


def with_loader(card: Callable[[str], str], attachments: Attachments) -> Callable[[str], str]:
    """A card whose Python also hooks in what is attached for a task; the same card where nobody wrote how."""
    (task, _), first = next(iter(attachments.items()))
    code = str(getattr(first, "code", ""))
    if not code:
        return card
    loader = _LOADER.format(file=ATTACHED_FILE, code=textwrap.indent(code, " " * 12))

    def more(usage: str) -> str:
        lines = usage.splitlines(keepends=True)
        made = next((at for at, line in enumerate(lines) if line.startswith("model")), None)
        if made is None:
            return card(f"{usage}{loader}")
        lines.insert(made + 1, f"attach(model, {task!r})  # the task that the inputs are of\n")
        return card(f"{loader}{''.join(lines)}")

    return more
