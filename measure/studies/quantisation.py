"""Quality, memory and speed of quantised weights and KV on a CPU, in one process.

    python -m measure.studies.quantisation --json measure/results/quantisation.json --docs docs/quantisation.md

Quality: the bundled model reads held-out stories (perplexity) and answers held-out items, as in
`tools.demo_model.evaluate`, in bfloat16 and with each kind of weights or KV. Logit error: tiny random models of each
family, relative to float32. Speed: CPU time of one thread for decode steps of a random model of 0.2 B weights, in turn
with those in bfloat16. The table in the docs stands between two comments.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.quantised_checkpoints import convert_checkpoint, convert_to_gguf
from measure.testbed.storages import bytes_of
from shared.config import ConfigError, WorkerConfig
from shared.kv_sizes import kv_bytes_per_token
from shared.model_path import resolve_model
from tools.demo_model import evaluate
from tools.demo_model.corpus import BOS, EOS
from worker_svc.device.choice import set_threads
from worker_svc.memory.kv_pool import allocate
from worker_svc.model.base import AttentionInputs, Model
from worker_svc.model.loader import load_model

CPU = torch.device("cpu")
BLOCK_SIZE = 16
ROWS = 32
BEGIN, END = "<!-- quality -->", "<!-- /quality -->"
FAMILIES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma2ForCausalLM",
    "Phi3ForCausalLM",
    "GPT2LMHeadModel",
)
KINDS: dict[str, dict[str, str]] = {
    "bf16": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "fp8 checkpoint": {"layout": "ct-fp8-channel"},
    "GGUF Q8_0": {"gguf": "Q8_0"},
    "GGUF Q4_0": {"gguf": "Q4_0"},
    "GGUF Q4_0, int8": {"gguf": "Q4_0", "quantization": "int8"},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "fp8 KV": {"kv_cache_dtype": "fp8"},
    "int4 KV": {"kv_cache_dtype": "int4"},
}


@dataclass(frozen=True, slots=True)
class Quality:
    """Quality metrics of the bundled model."""

    perplexity: float
    arithmetic: float
    recall: float
    same_choice: float
    """Share of tokens in the stories whose most likely next token is the same as in bfloat16."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Median CPU time of a decode step in bfloat16, divided by that of this kind, with the range over the rounds."""

    ratio: float
    lowest: float
    highest: float


class Reader:
    """A model with its own paged KV that computes whole rows and greedy continuations."""

    def __init__(self, model: str, **settings: Any) -> None:
        self.model, self._description = load_model(WorkerConfig(model=model, device="cpu", **settings), CPU)
        self._kv_dtype = self._description.kv_dtype

    def logits(self, rows: Sequence[list[int]]) -> list[torch.Tensor]:
        """Return the logits for all tokens of each row, computed from scratch."""
        step, caches = self._first_step(rows, 0)
        flat = step(caches, None)
        return list(torch.split(flat.float(), [len(row) for row in rows]))

    def continue_greedily(self, rows: Sequence[list[int]], count: int) -> list[list[int]]:
        """Return the `count` most likely tokens after each row, one by one."""
        lengths = torch.tensor([len(row) for row in rows])
        step, caches = self._first_step(rows, count)
        last = lengths.cumsum(0) - 1
        chosen = [step(caches, last).argmax(-1)]
        tables = self._tables(lengths + count)
        for number in range(count - 1):
            positions = lengths + number
            chosen.append(
                self._step(chosen[-1], positions, tables, torch.ones_like(lengths), positions + 1)(caches, None).argmax(
                    -1
                )
            )
        return torch.stack(chosen, 1).tolist()

    def decode_step(self, rows: int, context: int) -> Callable[[], object]:
        """Return a function that computes one token for each of several rows with equal context."""
        lengths = torch.full((rows,), context)
        tables = self._tables(lengths)
        caches = allocate(self.model.kv_shapes, int(tables.max()) + 1, BLOCK_SIZE, self._kv_dtype, CPU, "context")
        step = self._step(torch.arange(rows), lengths - 1, tables, torch.ones_like(lengths), lengths)
        return lambda: step(caches, None)

    def _first_step(self, rows: Sequence[list[int]], spare: int) -> tuple[Callable[[Any, Any], torch.Tensor], Any]:
        lengths = torch.tensor([len(row) for row in rows])
        tables = self._tables(lengths + spare)
        caches = allocate(self.model.kv_shapes, int(tables.max()) + 1, BLOCK_SIZE, self._kv_dtype, CPU, "context")
        ids = torch.tensor([token for row in rows for token in row])
        positions = torch.cat([torch.arange(len(row)) for row in rows])
        return self._step(ids, positions, tables, lengths, lengths), caches

    def _step(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        new: torch.Tensor,
        contexts: torch.Tensor,
    ) -> Callable[[Any, Any], torch.Tensor]:
        owners = torch.arange(len(new)).repeat_interleave(new)
        blocks = tables[owners, positions // BLOCK_SIZE].long()
        attention = AttentionInputs(
            slot_mapping=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
            block_tables=tables,
            query_start=torch.cat((torch.zeros(1, dtype=torch.int64), new.cumsum(0))).int(),
            context_lens=contexts.int(),
            max_query_len=int(new.max()),
        )
        model: Model = self.model
        return lambda caches, index: model.forward(ids, positions, attention, caches, index)

    @staticmethod
    def _tables(lengths: torch.Tensor) -> torch.Tensor:
        counts = -(-lengths // BLOCK_SIZE)
        first = counts.cumsum(0) - counts
        return (first[:, None] + torch.arange(int(counts.max())).minimum(counts[:, None] - 1)).int()


def measure_quality(items: int, folder: Path) -> dict[str, Quality]:
    """Measure the bundled model with each kind of weights and KV."""
    demo = resolve_model("demo", weights=True)
    tokenizer = AutoTokenizer.from_pretrained(demo)
    stories = [
        tokenizer(BOS + text + EOS, add_special_tokens=False).input_ids for text in evaluate.held_out_stories(items, 1)
    ]
    results: dict[str, Quality] = {}
    plain: list[torch.Tensor] = []
    for kind, settings in KINDS.items():
        reader = _read(demo, folder / kind.replace(" ", "-"), settings)
        logits = [each for batch in _batches(stories) for each in reader.logits(batch)]
        picks = [each.argmax(-1) for each in logits]
        plain = plain or picks
        losses = [
            torch.nn.functional.cross_entropy(each[:-1], torch.tensor(row[1:]), reduction="sum")
            for each, row in zip(logits, stories, strict=True)
        ]
        count = sum(len(row) - 1 for row in stories)
        same = sum(int((one == other).sum()) for one, other in zip(picks, plain, strict=True))
        results[kind] = Quality(
            perplexity=round(math.exp(float(sum(losses)) / count), 4),
            arithmetic=_accuracy(reader, tokenizer, evaluate.held_out_arithmetic(items, 1)),
            recall=_accuracy(reader, tokenizer, evaluate.held_out_recall(items, 1)),
            same_choice=round(same / sum(map(len, stories)), 4),
        )
        print(kind, results[kind], flush=True)
    return results


def _read(checkpoint: Path, folder: Path, settings: dict[str, str]) -> Reader:
    """Write a checkpoint in a kind's format and read it with the kind's settings."""
    options = dict(settings)
    if layout := options.pop("layout", None):
        checkpoint = convert_checkpoint(checkpoint, folder, layout).quantised
    if blocks := options.pop("gguf", None):
        checkpoint = convert_to_gguf(checkpoint, folder, blocks).quantised
    return Reader(str(checkpoint), dtype="bfloat16", **options)


def _accuracy(reader: Reader, tokenizer: Any, items: Sequence[evaluate.Item]) -> float:
    prompts = [tokenizer(item.prompt).input_ids for item in items]
    answers = [
        answer for batch in _batches(prompts) for answer in reader.continue_greedily(batch, evaluate.ANSWER_TOKENS)
    ]
    said = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    return round(sum(item.is_answered_by(text) for item, text in zip(items, said, strict=True)) / len(items), 4)


def _batches(rows: Sequence[list[int]]) -> list[Sequence[list[int]]]:
    return [rows[first : first + ROWS] for first in range(0, len(rows), ROWS)]


def measure_errors(folder: Path) -> dict[str, dict[str, float | None]]:
    """Measure the relative error of the logits for a random model of each family; None if the family does not support
    the kind.
    """
    rows = [list(range(5 + row, 69 + row)) for row in range(8)]
    results: dict[str, dict[str, float | None]] = {}
    for family in FAMILIES:
        base = make_checkpoint(family, folder / family, std=0.05)
        exact = torch.cat(Reader(str(base), dtype="float32").logits(rows))
        results[family] = {}
        for kind, settings in KINDS.items():
            if "layout" in settings or "gguf" in settings:
                continue
            try:
                found = torch.cat(Reader(str(base), dtype="bfloat16", **settings).logits(rows))
            except ConfigError:
                results[family][kind] = None
                continue
            results[family][kind] = round(float((found - exact).norm() / exact.norm()), 5)
        print(family, results[family], flush=True)
    return results


def measure_speed(folder: Path, rounds: int) -> tuple[dict[str, dict[str, Speed]], dict[str, float]]:
    """Measure decode steps of a random model, in turn, and the memory of its weights.

    Returns:
        The speed relative to bfloat16 by load and kind, and the memory relative to bfloat16 by kind.
    """
    config = LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=12, num_attention_heads=16,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=4096, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    base = folder / "random"
    LlamaForCausalLM(config).bfloat16().save_pretrained(base)
    readers: dict[str, Reader] = {}
    for kind, settings in KINDS.items():
        with tempfile.TemporaryDirectory() as name:
            readers[kind] = _read(base, Path(name), settings)
    sizes = {kind: bytes_of(reader.model) for kind, reader in readers.items()}
    results: dict[str, dict[str, Speed]] = {}
    for rows, context in ((1, 512), (16, 512), (16, 2048)):
        steps = {kind: reader.decode_step(rows, context) for kind, reader in readers.items()}
        times: dict[str, list[float]] = {kind: [] for kind in steps}
        for _ in range(rounds + 1):
            for kind, step in steps.items():
                times[kind].append(_median_time(step))
        results[f"{rows} rows of {context}"] = {
            kind: _speed([base / own for base, own in zip(times["bf16"][1:], taken[1:], strict=True)])
            for kind, taken in times.items()
        }
        print(rows, context, results[f"{rows} rows of {context}"], flush=True)
    return results, {kind: round(size / sizes["bf16"], 3) for kind, size in sizes.items()}


def _median_time(step: Callable[[], object], count: int = 5) -> float:
    times = []
    for _ in range(count):
        began = time.process_time()
        step()
        times.append(time.process_time() - began)
    return median(times)


def _speed(ratios: list[float]) -> Speed:
    return Speed(round(median(ratios), 2), round(min(ratios), 2), round(max(ratios), 2))


def table(result: dict[str, Any]) -> str:
    """Return the tables of the docs."""
    lines = [
        "| bundled model, bfloat16 | perplexity of stories | arithmetic | recall | same choice |",
        "|---|--:|--:|--:|--:|",
    ]
    for kind, row in result["quality"].items():
        lines.append(
            f"| {kind} | {row['perplexity']:.3f} | {row['arithmetic']:.1%} | {row['recall']:.1%} |"
            f" {row['same_choice']:.1%} |"
        )
    kinds = list(next(iter(result["errors"].values())))
    lines += ["", f"| error of logits | {' | '.join(kinds)} |", f"|---|{'--:|' * len(kinds)}"]
    for family, errors in result["errors"].items():
        cells = ["-" if error is None else f"{error:.2%}" for error in errors.values()]
        lines.append(f"| {family} | {' | '.join(cells)} |")
    if result["speed"]:
        loads = list(result["speed"])
        heads = " | ".join(f"{load} tokens" for load in loads)
        lines += ["", f"| speed of decode steps | {heads} | memory of weights |", f"|---|{'--:|' * (len(loads) + 1)}"]
        for kind, size in result["memory"].items():
            speeds = [result["speed"][load][kind] for load in loads]
            cells = [f"{each['ratio']:.2f} ({each['lowest']:.2f} to {each['highest']:.2f})" for each in speeds]
            lines.append(f"| {kind} | {' | '.join(cells)} | {size:.2f} |")
    lines += [
        "",
        "| bytes of KV per token and layer, 8 heads of 128 | bfloat16 | int8 | fp8 | int4 |",
        "|---|--:|--:|--:|--:|",
    ]
    sizes = [kv_bytes_per_token([(8, (128, 128))], kind) for kind in ("bfloat16", "int8", "fp8", "int4")]
    lines.append(f"| key and value | {' | '.join(f'{size:,}' for size in sizes)} |")
    return "\n".join(lines)


@torch.inference_mode()
def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=200, help="stories, and items of each task")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the speed; 0: do not measure it")
    parser.add_argument("--num-threads", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", type=Path, help="file with the table to replace")
    options = parser.parse_args()
    set_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        speeds, sizes = measure_speed(folder, options.rounds) if options.rounds else ({}, {})
        set_threads(options.num_threads)
        result = {
            "items": options.items,
            "quality": {kind: asdict(each) for kind, each in measure_quality(options.items, folder).items()},
            "errors": measure_errors(folder),
            "speed": {
                load: {kind: asdict(speed) for kind, speed in of_load.items()} for load, of_load in speeds.items()
            },
            "memory": sizes,
        }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    if options.docs:
        text = options.docs.read_text()
        head, _, rest = text.partition(BEGIN)
        _, _, tail = rest.partition(END)
        options.docs.write_text(f"{head}{BEGIN}\n\n{table(result)}\n\n{END}{tail}")


if __name__ == "__main__":
    main()
