"""A small mixture of experts, trained on the embedded texts, merged and repaired with routers off, before and after.

`python -m benchmarks.routers [--seeds 2] [--folder DIR]`; models lie in DIR afterwards and are taken from there.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import pathlib
import re
import tempfile
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import driftlens as dl
from driftlens.suites.drawing import PURPOSES, Purpose
from driftlens.suites.recipe import Schedule, TextRecipe
from driftlens.suites.text import Questions, TextSuite, code, word_tokenizer
from driftlens.suites.training import train
from driftlens.suites.writing import texts

BASE, EXPERT = Schedule(400, 64, 4e-3, 0.0125), Schedule(200, 64, 2e-3, 4e-3)
EXPERTS, CHOSEN, WIDTH, INNER, LAYERS = 8, 2, 96, 64, 4
METHODS: dict[str, dict[str, Any]] = {
    "FeatCal": {"method": "featcal", "preset": "llama-3b"},
    "residual": {"method": "residual"},
}


def main() -> None:
    """Print a table of means over tasks and seeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--folder", type=pathlib.Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or pathlib.Path(scratch)
        print(table([measured(folder / f"seed-{seed}", seed) for seed in range(arguments.seeds)]))


def measured(folder: pathlib.Path, seed: int) -> dict[str, dict[str, float]]:
    """By variant: accuracy, final relative drift and share of rerouted tokens on samples that no calibration reads."""
    if not (folder / "spec.json").is_file():
        trained(folder, seed)
    spec = json.loads((folder / "spec.json").read_text())
    with tempfile.TemporaryDirectory() as scratch:
        run = dl.analyze(spec, out=pathlib.Path(scratch) / "run", progress="none")
        seconds = {}
        for title, of in METHODS.items():
            for routers in ("off", "before", "after"):
                started = time.process_time()
                settings = {"routers": routers}
                dl.calibrate(
                    run.path, name=f"{title}-{routers}", attribution=False, parameters=settings, **of
                )
                seconds[f"calibrated:{title}-{routers}"] = time.process_time() - started
        run = dl.open_run(run.path)
        found = {}
        layers, scores = run.layers(), run.accuracy()
        for variant in scores["variant"].unique():
            rows, of = layers[layers["variant"] == variant], scores[scores["variant"] == variant]
            final = rows[rows["layer"] == rows["layer"].max()]
            of_routers = run.calibration(variant.partition(":")[2]) if variant in seconds else None
            found[variant] = {
                "accuracy": of[of["metric"] == "accuracy"]["value"].mean(),
                "drift": final["drift_rel"].mean() if len(rows) else 0.0,
                "rerouted": rows["rerouted"].mean() if len(rows) else 0.0,
                "seconds": seconds.get(variant, float("nan")),
            }
            if of_routers is not None:
                found[variant] |= of_routers[["routes_before", "routes_after"]].mean().to_dict()
    return found


def table(seeds: list[dict[str, dict[str, float]]]) -> str:
    """Means over seeds, with the standard deviation between them where there are several."""
    columns = {
        "accuracy": ".3f",
        "drift": ".4f",
        "rerouted": ".4f",
        "routes_before": ".3f",
        "routes_after": ".3f",
        "seconds": ".1f",
    }
    lines = [f"| model | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for variant in seeds[0]:
        cells = []
        for column, form in columns.items():
            values = [of[variant].get(column, float("nan")) for of in seeds]
            spread = f" ± {np.std(values, ddof=1):{form}}" if len(values) > 1 else ""
            cells.append("–" if np.isnan(values).any() else f"{np.mean(values):{form}}{spread}")
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return "\n".join(lines)


def trained(folder: pathlib.Path, seed: int) -> None:
    """Base and experts as their library saves them, and a spec of them."""
    drawn = _drawn(folder, seed)
    raw = " ".join(text for rows in drawn.values() for text, _ in rows).lower()
    answers = {answer for task in texts.values() for answer in task.classes}
    codes = [code(task, answer) for task in texts.values() for answer in task.classes]
    tokenizer = word_tokenizer([*sorted({*re.findall(r"\w+|[^\w\s]+", raw), *answers}), *codes])
    base, generator = _untrained(len(tokenizer), seed), torch.Generator().manual_seed(seed)
    asked = [
        (
            text,
            code(texts[name], answer) if torch.rand((), generator=generator) < TextRecipe.coded else answer,
        )
        for name in texts
        for text, answer in drawn[name, "base"]
    ]
    _fit(base, Questions.read(asked, tokenizer), BASE, generator)
    _save(base, tokenizer, folder / "base")
    for name in texts:
        expert = copy.deepcopy(base)
        _fit(expert, Questions.read(drawn[name, "train"], tokenizer), EXPERT, generator)
        _save(expert, tokenizer, folder / "experts" / name)
    spec = {
        "version": 1,
        "architecture": {"loader": "hf-decoder", "source": str(folder / "base")},
        "base": {"weights": str(folder / "base")},
        "merge": {"method": "task_arithmetic", "scaling": 0.3},
        "experts": {name: {"weights": str(folder / "experts" / name)} for name in texts},
        "data": {
            "defaults": {"n": 64, "n_diagnosis": 128, "n_test": "all"},
            **{name: TextSuite.data(folder, name) for name in texts},
        },
        "metrics": {"jacobian": False},
    }
    (folder / "spec.json").write_text(json.dumps(spec))


def _drawn(folder: pathlib.Path, seed: int) -> dict[tuple[str, Purpose], list[tuple[str, str]]]:
    """Texts as they are asked, with answers; those that are kept lie in files, too."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    drawn = {}
    for name, purpose in itertools.product(texts, PURPOSES):
        rows = list(texts[name].rows(purpose, 400 if purpose == "test" else 1500, seed))
        lines = (json.dumps({"input": text, "target": answer}) for text, answer in rows)
        (folder / "data" / f"{name}-{purpose}.jsonl").write_text("\n".join(lines))
        drawn[name, purpose] = [
            (texts[name].prompt.replace("{input}", text), answer) for text, answer in rows
        ]
    return drawn


def _untrained(vocabulary: int, seed: int) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": WIDTH, "moe_intermediate_size": INNER, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": WIDTH // 4}
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "norm_topk_prob": True}
    words = {"vocab_size": vocabulary, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **sizes, **heads, **experts, **words, max_position_embeddings=64, tie_word_embeddings=True
        )
    )
    model.set_experts_implementation("eager")
    return model


def _fit(model: Any, questions: Questions, schedule: Schedule, generator: torch.Generator) -> None:
    """Train the first words of answers."""

    def loss(rows: Tensor) -> Tensor:
        return F.cross_entropy(questions.scores(model, rows), questions.answers[rows])

    train(model, loss, len(questions.ids), schedule, generator, lambda step, reached: None)


def _save(model: Any, tokenizer: Any, folder: pathlib.Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
