"""Four LoRA experts of a small pretrained language model, merged and repaired.

`python -m benchmarks.language_experts TEXTS --model FOLDER --folder KEPT`: TEXTS contains a folder per task with
`train.jsonl` and `test.jsonl` of `input` and `target`. FOLDER is a decoder saved by transformers, or a `.gguf` file,
which transformers dequantizes. Adapters and the run are stored in KEPT and reused.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import resource
import time
from typing import Any

import numpy as np
import torch

import driftlens as dl
from benchmarks.embeddings import record_variants
from benchmarks.figures import record

TASKS = ("equation", "pos", "subj", "trec")
PROMPT = "{input}\nanswer:"
STEPS, BATCH, RATE, RANK = 80, 8, 1e-3, 16
REPAIRS = ("featcal", "residual")


def main() -> None:
    """Train what is not there yet, merge, repair and print a line each variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=pathlib.Path)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--merge", default="average")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tests", type=int, default=200)
    arguments = parser.parse_args()
    base = arguments.model
    if base.suffix == ".gguf":
        base = _unpacked(base, arguments.folder / "base")
    for seed, task in enumerate(TASKS):
        out = arguments.folder / task
        if not out.is_dir():
            seconds = _train(base, out, arguments.texts / task / "train.jsonl", arguments.steps, seed)
            print(f"{task}: trained in {seconds:.0f} s of processor time", flush=True)
    _measure(base, arguments)


def _unpacked(file: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    """A quantised file's weights in bfloat16, as a folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not out.is_dir():
        model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="bfloat16")
        # They are plain numbers now, which the library would not believe.
        model.hf_quantizer = None
        del model.config.quantization_config
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)
        model.save_pretrained(out)
    return out


def _train(base: pathlib.Path, out: pathlib.Path, file: pathlib.Path, steps: int, seed: int) -> float:
    """An adapter on all linear modules that learns the tokens of the answers; returns seconds of processor time."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    started = time.process_time()
    tokenizer = AutoTokenizer.from_pretrained(base)
    plain: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = get_peft_model(plain, config)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=RATE)
    rows = [_tokens(tokenizer, json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
    draw = np.random.default_rng(seed)
    for step in range(steps):
        chosen = [rows[at] for at in draw.choice(len(rows), BATCH, replace=False)]
        length = max(len(ids) for ids, _ in chosen)
        ids = torch.zeros(BATCH, length, dtype=torch.long)
        mask, is_learned = torch.zeros_like(ids), torch.zeros(BATCH, length, dtype=torch.bool)
        for at, (tokens, answer) in enumerate(chosen):
            ids[at, : len(tokens)], mask[at, : len(tokens)] = torch.tensor(tokens), 1
            is_learned[at, len(tokens) - answer : len(tokens)] = True
        features = plain.get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        # Only these positions go through the head: a vocabulary of 262,144 is most of the work otherwise.
        scores = plain.get_output_embeddings()(features[:, :-1][is_learned[:, 1:]])
        loss = torch.nn.functional.cross_entropy(scores, ids[:, 1:][is_learned[:, 1:]])
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 - step / steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(out)
    return time.process_time() - started


def _tokens(tokenizer: Any, row: dict[str, str]) -> tuple[list[int], int]:
    """The tokens of question and answer, and how many of them are the answer's."""
    asked = tokenizer(PROMPT.format(input=row["input"])).input_ids
    answer = [*tokenizer(f" {row['target']}", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    return asked + answer, len(answer)


def _measure(base: pathlib.Path, arguments: argparse.Namespace) -> None:
    """Record exact match and drift of every variant on every task, and the cost."""
    files = {task: arguments.texts / task for task in TASKS}
    data = {
        task: {
            "kind": "jsonl",
            "prompt": PROMPT,
            "metric": "exact_match",
            "calibration": str(file / "train.jsonl"),
            "test": str(file / "test.jsonl"),
        }
        for task, file in files.items()
    }
    counts = {"n": arguments.samples, "n_diagnosis": 64, "n_test": arguments.tests}
    spec = {
        "version": 1,
        "architecture": {"loader": "hf-decoder", "source": str(base)},
        "base": {"weights": str(base)},
        "merge": {"method": arguments.merge},
        "experts": {task: {"weights": str(arguments.folder / task)} for task in TASKS},
        "data": {"defaults": {**counts, "batch_size": 32}, **data},
        "metrics": {"jacobian": False, "contributions": False, "prefix": False},
    }
    clocks = [time.process_time()]
    run = dl.analyze(spec, out=arguments.folder / "run", progress="none", resume=True)
    clocks.append(time.process_time())
    for name in REPAIRS:
        run = dl.calibrate(run, name=name, method=name, resume=True, progress="none")
        clocks.append(time.process_time())
    spent = [f"{(end - begin) / 60:.1f} min" for begin, end in itertools.pairwise(clocks)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    variants = ("base", "expert", "merged", *(f"calibrated:{name}" for name in REPAIRS))
    case = f"{base.name}, four LoRA experts"
    record_variants("language_experts", case, run, TASKS, variants, "exact_match")
    record("language_experts", f"{case}: CPU time of analysis; FeatCal; residual calibration", "; ".join(spent))
    record("language_experts", f"{case}: peak memory", f"{peak:.0f} MiB")


if __name__ == "__main__":
    main()
