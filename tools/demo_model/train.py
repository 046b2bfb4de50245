"""Training of the embedded model: a small transformer of the Qwen3 architecture, from random weights, on a CPU.

The recipe is a list of stages with growing sequence length. The first stages have short pages with many facts and
questions, on which induction heads form quickly. Then the distances grow until recall works beyond 600 tokens. Muon
trains the weight matrices, and AdamW everything else. The learning rate warms up, stays, and decays linearly to zero.

The data of a step is a function of (seed, step). So a checkpoint contains only the weights, the optimiser states and
the number of the next step. It is written every few minutes. The same command run again continues from it. The same
seed reaches the same accuracies; bits differ only where the machine's arithmetic does.

    python -m tools.demo_model.train --work build/demo_model --output shared/demo_model
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

from tools.demo_model.corpus import DENSE, LONG, MIDDLE, Document, Mix, sequences
from tools.demo_model.evaluate import QUALITY_FILE, Item, held_out_arithmetic, held_out_recall
from tools.demo_model.muon import Muon
from tools.demo_model.tokenizer import MAX_LENGTH, save_tokenizer, train_tokenizer

CHECKPOINT_SECONDS = 240.0
REPORT_STEPS = 50
PROBE_STEPS = 250


@dataclass(frozen=True, slots=True)
class Stage:
    """`steps` optimiser steps on batches of `count` sequences of `tokens` tokens."""

    steps: int
    count: int
    tokens: int
    mix: Mix


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything except the seed that determines the trained model."""

    stages: tuple[Stage, ...]
    matrix_rate: float = 0.02
    other_rate: float = 0.005
    warm_up: int = 100
    decay_share: float = 0.4

    @property
    def steps(self) -> int:
        """Number of optimiser steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    @property
    def tokens(self) -> int:
        """Number of training tokens of all stages."""
        return sum(stage.steps * stage.count * stage.tokens for stage in self.stages)

    def stage_at(self, step: int) -> Stage:
        """Return the stage of a step."""
        for stage in self.stages:
            if step < stage.steps:
                return stage
            step -= stage.steps
        return self.stages[-1]

    def rate_at(self, step: int) -> float:
        """Return the learning rate of `step` as a share of its peak."""
        left = (self.steps - step) / (self.decay_share * self.steps)
        return min(1.0, (step + 1) / self.warm_up, left)


RECIPE = Recipe(
    stages=(
        Stage(steps=400, count=16, tokens=256, mix=DENSE),
        Stage(steps=600, count=8, tokens=256, mix=DENSE),
        Stage(steps=400, count=8, tokens=512, mix=MIDDLE),
        Stage(steps=450, count=4, tokens=1024, mix=LONG),
    )
)


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids `ids` [count, tokens + 1] int64, and the loss weight of each target `weights` [count, tokens] fp32."""

    ids: torch.Tensor
    weights: torch.Tensor


def new_model(tokenizer: Any, seed: int) -> Qwen3ForCausalLM:
    """Return an untrained model: 4 layers, 4 query heads over 2 key/value heads of 32 dimensions."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
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
    """Return the training batch of `step`: documents packed end to end, cut to the length of the stage."""
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
    """Return the weight of each token: that of the span with its last character."""
    characters = np.repeat(
        np.array([span.weight for span in document.spans], dtype=np.float32),
        [len(span.text) for span in document.spans],
    )
    return characters[np.array(encoding.offsets)[:, 1] - 1]


class Trainer:
    """A model, its optimisers and the number of the next step, which a checkpoint contains.

    Each thread computes the gradients of its own share of a batch, and the threads synchronise once per step. On a
    machine with other load, this loses far less time than threads that synchronise in every operation.
    """

    def __init__(self, recipe: Recipe, seed: int, tokenizer: Any, threads: int) -> None:
        self.recipe = recipe
        self.seed = seed
        self.tokenizer = tokenizer
        self.encoder: Tokenizer = tokenizer.backend_tokenizer
        self.threads = threads
        self.pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        self.model = new_model(tokenizer, seed)
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
        """Return the share of the loss of `ids` and its gradients; the gradients of the parameters stay unchanged."""
        logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = losses @ weights.flatten() / total
        return loss.item(), torch.autograd.grad(loss, self.parameters)

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
    """Write the checkpoint folder in the layout of the hub, with the figures of the training in quality.json."""
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
    """Train the embedded model."""
    parser = argparse.ArgumentParser(description="Train the embedded model, or continue where the last run stopped.")
    parser.add_argument("--work", type=Path, default=Path("build/demo_model"), help="folder of the run's checkpoints")
    parser.add_argument("--output", type=Path, default=Path("shared/demo_model"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    checkpoint = arguments.work / "train.pt"
    trainer = Trainer(
        RECIPE,
        arguments.seed,
        load_or_train_tokenizer(arguments.work / "tokenizer", arguments.seed),
        arguments.threads,
    )
    if checkpoint.exists():
        trainer.load(checkpoint)
        print(f"continuing at step {trainer.step} of {RECIPE.steps}", flush=True)
    train(trainer, checkpoint)
    export(trainer, arguments.output)


if __name__ == "__main__":
    main()
