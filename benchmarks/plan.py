"""How far estimates are apart, and from what is then measured: a small Llama with four experts, idle and beside work.

Every command is asked about five times, then done. Processes are planned after `doctor --measure`, and then started.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.busy import beside
from tests.zoo.tokenizers import WORDS, word_tokenizer

WIDTH, BLOCKS, SAMPLES, LENGTH = 512, 8, 64, 60
TASKS = ("a", "b", "c", "d")
ASKED, SPREAD, WITHIN = 5, 1.5, 2.0


def run(device: str) -> str:
    """Spread of the estimates, and the middle one over measured seconds, by command; the same by processes."""
    told = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        os.environ["XDG_CACHE_HOME"] = str(place / "cache")
        spec = _spec(place, device)
        for busy in (0, 1):
            with beside(busy):
                told += [
                    f"{'busy' if busy else 'idle'}: {line}" for line in _asked(place, spec, device, busy)
                ]
        _command(["doctor", "--measure", "--device", device])
        told += _by_processes(place, spec, device)
    shape = f"{BLOCKS} blocks x {WIDTH}, {len(TASKS)} x {SAMPLES} texts"
    wanted = f"wanted: spread {SPREAD}, within {WITHIN} of what is measured"
    return f"plans ({shape}): {'; '.join(told)} ({wanted})"


def _asked(place: Path, spec: Path, device: str, busy: int) -> Iterator[str]:
    """Of an analysis, a calibration and a choice: how far estimates are apart, and the middle one over the truth."""
    out, common = place / f"asked{busy}", ["--device", device]
    calibrated = ["calibrate", out, "--no-attribution"]
    commands: dict[str, tuple[list[object], list[object]]] = {
        "analyze": (["validate", spec, *common], ["analyze", spec, "--out", out, *common]),
        "calibrate": (
            [*calibrated, "--name", "a", "--dry-run", *common],
            [*calibrated, "--name", "a", *common],
        ),
        "--auto": (
            [*calibrated, "--name", "b", "--auto", "--dry-run", *common],
            [*calibrated, "--name", "b", "--auto", *common],
        ),
    }
    for name, (ask, do) in commands.items():
        asked = [json.loads(_command([*ask, "--json"]))["estimate"]["seconds"] for _ in range(ASKED)]
        seconds, middle = _measured([*do, "--progress", "none"], 1), statistics.median(asked)
        yield (
            f"{name} about {middle:.0f} s, spread {max(asked) / min(asked):.2f}, measured {seconds:.0f} s, "
            f"ratio {middle / seconds:.2f}"
        )


def _by_processes(place: Path, spec: Path, device: str) -> Iterator[str]:
    for number in (1, 2, 4):
        plan = [
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
        shares = json.loads(_command(plan))["processes"]["shares"]
        out = place / f"run{number}"
        commands = {
            "analyze": ["analyze", spec, "--out", out],
            "calibrate": ["calibrate", out, "--name", "featcal", "--no-attribution"],
        }
        for name, arguments in commands.items():
            seconds = _measured([*arguments, "--device", device, "--progress", "none"], number)
            about = shares[name]["seconds"]
            yield f"{name} by {number}: about {about:.0f} s, measured {seconds:.0f} s, ratio {about / seconds:.2f}"


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
