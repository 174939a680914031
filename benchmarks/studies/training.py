"""Train experts of embedding models and of decoders: short, on real texts, with a stated seed."""

from __future__ import annotations

import itertools
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.studies.packages import Rows, require_installed

MAX_TOKENS = 48
PAIRS, HEAT, FULL_RATE = 16, 0.1, 5e-5
TEXTS_PER_STEP, LORA_RATE, RANK = 8, 1e-3, 16


Batches = Callable[[Rows, np.random.Generator], Iterator[Rows]]


def pairs_of_classes(rows: Rows, draw: np.random.Generator) -> Iterator[Rows]:
    """Yield batches of 16 pairs, each of one class, so that every text has another of its class."""
    by_class: dict[str, list[str]] = {}
    for row in rows:
        by_class.setdefault(row["target"], []).append(row["text"])
    classes = [name for name, texts in by_class.items() if len(texts) > 1]
    while True:
        yield [
            {"text": str(text), "target": str(name)}
            for name in draw.choice(classes, PAIRS)
            for text in draw.choice(by_class[name], 2, replace=False)
        ]


def train_embedding(
    base: pathlib.Path,
    out: pathlib.Path,
    rows: Rows,
    steps: int,
    seed: int,
    batches: Batches = pairs_of_classes,
) -> None:
    """Fine-tune all weights by a supervised contrastive loss (arXiv:2004.11362, Eq. 2): one class, one place.

    Args:
        base: a folder of sentence-transformers that pools by the mean.
        out: the expert's folder.
        rows: texts and classes.
        steps: optimizer steps of one batch.
        seed: of the draws.
        batches: yields batches of rows.
    """
    from transformers import AutoModel, AutoTokenizer

    torch.manual_seed(seed)
    model: Any = AutoModel.from_pretrained(base, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(base)
    optimizer, draw = torch.optim.AdamW(model.parameters(), lr=FULL_RATE), np.random.default_rng(seed)
    model.train()
    for chosen in itertools.islice(batches(rows, draw), steps):
        texts = [row["text"] for row in chosen]
        inputs = tokenizer(texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        tokens, mask = model(**inputs).last_hidden_state, inputs["attention_mask"][..., None]
        embedding = F.normalize((tokens * mask).sum(1) / mask.sum(1), dim=1)
        logits = (embedding @ embedding.T / HEAT).fill_diagonal_(-torch.inf)
        labels = np.array([row["target"] for row in chosen])
        is_same = torch.tensor(labels[:, None] == labels) & ~torch.eye(len(labels), dtype=torch.bool)
        shares = logits.log_softmax(dim=1).masked_fill(~is_same, 0).sum(1) / is_same.sum(1).clamp_min(1)
        loss = -shares[is_same.any(1)].mean()  # a text without another of its class says nothing
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    shutil.copytree(base, out)
    model.eval().save_pretrained(out)


def train_adapter(base: pathlib.Path, out: pathlib.Path, rows: Rows, steps: int, seed: int) -> None:
    """Train a LoRA adapter on all linear modules of a decoder to answer; the loss reads the answers' tokens only.

    Args:
        base: a decoder's folder.
        out: the adapter's folder.
        rows: texts and answers.
        steps: optimizer steps of 8 texts.
        seed: of the adapter and of the draws.
    """
    require_installed("peft")
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    plain: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = get_peft_model(plain, config)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=LORA_RATE)
    draw = np.random.default_rng(seed)
    for step in range(steps):
        chosen = [rows[at] for at in draw.choice(len(rows), TEXTS_PER_STEP, replace=False)]
        ids, mask, is_answer = _answered(tokenizer, chosen)
        features = plain.get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        # Only these positions go through the head: a vocabulary of 262,144 is most of the work otherwise.
        scores = plain.get_output_embeddings()(features[:, :-1][is_answer[:, 1:]])
        loss = F.cross_entropy(scores, ids[:, 1:][is_answer[:, 1:]])
        for group in optimizer.param_groups:
            group["lr"] = LORA_RATE * (1 - step / steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(out)


def _answered(tokenizer: Any, rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids, mask and the places of the answers, [texts, tokens] each."""
    pairs = []
    for row in rows:
        question = tokenizer(row["text"]).input_ids
        answer = [*tokenizer(f" {row['target']}", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        pairs.append((question + answer, len(answer)))
    length = max(len(tokens) for tokens, _ in pairs)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask, is_answer = torch.zeros_like(ids), torch.zeros(len(rows), length, dtype=torch.bool)
    for at, (tokens, answered) in enumerate(pairs):
        ids[at, : len(tokens)], mask[at, : len(tokens)] = torch.tensor(tokens), 1
        is_answer[at, len(tokens) - answered : len(tokens)] = True
    return ids, mask, is_answer
