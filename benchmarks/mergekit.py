"""What recipes take beside mergekit itself: Llamas in bf16 shards, three experts; linear, slerp and ties."""

from __future__ import annotations

import json
import multiprocessing
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

VARIABLE = "DRIFTLENS_MERGEKIT"
INSTALL = (
    "`python -m venv mk && mk/bin/pip install mergekit==0.1.5` gives it an environment of its own; then run "
    "`python -m benchmarks mergekit --mergekit mk/bin/mergekit-yaml`"
)
MODELS = ("base", "one", "two", "three")
WORDS = 32_000
SIZES = {"1 GB": (17, 1408, 3840), "2 GB": (18, 2048, 5632)}
"""Blocks, width, and width within."""
SHARDS = 4
ROUNDS = 3
_WEIGHTS = {"one": 0.3, "two": 0.3, "three": 0.4}
_THINNED = [{"model": name, "parameters": {"weight": at, "density": 0.5}} for name, at in _WEIGHTS.items()]
RECIPES = {
    "linear": {"models": [{"model": name, "parameters": {"weight": at}} for name, at in _WEIGHTS.items()]},
    "slerp": {"models": [{"model": "one"}, {"model": "two"}], "base_model": "one", "parameters": {"t": 0.4}},
    "ties": {"models": _THINNED, "base_model": "base", "parameters": {"normalize": True}},
}


class Taken(NamedTuple):
    """What one command took: seconds of the processor and by the clock, and its peak in MB."""

    processor: float
    wall: float
    peak: float


def run(
    device: str,
    sizes: Sequence[str] = tuple(SIZES),
    recipes: Sequence[str] = tuple(RECIPES),
    rounds: int = ROUNDS,
    place: str | None = None,
) -> str:
    """The least of what both take by turns, and the ratios; `place` is a folder in which models are kept."""
    del device
    theirs = os.environ.get(VARIABLE) or shutil.which("mergekit-yaml")
    if theirs is None:
        return f"mergekit: not measured. {INSTALL}"
    lines = ["mergekit 0.1.5 and DriftLens by turns, DriftLens's share of mergekit's (wanted: at most 1):"]
    with tempfile.TemporaryDirectory(dir=place) as scratch:
        for size in sizes:
            folder = pathlib.Path(place or scratch, size.replace(" ", ""))
            for seed, name in enumerate(MODELS):
                if not (folder / name).is_dir():
                    # Elsewhere: of a process that was large its children count as large.
                    with multiprocessing.get_context("spawn").Pool(1) as process:
                        process.apply(write_model, (folder / name, *SIZES[size]), {"seed": seed})
            for method in recipes:
                lines.append(f"{size}, {method}: {_compared(theirs, folder, method, rounds, scratch)}")
            if place is None:
                shutil.rmtree(folder)
    return "\n  ".join(lines)


def _compared(theirs: str, folder: pathlib.Path, method: str, rounds: int, scratch: str) -> str:
    recipe = folder / f"{method}.yml"
    recipe.write_text(json.dumps({"merge_method": method, "dtype": "bfloat16", **RECIPES[method]}))
    out = pathlib.Path(scratch, "out")
    # Its card asks the Hub for every model.
    commands = {
        "mergekit": [theirs, recipe.name, str(out), "--no-write-model-card"],
        "DriftLens": [sys.executable, "-m", "driftlens", "merge", recipe.name, "--out", str(out)],
    }
    taken: dict[str, list[Taken]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            taken[name].append(_taken(command, folder))
            shutil.rmtree(out)
    least = {name: Taken(*map(min, zip(*of, strict=True))) for name, of in taken.items()}
    shown = []
    for what, unit in {"processor": "s", "wall": "s", "peak": "MB"}.items():
        own, other = (getattr(least[name], what) for name in ("DriftLens", "mergekit"))
        shown.append(f"{what} {own:.4g} of {other:.4g} {unit}, {own / other:.2f}")
    return "; ".join(shown)


def _taken(command: Sequence[str], folder: pathlib.Path) -> Taken:
    """What a command takes, its child processes included."""
    here = str(pathlib.Path(__file__).resolve().parents[1])
    path = here if command[0] == sys.executable else ""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    started = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, cwd=folder, stdout=said, stderr=said, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            said.seek(0)
            raise RuntimeError(f"{command[0]}: {said.read().decode(errors='replace')[-2000:]}")
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return Taken(
        usage.ru_utime + usage.ru_stime, time.perf_counter() - started, usage.ru_maxrss / unit * 1.048576
    )


def write_model(folder: pathlib.Path, blocks: int, width: int, within: int, *, seed: int) -> None:
    """A Llama with random weights in bf16 shards, and a tokenizer of made-up words; experts are near seed 0."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=width,
        intermediate_size=within,
        num_hidden_layers=blocks,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        eos_token_id=1,
        dtype="bfloat16",
    )
    write_near(transformers.LlamaForCausalLM, config, folder, seed)


def write_near(kind: Any, config: Any, folder: pathlib.Path, seed: int) -> None:
    """A model with random weights in bf16 shards, near that of seed 0, and a tokenizer of made-up words."""
    import tokenizers
    import torch
    import transformers

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = kind(config).to(torch.bfloat16)
        torch.manual_seed(seed)
        for weight in model.parameters() if seed else ():
            weight.add_(1e-3 * torch.randn(weight.shape))
    size = sum(weight.nbytes for weight in model.parameters())
    model.save_pretrained(folder, max_shard_size=f"{size // SHARDS // 10**6 + 1}MB")

    words = {f"word{number}": number for number in range(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    reader = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="word1", unk_token="word0"
    )
    reader.save_pretrained(folder)
