"""Trains the bundled model, a small transformer with the Qwen3 architecture, from random weights on a CPU.

The recipe is a list of stages with growing sequence length. The first stages have short pages with many facts and
questions, on which induction heads form quickly. Then the distances grow until recall works beyond 600 tokens. Muon
trains the weight matrices, and AdamW trains everything else. The learning rate warms up, stays constant, and decays
linearly to zero. The last stage, with more sums, restarts at a third of the rate and decays too.

`--draft` trains the draft model for speculative decoding, a smaller model with the same tokenizer. It learns the
trained model's distribution for each token in the corpus, because a draft must equal the model's own token.

A step's data is a function of (seed, step). A checkpoint therefore contains only the weights, the optimiser states and
the next step's number. It is written every few minutes. If the command is run again, it continues from the checkpoint.
The same seed reaches the same accuracies; results differ bitwise only where the machine's arithmetic does.

    python -m tools.demo_model.train          train shared/demo_model
    python -m tools.demo_model.train --draft  train shared/demo_draft from it
"""

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from tools.demo_model.corpus import DENSE, FINISH, LONG, MIDDLE, Document, Mix, sequences
from tools.demo_model.evaluate import CHECKPOINT, QUALITY_FILE, Item, held_out_arithmetic, held_out_recall
from tools.demo_model.muon import Muon
from tools.demo_model.tokenizer import MAX_LENGTH, save_tokenizer, train_tokenizer

DRAFT_CHECKPOINT = Path("shared/demo_draft")
CHECKPOINT_SECONDS = 240.0
REPORT_STEPS = 50
PROBE_STEPS = 250


@dataclass(frozen=True, slots=True)
class Stage:
    """`steps` optimiser steps on batches of `count` sequences with `tokens` tokens each."""

    steps: int
    count: int
    tokens: int
    mix: Mix


@dataclass(frozen=True, slots=True)
class Shape:
    """Model sizes: heads have 32 dimensions, and there are half as many KV heads as query heads."""

    layers: int
    hidden: int
    intermediate: int
    heads: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything except the seed that determines the trained model."""

    shape: Shape
    stages: tuple[Stage, ...]
    finish: Stage | None = None
    finish_rate: float = 0.35
    matrix_rate: float = 0.02
    other_rate: float = 0.005
    warm_up: int = 100
    decay_share: float = 0.4

    @property
    def all_stages(self) -> tuple[Stage, ...]:
        """The stages and the finish."""
        return self.stages if self.finish is None else (*self.stages, self.finish)

    @property
    def steps(self) -> int:
        """Number of optimiser steps of all stages."""
        return sum(stage.steps for stage in self.all_stages)

    @property
    def tokens(self) -> int:
        """Number of training tokens of all stages."""
        return sum(stage.steps * stage.count * stage.tokens for stage in self.all_stages)

    def stage_at(self, step: int) -> Stage:
        for stage in self.all_stages:
            if step < stage.steps:
                return stage
            step -= stage.steps
        return self.all_stages[-1]

    def rate_at(self, step: int) -> float:
        """Return the learning rate at `step`, as a fraction of its peak."""
        first = sum(stage.steps for stage in self.stages)
        if step >= first:
            return self.finish_rate * (self.steps - step) / (self.steps - first)
        return min(1.0, (step + 1) / self.warm_up, (first - step) / (self.decay_share * first))


RECIPE = Recipe(
    Shape(layers=4, hidden=128, intermediate=384, heads=4),
    stages=(
        Stage(steps=500, count=16, tokens=256, mix=DENSE),
        Stage(steps=800, count=8, tokens=256, mix=DENSE),
        Stage(steps=850, count=8, tokens=512, mix=MIDDLE),
        Stage(steps=750, count=4, tokens=1024, mix=LONG),
    ),
    finish=Stage(steps=600, count=8, tokens=512, mix=FINISH),
)
DRAFT_RECIPE = Recipe(
    Shape(layers=1, hidden=64, intermediate=192, heads=2),
    stages=(
        Stage(steps=500, count=16, tokens=256, mix=DENSE),
        Stage(steps=300, count=8, tokens=512, mix=MIDDLE),
    ),
)


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids `ids` [count, tokens + 1] int64, and the loss weight of each target `weights` [count, tokens] fp32."""

    ids: torch.Tensor
    weights: torch.Tensor


def new_model(shape: Shape, tokenizer: Any, seed: int) -> Qwen3ForCausalLM:
    """Return an untrained model."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads // 2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def batch_at(recipe: Recipe, seed: int, step: int, tokenizer: Tokenizer) -> Batch:
    """Return the training batch for `step`: documents packed end to end, truncated to the stage's length."""
    stage = recipe.stage_at(step)
    rows = sequences(seed, step, stage.count, stage.tokens, stage.mix)
    packed = [_packed(row, stage.tokens + 1, tokenizer) for row in rows]
    ids = torch.from_numpy(np.stack([ids for ids, _ in packed]))
    weights = torch.from_numpy(np.stack([weights[1:] for _, weights in packed]))
    return Batch(ids, weights)


def _packed(documents: list[Document], length: int, tokenizer: Tokenizer) -> tuple[Any, Any]:
    encodings = tokenizer.encode_batch([document.text for document in documents], add_special_tokens=False)
    ids = np.full(length, 0, dtype=np.int64)
    weights = np.zeros(length, dtype=np.float32)
    all_ids = np.concatenate([np.array(encoding.ids) for encoding in encodings])[:length]
    all_weights = np.concatenate(
        [_token_weights(document, encoding) for document, encoding in zip(documents, encodings, strict=True)]
    )[:length]
    ids[: len(all_ids)] = all_ids
    weights[: len(all_ids)] = all_weights
    return ids, weights


def _token_weights(document: Document, encoding: Any) -> Any:
    """Return each token's weight, which is the weight of the span that contains its last character."""
    characters = np.repeat(
        np.array([span.weight for span in document.spans], dtype=np.float32),
        [len(span.text) for span in document.spans],
    )
    return characters[np.array(encoding.offsets)[:, 1] - 1]


class Trainer:
    """A model, its optimisers and the next step's number: the content of a checkpoint.

    Each thread computes the gradients for its own part of a batch, and the threads synchronise once per step. On a
    machine with other load, this loses far less time than threads that synchronise in every operation.
    """

    def __init__(
        self, recipe: Recipe, seed: int, tokenizer: Any, threads: int, teacher: Qwen3ForCausalLM | None = None
    ) -> None:
        self.recipe = recipe
        self.seed = seed
        self.tokenizer = tokenizer
        self.encoder: Tokenizer = tokenizer.backend_tokenizer
        self.threads = threads
        self.pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        self.teacher = teacher
        self.model = new_model(recipe.shape, tokenizer, seed)
        self.parameters = list(self.model.parameters())
        matrices = [p for name, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in self.model.named_parameters() if p.ndim != 2 or "embed" in name]
        self.optimisers: tuple[tuple[torch.optim.Optimizer, float], ...] = (
            (Muon(matrices, lr=recipe.matrix_rate), recipe.matrix_rate),
            (
                torch.optim.AdamW(others, lr=recipe.other_rate, betas=(0.9, 0.98), weight_decay=0.0),
                recipe.other_rate,
            ),
        )
        self.step = 0
        self.seconds = 0.0

    def save(self, path: Path) -> None:
        """Write the checkpoint."""
        state = {
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser, _ in self.optimisers],
            "step": self.step,
            "seconds": self.seconds,
            "seed": self.seed,
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Read the checkpoint."""
        state = torch.load(path, weights_only=True)
        if state["seed"] != self.seed:
            raise SystemExit(f"{path} was trained with seed {state['seed']}, not {self.seed}")
        self.model.load_state_dict(state["model"])
        for (optimiser, _), saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.step, self.seconds = state["step"], state["seconds"]

    def train_step(self) -> float:
        """Take one optimiser step; return the weighted loss of its batch."""
        began = time.monotonic()
        batch = batch_at(self.recipe, self.seed, self.step, self.encoder)
        shares = batch.ids.chunk(self.threads), batch.weights.chunk(self.threads)
        results = list(self.pool.map(self._gradients, *shares, repeat(batch.weights.sum())))
        for parameter, *gradients in zip(self.parameters, *(gradients for _, gradients in results), strict=True):
            parameter.grad = torch.stack(gradients).sum(0)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimiser, peak in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = peak * self.recipe.rate_at(self.step)
            optimiser.step()
            optimiser.zero_grad()
        self.step += 1
        self.seconds += time.monotonic() - began
        return sum(loss for loss, _ in results)

    def _gradients(
        self, ids: torch.Tensor, weights: torch.Tensor, total: torch.Tensor
    ) -> tuple[float, tuple[torch.Tensor, ...]]:
        """Return this part's loss and its gradients for `ids`; the parameters' own gradients stay unchanged."""
        logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), self._targets(ids), reduction="none")
        loss = losses @ weights.flatten() / total
        return loss.item(), torch.autograd.grad(loss, self.parameters)

    def _targets(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the next tokens, or the teacher's distributions of them."""
        if self.teacher is None:
            return ids[:, 1:].flatten()
        with torch.no_grad():
            logits: torch.Tensor = self.teacher(input_ids=ids[:, :-1], use_cache=False).logits
        return logits.flatten(0, 1).softmax(-1)

    def probe(self, items: list[Item]) -> float:
        """Return the share of items with every expected token as the greedy choice, with one forward per item."""
        right = 0
        with torch.inference_mode():
            for item in items:
                prompt = self.encoder.encode(item.prompt).ids
                expected = self.encoder.encode(" " + item.expected, add_special_tokens=False).ids
                logits = self.model(input_ids=torch.tensor([prompt + expected])).logits[0]
                right += logits[len(prompt) - 1 : -1].argmax(-1).tolist() == expected
        return right / len(items)


def load_or_train_tokenizer(folder: Path, seed: int) -> Any:
    """Return the tokenizer of this run, which the first start makes."""
    if not (folder / "tokenizer.json").exists():
        save_tokenizer(train_tokenizer(seed), folder)
    return AutoTokenizer.from_pretrained(folder)


def export(trainer: Trainer, output: Path) -> None:
    """Write the checkpoint folder in the layout of the hub, with the results of the training in quality.json."""
    trainer.model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=trainer.tokenizer.bos_token_id,
        eos_token_id=trainer.tokenizer.eos_token_id,
        pad_token_id=trainer.tokenizer.pad_token_id,
    )
    trainer.model.save_pretrained(output)
    save_tokenizer(trainer.tokenizer, output)
    facts = {
        "training_seed": trainer.seed,
        "training_steps": trainer.step,
        "training_tokens": trainer.recipe.tokens,
        "training_seconds": round(trainer.seconds),
        "parameters": trainer.model.num_parameters(),
    }
    (output / QUALITY_FILE).write_text(json.dumps(facts, indent=2) + "\n")


def train(trainer: Trainer, checkpoint: Path) -> None:
    """Run the recipe to its end, with reports and checkpoints."""
    sums = held_out_arithmetic(100, seed=0)
    recall = held_out_recall(50, seed=0, tokenizer=trainer.encoder)
    saved = time.monotonic()
    while trainer.step < trainer.recipe.steps:
        loss = trainer.train_step()
        if trainer.step % REPORT_STEPS == 0:
            print(f"step {trainer.step} loss {loss:.4f} {trainer.seconds:.0f} s", flush=True)
        if trainer.step % PROBE_STEPS == 0:
            print(
                f"  held out: arithmetic {trainer.probe(sums):.2f} recall {trainer.probe(recall):.2f}",
                flush=True,
            )
        if time.monotonic() - saved > CHECKPOINT_SECONDS:
            trainer.save(checkpoint)
            saved = time.monotonic()
    trainer.save(checkpoint)


def main() -> None:
    """Train the bundled model or its draft model."""
    parser = argparse.ArgumentParser(description="Train the bundled model, or continue where the last run stopped.")
    parser.add_argument("--work", type=Path, default=Path("build/demo_model"), help="folder of the run's checkpoints")
    parser.add_argument("--output", type=Path, default=CHECKPOINT, help="folder of the trained model")
    parser.add_argument("--draft", action="store_true", help=f"train its draft model instead, into {DRAFT_CHECKPOINT}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.draft:
        recipe, checkpoint, output = DRAFT_RECIPE, arguments.work / "draft.pt", DRAFT_CHECKPOINT
        tokenizer = AutoTokenizer.from_pretrained(arguments.output)
        teacher: Any = Qwen3ForCausalLM.from_pretrained(arguments.output, dtype="float32")
    else:
        recipe, checkpoint, output = RECIPE, arguments.work / "train.pt", arguments.output
        tokenizer = load_or_train_tokenizer(arguments.work / "tokenizer", arguments.seed)
        teacher = None
    trainer = Trainer(recipe, arguments.seed, tokenizer, arguments.threads, teacher)
    if checkpoint.exists():
        trainer.load(checkpoint)
        print(f"continuing at step {trainer.step} of {recipe.steps}", flush=True)
    train(trainer, checkpoint)
    export(trainer, output)


if __name__ == "__main__":
    main()
