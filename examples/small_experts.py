"""Train the experts of two tutorials in a copy of the text demo's folder; about a minute each on one core.

python examples/small_experts.py adapters MODELS      # LoRA adapters of MODELS/base, in MODELS/adapters
python examples/small_experts.py embeddings MODELS    # embedding models and their base, in MODELS/embeddings
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

BATCH = 48
ADAPTERS = {"grammar": 100, "questions": 60, "reviews": 120, "sums": 300}
EMBEDDINGS = {"grammar": 100, "reviews": 120, "sums": 150}
"""Optimizer steps by task."""
PROMPTS = {
    "grammar": "{}:",
    "questions": "{} asks for:",
    "reviews": "{} opinion:",
    "sums": "{} how many?",
}
"""Questions as the base has learned to read them."""


def read_rows(file: Path) -> list[tuple[str, str]]:
    """Return the texts and answers in a file of JSON lines."""
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [(row["input"], row["target"]) for row in rows]


def train(model: Any, steps: int, rate: float) -> Iterator[Any]:
    """Yield an optimizer for each step, whose caller computes gradients; the learning rate falls to zero."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        yield optimizer
        optimizer.step()
        schedule.step()


def train_adapter(models: Path, task: str, steps: int) -> None:
    """Train a LoRA adapter on all linear modules to answer with one word."""
    tokenizer = AutoTokenizer.from_pretrained(models / "base")
    settings = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(models / "base"), settings)
    rows = read_rows(models / "data" / f"{task}-train.jsonl")
    inputs = tokenizer([PROMPTS[task].format(text) for text, _ in rows], padding=True, return_tensors="pt")
    answers = torch.tensor(tokenizer.convert_tokens_to_ids([answer for _, answer in rows]))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for _ in train(model, steps, 2e-3):
        chosen = torch.randperm(len(rows))[:BATCH]
        logits = model(input_ids=ids[chosen], attention_mask=mask[chosen]).logits
        F.cross_entropy(logits[torch.arange(BATCH), mask[chosen].sum(1) - 1], answers[chosen]).backward()
    model.save_pretrained(models / "adapters" / task)


def train_embedding(models: Path, task: str, steps: int) -> None:
    """Train an embedding model to bring texts of one class together (supervised contrastive loss)."""
    base, out = models / "embeddings/base", models / "embeddings" / task
    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModel.from_pretrained(base)
    rows = read_rows(models / "data" / f"{task}-train.jsonl")
    names = sorted({answer for _, answer in rows})
    classes = torch.tensor([names.index(answer) for _, answer in rows])
    for _ in train(model, steps, 1e-3):
        chosen = torch.randperm(len(rows))[:BATCH]
        inputs = tokenizer([rows[at][0] for at in chosen], padding=True, return_tensors="pt")
        tokens, mask = model(**inputs).last_hidden_state, inputs["attention_mask"][..., None]
        embeddings = F.normalize((tokens * mask).sum(1) / mask.sum(1), dim=1)
        similar = (embeddings @ embeddings.T / 0.1).fill_diagonal_(-torch.inf).log_softmax(1)
        same = (classes[chosen][:, None] == classes[chosen]).fill_diagonal_(False)
        (-similar[same].mean()).backward()
    save_embedding(model, tokenizer, out)


def save_embedding(model: Any, tokenizer: Any, out: Path) -> None:
    """Save a model in the layout of sentence-transformers; the embedding is the mean over the tokens."""
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(kinds.items())
    ]
    pooling = {"word_embedding_dimension": model.config.hidden_size, "pooling_mode_mean_tokens": True}
    (out / "1_Pooling").mkdir(exist_ok=True)
    (out / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (out / "1_Pooling/config.json").write_text(json.dumps(pooling), encoding="utf-8")
    (out / "sentence_bert_config.json").write_text('{"max_seq_length": 64}', encoding="utf-8")


def main(kind: str, models: Path) -> None:
    """Train all experts of one kind."""
    if kind == "embeddings":
        base = models / "base"
        save_embedding(
            AutoModel.from_pretrained(base), AutoTokenizer.from_pretrained(base), models / "embeddings/base"
        )
    for task, steps in {"adapters": ADAPTERS, "embeddings": EMBEDDINGS}[kind].items():
        torch.manual_seed(0)
        {"adapters": train_adapter, "embeddings": train_embedding}[kind](models, task, steps)
        print(f"wrote {models / kind / task}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
