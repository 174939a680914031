"""Merges from files to files against mergekit: CPU seconds and peak memory, on models of 1 GB in bfloat16.

`DRIFTLENS_MERGEKIT` names the program `mergekit-yaml` of an environment with mergekit; each side runs in its own
process with one thread, in turn with the other.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import torch
import yaml

from benchmarks.figures import record

MERGEKIT = "DRIFTLENS_MERGEKIT"
ROUNDS = 3
MODELS = ("base", "a", "b")
RECIPES = {
    "linear": {"merge_method": "linear", "parameters": {"weight": 0.5}},
    "slerp": {"merge_method": "slerp", "base_model": "a", "parameters": {"t": 0.5}},
    "ties": {"merge_method": "ties", "base_model": "base", "parameters": {"weight": 0.5, "density": 0.2}},
}
OURS = {"linear": "average", "slerp": "slerp", "ties": "ties"}


def run(device: str) -> None:
    """Record the ratio of CPU seconds and of peak memory for each method."""
    del device
    if MERGEKIT not in os.environ:
        print(f"merging: not measured, since {MERGEKIT} is not set; see benchmarks/merging.py")
        return
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        _write_models(folder)
        for method, recipe in RECIPES.items():
            theirs = [os.environ[MERGEKIT], _write_recipe(folder, method, recipe), f"{folder}/theirs"]
            theirs += ["--no-write-model-card", "--no-copy-tokenizer"]
            ours = [sys.executable, "-m", "driftlens", "merge", _write_spec(folder), "--method", OURS[method]]
            ours += ["--out", f"{folder}/ours"]
            found = [[_cost(folder, words) for words in (ours, theirs)] for _ in range(ROUNDS)]
            (own, memory), (other, beside) = (
                [min(of) for of in zip(*side, strict=True)] for side in zip(*found, strict=True)
            )
            value = f"{own / other:.2f} times its CPU time ({own:.1f} s against {other:.1f} s)"
            value += f"; peak {memory / 1e6:.2f} GB against {beside / 1e6:.2f} GB"
            record("merging", f"{method} of two models of 1 GB, against mergekit", value, "not slower, not heavier")


@torch.no_grad()
def _write_models(folder: pathlib.Path) -> None:
    """Write a Llama of 0.5 billion parameters in bfloat16, and two near it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=1536, intermediate_size=4096, num_hidden_layers=16, num_attention_heads=12, vocab_size=16_000
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    first = [parameter.clone() for parameter in model.parameters()]
    for seed, name in enumerate(MODELS):
        drawn = torch.Generator().manual_seed(seed)
        for parameter, value in zip(model.parameters(), first, strict=True):
            change = torch.randn(value.shape, generator=drawn, dtype=torch.float32)
            parameter.copy_(value + 1e-2 * change * bool(seed))
        model.save_pretrained(folder / name)


def _write_recipe(folder: pathlib.Path, method: str, recipe: dict[str, object]) -> str:
    models = [{"model": str(folder / name)} for name in MODELS[1:]]
    whole = {**recipe, "models": models, "dtype": "bfloat16"}
    if "base_model" in recipe:
        whole["base_model"] = str(folder / str(recipe["base_model"]))
    file = folder / f"{method}.yml"
    file.write_text(yaml.safe_dump(whole))
    return str(file)


def _write_spec(folder: pathlib.Path) -> str:
    """Write a spec; a merge from weights reads no samples, so the data has one row."""
    rows = folder / "rows.jsonl"
    rows.write_text('{"input": "a question", "target": "an answer"}\n')
    data = {"kind": "jsonl", "calibration": str(rows), "test": str(rows), "input": "input", "target": "target"}
    spec = {
        "version": 1,
        "name": "merging",
        "architecture": {"loader": "hf-decoder", "source": str(folder / "base")},
        "base": {"weights": str(folder / "base")},
        "experts": {name: {"weights": str(folder / name)} for name in MODELS[1:]},
        "merge": {"method": "average"},
        "data": dict.fromkeys(MODELS[1:], data),
    }
    file = folder / "spec.yaml"
    file.write_text(yaml.safe_dump(spec))
    return str(file)


def _cost(folder: pathlib.Path, words: Sequence[str]) -> tuple[float, float]:
    """Return CPU seconds and the peak memory in kB of a command."""
    for side in ("ours", "theirs"):
        shutil.rmtree(folder / side, ignore_errors=True)
    # Not `os.wait4`: the peak of a process begins with that of its parent, which here has torch.
    command = ["/usr/bin/time", "-f", "%U %S %M", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr[-2000:]}")
    measured = re.findall(r"^([\d.]+) ([\d.]+) (\d+)$", done.stderr, re.MULTILINE)[-1]
    user, system, peak = map(float, measured)
    return user + system, peak
