"""`quire bench frontend`: the real front-end process against an echo core, with a bare grpc.aio echo as the baseline.

Scenarios, each with the same clients:
  * bare: the baseline, one message per token, no core;
  * prompt: one message per token through the front end. The core generates tokens at `OFFERED_SHARE` of the baseline's
    rate in the same round. A front end that keeps up merges nothing, so `prompt_tokens_per_message` is 1;
  * lagging: the core is far faster than the readers, so tokens are merged;
  * stalled: some readers read nothing, others read; the front end's memory is sampled.

The first three alternate, so that other programs affect all of them alike. The result contains medians and ranges of
the rates, and of the ratios within a round. CPU time per message is the least disturbed number; it covers exactly the
client's window. Linux only: the program reads /proc.

Targets on an idle machine: a median of at least 0.6 for `prompt_messages_per_s_to_bare` with one token per message, and
of 2 for `lagging_tokens_per_s_to_bare`.
"""

import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from measure.frontend.child import PATIENCE_S, Child
from measure.spread import median_and_range

STREAMS = 128
OFFERED_SHARE = 0.7
"""The core's token rate in `prompt`, as a fraction of the baseline's message rate."""
CREDIT = 65536
"""Credit per stream, bytes: the front end's default."""
FLOOD_TOKENS_PER_STEP = 8
READERS_BESIDE_STALLED = 16
TOKENS_BESIDE_STALLED = 256

_VOCABULARY = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Duration and repetitions of the measurements."""

    json: Path | None = None
    rounds: int = 5
    seconds: float = 2.0
    stalled_seconds: float = 8.0
    stalled_streams: int = 64


def run_bench(options: BenchOptions) -> dict[str, Any]:
    """Run all scenarios, print a table, write the JSON file if one is named, and return its content.

    Raises:
        ChildError: a process failed or hung. The message names the process and contains the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        bench = _Bench(Path(folder), options)
        rounds = [bench.round() for _ in range(options.rounds)]
        stalled = bench.stalled()
    result = _summary(rounds, stalled)
    _print_table(result)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


class _Bench:
    def __init__(self, folder: Path, options: BenchOptions) -> None:
        self._options = options
        self._folder = folder
        self._address = f"ipc://{folder}/core"
        self._model = write_model(folder / "model")

    def round(self) -> dict[str, dict[str, float]]:
        with Child(self._folder, "measure.frontend.servicer_bare_echo") as bare:
            measured = {"bare": self._measure(bare)}
        interval = STREAMS / (OFFERED_SHARE * measured["bare"]["messages_per_s"])
        for scenario, tokens_per_step, step_interval_s in (
            ("prompt", 1, interval),
            ("lagging", FLOOD_TOKENS_PER_STEP, 0.0),
        ):
            with ExitStack() as processes:
                frontend = self._start(processes, tokens_per_step, step_interval_s)
                measured[scenario] = self._measure(frontend)
        return measured

    def stalled(self) -> dict[str, Any]:
        """Return the front end's memory with stalled readers, and the other readers' token rate."""
        options = self._options
        with ExitStack() as processes:
            frontend = self._start(processes, FLOOD_TOKENS_PER_STEP, 0.0)
            target = _target(frontend.line())
            client = processes.enter_context(
                Child(
                    self._folder,
                    "measure.frontend.client",
                    f"--target={target}",
                    f"--streams={READERS_BESIDE_STALLED}",
                    f"--stalled={options.stalled_streams}",
                    f"--max-tokens={TOKENS_BESIDE_STALLED}",
                    f"--seconds={options.stalled_seconds}",
                    "--warmup-s=2",
                )
            )
            client.line()
            samples = []
            end = time.monotonic() + options.stalled_seconds
            while time.monotonic() < end:
                samples.append(frontend.resident_bytes())
                time.sleep(0.25)
            others = json.loads(client.line(options.stalled_seconds + PATIENCE_S))
        quarter = max(len(samples) // 4, 1)
        return {
            "stalled_streams": options.stalled_streams,
            "resident_mib": [round(sample / 2**20, 2) for sample in samples],
            "growth_mib": round((max(samples[-quarter:]) - max(samples[:quarter])) / 2**20, 2),
            "others_tokens_per_s": round(others["tokens_per_s"], 1),
        }

    def _start(self, processes: ExitStack, tokens_per_step: int, step_interval_s: float) -> Child:
        core = processes.enter_context(
            Child(
                self._folder,
                "measure.frontend.echo_core",
                f"--address={self._address}",
                f"--vocab-size={_VOCABULARY}",
                f"--tokens-per-step={tokens_per_step}",
                f"--step-interval-s={step_interval_s}",
            )
        )
        core.line()
        return processes.enter_context(
            Child(
                self._folder,
                "quire_server.cli.main",
                "frontend",
                f"--frontend-address={self._address}",
                f"--model={self._model}",
                "--grpc-port=0",
                "--http-port=0",
                f"--stream-credit={CREDIT}",
                "--grace-period-s=0",
            )
        )

    def _measure(self, server: Child) -> dict[str, float]:
        arguments = (f"--target={_target(server.line())}", f"--streams={STREAMS}", f"--seconds={self._options.seconds}")
        with Child(self._folder, "measure.frontend.client", *arguments) as client:
            client.line()
            before = server.cpu_seconds()
            counts: dict[str, float] = json.loads(client.line(self._options.seconds + PATIENCE_S))
            cpu = server.cpu_seconds() - before
        counts["server_cpu_us_per_message"] = cpu / counts.pop("messages") * 1e6
        return counts


def write_model(folder: Path) -> Path:
    """Write a small byte-level tokenizer that a front end can load."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    text = [f"word{number} and then some more words of number {number}" for number in range(2000)]
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return folder


def _target(line: str) -> str:
    return line.partition("grpc=")[2].split()[0]


def _summary(rounds: Sequence[dict[str, dict[str, float]]], stalled: dict[str, Any]) -> dict[str, Any]:
    results = [
        {"scenario": scenario, **{name: median_and_range([r[scenario][name] for r in rounds], 3) for name in figures}}
        for scenario, figures in rounds[0].items()
    ]
    ratios = {
        "prompt_messages_per_s_to_bare": [r["prompt"]["messages_per_s"] / r["bare"]["messages_per_s"] for r in rounds],
        "prompt_messages_per_cpu_s_to_bare": [
            r["bare"]["server_cpu_us_per_message"] / r["prompt"]["server_cpu_us_per_message"] for r in rounds
        ],
        "prompt_tokens_per_message": [r["prompt"]["tokens_per_s"] / r["prompt"]["messages_per_s"] for r in rounds],
        "lagging_tokens_per_s_to_bare": [r["lagging"]["tokens_per_s"] / r["bare"]["tokens_per_s"] for r in rounds],
    }
    return {
        "streams": STREAMS,
        "rounds": len(rounds),
        "results": results,
        "ratios": {name: median_and_range(values, 3) for name, values in ratios.items()},
        "stalled": stalled,
    }


def _print_table(result: dict[str, Any]) -> None:
    print(f"{result['streams']} streams, {result['rounds']} rounds: median (min .. max)")
    for row in result["results"]:
        print(f"{row['scenario']}:")
        for name, value in row.items():
            if name != "scenario":
                print(f"  {name:26} {_cell(value)}")
    print("ratios:")
    for name, value in result["ratios"].items():
        print(f"  {name:36} {_cell(value)}")
    stalled = result["stalled"]
    print(
        f"stalled: {stalled['stalled_streams']} stalled readers: resident {stalled['resident_mib'][0]}"
        f" → {stalled['resident_mib'][-1]} MiB, growth {stalled['growth_mib']} MiB;"
        f" the other readers got {stalled['others_tokens_per_s']} tokens/s"
    )


def _cell(value: dict[str, float]) -> str:
    return f"{value['median']:12.2f}  ({value['min']:.2f} .. {value['max']:.2f})"
