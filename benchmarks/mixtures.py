"""Peak memory of analysing and repairing a mixture of experts that is read in parts."""

from __future__ import annotations

import json
import multiprocessing
import pathlib
import resource
import tempfile
from typing import Any

from benchmarks.figures import record

TASKS, SAMPLES, TOKENS = 3, 16, 128
LAYERS, WIDTH, INNER, EXPERTS = 11, 1024, 3584, 8
WORDS, SHARDS = 32_000, 4
WANTED = 1.6


def run(device: str) -> None:
    """Record the peak resident memory of processes of their own over the bytes of one model in bfloat16."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        # Processes of their own: of one that was large its children would count as large.
        for seed in range(TASKS + 1):
            _apart(_write_model, folder, seed)
        size = sum(file.stat().st_size for file in folder.glob("0/*.safetensors")) / 2**20
        _write_texts(folder)
        peaks = {"import alone": _apart(_idle)}
        for job in ("analyze", "featcal"):
            peaks[job] = _apart(_job, folder, job, device)
    case = f"mixture of 2 GB, {TASKS} experts on disk: FeatCal; analysis"
    peak = f"{peaks['featcal'] / 1024:.1f} GB; {peaks['analyze'] / 1024:.1f} GB"
    target = f"at most {WANTED} times one model, and 2 GiB for features"
    record("mixtures", case, peak, target, device=device)
    record("mixtures", "imports alone; one model", f"{peaks['import alone'] / 1024:.1f} GB; {size / 1024:.1f} GB")


def _apart(call: Any, *given: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as process:
        return process.apply(call, given)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _idle() -> float:
    import transformers

    import driftlens

    assert transformers.AutoModelForCausalLM and driftlens.analyze
    return _peak()


def _write_model(folder: pathlib.Path, seed: int) -> None:
    """Random weights; experts lie near the base, which is number 0."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=4,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        dtype="bfloat16",
    )
    _write_near(MixtralForCausalLM, config, folder / str(seed), seed)


def _write_near(kind: Any, config: Any, folder: pathlib.Path, seed: int) -> None:
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
    reader = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="word1", unk_token="word0")
    reader.save_pretrained(folder)


def _write_texts(folder: pathlib.Path) -> None:
    import random

    draw = random.Random(0)
    for name in (f"{task}{split}" for task in range(1, TASKS + 1) for split in ("", "-test")):
        rows = (
            {"input": " ".join(f"word{draw.randrange(2, WORDS)}" for _ in range(TOKENS)), "target": "word7"}
            for _ in range(SAMPLES)
        )
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def _job(folder: pathlib.Path, job: str, device: str) -> float:
    """The peak of one job; FeatCal goes on from the analysis before it."""
    import driftlens as dl

    if job == "featcal":
        dl.calibrate(folder / "run", name=job, method=job, attribution=False, progress="none")
        return _peak()
    tasks = [str(task) for task in range(1, TASKS + 1)]
    data = {
        f"t{task}": {
            "kind": "jsonl",
            "input": "input",
            "prompt": "{input}",
            "metric": "exact_match",
            "calibration": str(folder / f"{task}.jsonl"),
            "test": str(folder / f"{task}-test.jsonl"),
        }
        for task in tasks
    }
    counts = {"n": SAMPLES, "n_diagnosis": SAMPLES, "n_test": SAMPLES}
    spec = {
        "version": 1,
        "architecture": {"loader": "hf-decoder", "source": str(folder / "0")},
        "base": {"weights": str(folder / "0")},
        "experts": {f"t{task}": {"weights": str(folder / task)} for task in tasks},
        "merge": {"method": "task_arithmetic", "scaling": 0.3},
        "data": {"defaults": {**counts, "batch_size": 4}, **data},
        "metrics": {"jacobian": False},
        "compute": {"device": device},
    }
    dl.analyze(spec, out=folder / "run", progress="none")
    return _peak()
