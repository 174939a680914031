"""How far `validate --processes` is from what is then measured: a small Llama, four experts, 1, 2 and 4 processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from tests.zoo.tokenizers import WORDS, word_tokenizer

WIDTH, BLOCKS, SAMPLES, LENGTH = 512, 8, 64, 60
TASKS = ("a", "b", "c", "d")
WANTED = 0.3


def run(device: str) -> str:
    """Predicted over measured seconds and memory, by command and number of processes."""
    told = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        os.environ["XDG_CACHE_HOME"] = str(place / "cache")
        spec = _spec(place, device)
        _command(["doctor", "--measure", "--device", device])
        for number in (1, 2, 4):
            checks = _command(
                [
                    "validate",
                    spec,
                    "--processes",
                    number,
                    "--per-machine",
                    number,
                    "--device",
                    device,
                    "--json",
                ]
            )
            shares = json.loads(checks)["processes"]["shares"]
            out = place / f"run{number}"
            commands = {
                "analyze": ["analyze", spec, "--out", out],
                "calibrate": ["calibrate", out, "--name", "featcal", "--no-attribution"],
            }
            for name, arguments in commands.items():
                seconds = _measured([*arguments, "--device", device, "--progress", "none"], number)
                told.append(
                    f"{name} by {number}: {shares[name]['seconds']:.0f} s predicted, {seconds:.0f} s measured, "
                    f"{shares[name]['seconds'] / seconds - 1:+.0%}"
                )
    shape = f"{BLOCKS} blocks x {WIDTH}, {len(TASKS)} x {SAMPLES} texts"
    return f"plans ({shape}): {'; '.join(told)} (wanted: {WANTED:.0%})"


def _spec(folder: Path, device: str) -> Path:
    torch.manual_seed(0)
    tokenizer = word_tokenizer()
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=len(tokenizer),
    )
    model = LlamaForCausalLM(config)
    for name in ("base", *TASKS):
        if name != "base":
            with torch.no_grad():
                for value in model.parameters():
                    value += 0.002 * torch.randn_like(value)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    generator = torch.Generator().manual_seed(0)
    for split in ("train", "test"):
        picked = torch.randint(len(WORDS), (2 * SAMPLES, LENGTH), generator=generator)
        rows = [{"input": " ".join(WORDS[at] for at in row), "target": "yes"} for row in picked.tolist()]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"kind": "jsonl", "calibration": str(folder / "train.jsonl"), "test": str(folder / "test.jsonl")}
    spec = {
        "version": 1,
        "name": "plan",
        "architecture": {"loader": "hf-decoder", "source": str(folder / "base")},
        "base": {"weights": str(folder / "base")},
        "merge": {"method": "task_arithmetic", "scaling": 0.3},
        "experts": {task: {"weights": str(folder / task)} for task in TASKS},
        "data": {
            "defaults": {"n": SAMPLES, "n_diagnosis": SAMPLES, "n_test": 8, "batch_size": 16},
            **dict.fromkeys(TASKS, data),
        },
        "metrics": {"jacobian": False},
        "compute": {"device": device},
    }
    file = folder / "spec.yaml"
    file.write_text(yaml.safe_dump(spec))
    return file


def _command(arguments: list[object]) -> str:
    command = [sys.executable, "-m", "driftlens", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _measured(arguments: list[object], number: int) -> float:
    """Seconds of a command in so many processes."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(number)] if number > 1 else []
    command = [sys.executable, *launcher, "-m", "driftlens", *map(str, arguments)]
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started
