"""Steps of one process and of a group of ranks on the same cores, in turn: time per step, and their ratio.

python -m measure.studies.tensor_parallel --json tensor-parallel.json

Both use all cores: one process with all threads, N ranks with an equal share each. The model is a Qwen3 of 0.6 B
parameters in bfloat16 with random weights. Each round measures prompts and decode steps of both. The ratio is computed
within each round, so that a temporary slowdown affects both sides.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from opentelemetry.trace import NoOpTracer

from protos.quire.plan.v1 import plan_pb2
from shared.columns import to_column
from shared.config import WorkerConfig
from shared.logging import configure_logging
from worker_svc.device.choice import set_threads
from worker_svc.execution.assembly import build_engine
from worker_svc.execution.engine import Engine
from worker_svc.follower import follow
from worker_svc.link.decoding import decode_frame
from worker_svc.model.loader import load_model
from worker_svc.ranks.commands import Followers
from worker_svc.ranks.group import RENDEZVOUS, Group, Place, join, meet
from worker_svc.ranks.shard import Shard

_CPU = torch.device("cpu")
_MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_PROMPT = 64


@dataclass(frozen=True, slots=True)
class _Times:
    """Time for the prompts' step, and median time of the decode steps, in seconds."""

    prompt: float
    decode: float


def _engine(folder: Path, group: Group, num_threads: int) -> Engine:
    config = WorkerConfig(
        model=str(folder), device="cpu", load_format="random", max_num_seqs=64, max_num_batched_tokens=4096,
        kv_cache_memory="1GiB", max_model_len=512, num_threads=num_threads,
    )  # fmt: skip
    model, description = load_model(config, _CPU, group)
    return build_engine(config, model, description, _CPU, NoOpTracer(), None, group)


def _measure(engine: Engine, followers: Followers, num_rows: int, num_steps: int) -> _Times:
    """Compute the prompts of some rows in one step, then decode steps."""
    engine.reset()
    followers.reset()
    blocks = -(-(_PROMPT + num_steps + 1) // engine.limits.block_size)
    rows = range(num_rows)
    rng = np.random.default_rng(0)
    admissions = [
        plan_pb2.Admission(
            row=row,
            generation=1,
            token_ids=to_column(rng.integers(0, 1000, _PROMPT).tolist()),
            num_prompt_tokens=_PROMPT,
            block_tables=[to_column(list(range(row * blocks, (row + 1) * blocks)))],
            request_id=f"request-{row}",
        )
        for row in rows
    ]
    first = plan_pb2.Plan(
        step=1, admissions=admissions, chunk_rows=to_column(list(rows)), chunk_lengths=to_column([_PROMPT] * num_rows)
    )
    seconds = []
    for step in range(1, num_steps + 2):
        plan = first if step == 1 else plan_pb2.Plan(step=step)
        frame = plan_pb2.SchedulerMessage(epoch=1, plan=plan).SerializeToString()
        began = time.perf_counter()
        followers.launch(frame)
        engine.launch(decode_frame(frame, engine.limits), time.time_ns())
        result = engine.collect()
        followers.collected()
        seconds.append(time.perf_counter() - began)
        assert len(result.rows) == num_rows
    return _Times(seconds[0], statistics.median(seconds[1:]))


def _figures(values: list[float], digits: int) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def _compare(options: argparse.Namespace, folder: Path, group: Group) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0))
    alone, shared = _engine(folder, Group(), cores), _engine(folder, group, max(1, cores // group.size))
    followers = Followers(group)
    cases: dict[str, Any] = {}
    for num_rows in options.rows:
        found: dict[str, tuple[list[float], list[float]]] = {"prompt_ms": ([], []), "decode_ms": ([], [])}
        for each in range(-1, options.rounds):  # The first round is not counted.
            set_threads(cores)
            one = _measure(alone, Followers(Group()), num_rows, options.steps)
            set_threads(max(1, cores // group.size))
            many = _measure(shared, followers, num_rows, options.steps)
            if each >= 0:
                for name, pair in (("prompt_ms", (one.prompt, many.prompt)), ("decode_ms", (one.decode, many.decode))):
                    for values, value in zip(found[name], pair, strict=True):
                        values.append(1000 * value)
        cases[f"{num_rows} rows"] = {
            name: {
                "one_process": _figures(of_one, 2),
                "ranks": _figures(of_ranks, 2),
                "speed_of_ranks": _figures([a / b for a, b in zip(of_one, of_ranks, strict=True)], 3),
            }
            for name, (of_one, of_ranks) in found.items()
        }
    followers.stop()
    how = "sockets" if options.sockets else "shared memory"
    return {
        "ranks": group.size,
        "sums": how,
        "cores": cores,
        "rounds": options.rounds,
        "steps": options.steps,
        "cases": cases,
    }


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def main() -> int:
    """Print the results, or run as a follower rank."""
    parser = argparse.ArgumentParser("python -m measure.studies.tensor_parallel", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="decode steps per measurement")
    parser.add_argument("--layers", type=int, default=_MODEL["num_hidden_layers"])
    parser.add_argument("--sockets", action="store_true", help="add up through gloo, as on several machines")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    configure_logging("benchmark")
    set_threads(0, options.ranks)
    if options.rank:
        group = meet(join(Place(Shard(options.rank, options.ranks), options.rank, options.ranks), _CPU), _CPU)
        follow(group, _engine(options.folder, group, 0))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(_MODEL | {"num_hidden_layers": options.layers}))
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", RENDEZVOUS: f"{name}/ranks"}
        if options.sockets:
            del os.environ[RENDEZVOUS]
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        command = [
            sys.executable,
            "-m",
            "measure.studies.tensor_parallel",
            f"--ranks={options.ranks}",
            f"--folder={name}",
        ]
        processes = [subprocess.Popen([*command, f"--rank={rank}"]) for rank in range(1, options.ranks)]
        try:
            group = meet(join(Place(Shard(0, options.ranks), 0, options.ranks), _CPU), _CPU)
            figures = _compare(options, folder, group)
            for process in processes:
                process.wait(60)
        finally:
            for process in processes:
                process.kill()
    text = json.dumps(figures, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
