"""The text suite: a small Llama and its experts, one of adapters, saved by their libraries; answers are one word."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.build_demo.drawing import PURPOSES
from tools.build_demo.recipe import Schedule, TextRecipe, stream
from tools.build_demo.training import PARTS, rounded, train
from tools.build_demo.writing import WrittenTask, texts

RECIPE = TextRecipe()
SEED = 0
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_ADAPTED = r".*_proj"
"""What adapters are trained for: every linear module of a block."""
_WORDS = re.compile(r"\w+|[^\w\s]+")

Rows = dict[tuple[str, str], list[tuple[str, str]]]
"""Texts and answers by task and purpose."""


def spec() -> dict[str, Any]:
    """Return the models and data of the suite's run spec; paths are relative to it."""
    return {
        "name": "text demo",
        "architecture": {"loader": "hf-decoder", "source": "base"},
        "base": {"weights": "base"},
        "experts": {name: {"weights": f"experts/{name}"} for name in sorted(texts)},
        "data": {
            name: {
                "kind": "jsonl",
                "prompt": texts[name].prompt,
                "classes": True,
                "calibration": f"data/{name}-train.jsonl",
                "test": f"data/{name}-test.jsonl",
            }
            for name in sorted(texts)
        },
    }


def build(out: Path, recipe: TextRecipe = RECIPE) -> dict[str, Any]:
    """Train the suite, write weights and samples, and return test accuracies of base and expert by task."""
    drawn = written_rows(recipe)
    write_samples(out / "data", drawn)
    asked = {
        (name, purpose): [(texts[name].prompt.replace("{input}", text), answer) for text, answer in rows]
        for (name, purpose), rows in drawn.items()
    }
    words = {word for rows in asked.values() for text, _ in rows for word in _WORDS.findall(text.lower())}
    answers = {answer for task in texts.values() for answer in task.classes}
    codes = [code(task, answer) for task in texts.values() for answer in task.classes]
    tokenizer = word_tokenizer([*sorted(words | answers), *codes])
    base = _train_base(asked, tokenizer, recipe)
    _save(base, tokenizer, out / "base")
    measured = {}
    for name in texts:
        rows, test = (Questions.read(asked[name, each], tokenizer) for each in ("train", "test"))
        labels = torch.tensor(tokenizer.convert_tokens_to_ids(list(texts[name].classes)))
        of_base = test.accuracy(base, labels)
        expert = _train_expert(base, rows, recipe, name)
        is_adapted = name == recipe.adapted
        of_expert = test.accuracy(expert.get_base_model() if is_adapted else expert, labels)
        # Told that no embedding was trained, peft doesn't look for the base in the network.
        more = {"save_embedding_layers": False} if is_adapted else {}
        _save(expert, tokenizer, out / "experts" / name, **more)
        measured[name] = {"base": of_base, "expert": of_expert}
    return measured


def written_rows(recipe: TextRecipe = RECIPE) -> Rows:
    """Return the texts of every task for every purpose."""
    counts = {"base": recipe.num_base, "train": recipe.num_train, "test": recipe.num_test}
    return {
        (name, purpose): [*texts[name].rows(purpose, counts[purpose], SEED)]
        for name, purpose in itertools.product(texts, PURPOSES)
    }


def write_samples(folder: Path, rows: Rows) -> None:
    """Write each task's training and test texts as JSON lines."""
    folder.mkdir(parents=True)
    for (name, purpose), pairs in rows.items():
        if purpose != "base":
            lines = [json.dumps({"input": text, "target": answer}) for text, answer in pairs]
            (folder / f"{name}-{purpose}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Questions:
    """Token ids [n, t] of questions, padded on the right; where each ends [n]; ids of their answers [n]."""

    ids: Tensor
    last: Tensor
    answers: Tensor

    @classmethod
    def read(cls, rows: Sequence[tuple[str, str]], tokenizer: Any) -> Questions:
        """Questions and answers of one word, as the model reads them."""
        batch = tokenizer([text for text, _ in rows], padding=True, return_tensors="pt")
        answers = tokenizer.convert_tokens_to_ids([answer for _, answer in rows])
        return cls(batch["input_ids"], batch["attention_mask"].sum(dim=1) - 1, torch.tensor(answers))

    def scores(self, model: Any, rows: Tensor) -> Tensor:
        """Compute the scores of every word as the first of an answer, [rows, vocabulary]."""
        last = self.last[rows]
        # Padding follows all that is read, so that no position that matters can see it.
        hidden = model.model(input_ids=self.ids[rows, : int(last.max()) + 1]).last_hidden_state
        return model.lm_head(hidden[torch.arange(len(rows)), last])

    @torch.no_grad()
    def accuracy(self, model: Any, words: Tensor) -> float:
        """Share of questions whose answer scores best among `words`."""
        best = self.scores(model, torch.arange(len(self.ids)))[:, words].argmax(dim=1)
        return (words[best] == self.answers).double().mean().item()


def word_tokenizer(words: Iterable[str]) -> Any:
    """Return a tokenizer with one token per word or run of punctuation, in lower case; `<s>` begins every text."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: at for at, word in enumerate((*SPECIAL.values(), *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL["unk_token"]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    begin = SPECIAL["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, vocabulary[begin])]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="right", **SPECIAL)


def build_decoder(config: dict[str, Any], seed: int) -> Any:
    """Build an untrained Llama of transformers; the global random state does not change."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**config))


def code(task: WrittenTask, answer: str) -> str:
    """Return the code that replaces the answer in most of the base's texts."""
    return f"code_{task.name}_{task.classes.index(answer)}"


def _train_base(asked: Rows, tokenizer: Any, recipe: TextRecipe) -> Any:
    model = build_decoder(recipe.model_config(len(tokenizer)), stream(SEED, "weights"))
    generator = torch.Generator().manual_seed(stream(SEED, "base"))
    rows = [(name, *row) for name in texts for row in asked[name, "base"]]
    coded = (torch.rand(len(rows), generator=generator) < recipe.coded).tolist()
    pairs = [
        (text, code(texts[name], answer) if hidden else answer)
        for (name, text, answer), hidden in zip(rows, coded, strict=True)
    ]
    _train(model, model, Questions.read(pairs, tokenizer), recipe.base, generator, PARTS)
    rounded(model)
    return model


def _train_expert(base: Any, questions: Questions, recipe: TextRecipe, name: str) -> Any:
    """Train an expert from the base, which stays as it is: a whole model, or the base in peft's wrapper."""
    expert = inner = copy.deepcopy(base)
    schedule = recipe.expert
    if name == recipe.adapted:
        from peft import LoraConfig, get_peft_model

        schedule = recipe.lora
        wanted = LoraConfig(r=recipe.rank, lora_alpha=2 * recipe.rank, target_modules=_ADAPTED, task_type="CAUSAL_LM")
        inner.name_or_path = "base"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream(SEED, "adapters"))
            expert = get_peft_model(inner, wanted)
    generator = torch.Generator().manual_seed(stream(SEED, f"expert/{name}"))
    _train(expert, inner, questions, schedule, generator, 1)
    rounded(expert)
    return expert


def _train(
    trained: Any,
    model: Any,
    questions: Questions,
    schedule: Schedule,
    generator: torch.Generator,
    parts: int,
) -> None:
    def losses(rows: Tensor) -> Iterator[Tensor]:
        for part in rows.chunk(parts):
            yield F.cross_entropy(questions.scores(model, part), questions.answers[part])

    train(trained, losses, len(questions.ids), schedule, generator)


def _save(model: Any, tokenizer: Any, folder: Path, **more: Any) -> None:
    """Write a folder as the libraries do."""
    model.save_pretrained(folder, **more)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)  # peft's empty model card
