"""The items of each part."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from kernels._dispatch import architecture
from kernels.paged_attention import tuning
from measure.gpu import checks, loads, shapes
from measure.gpu import steps as engine_steps
from measure.gpu.results import Figures, Results
from measure.gpu.serving import Served, with_service
from measure.gpu.smoke import smoke
from measure.kernels import bench, bench_weights, tune
from measure.offline import OfflineRequest
from quire_server.serve.supervisor import ServeError

WORK = Path("build/gpu")


@dataclass(frozen=True, slots=True)
class Scale:
    """The sizes of all items."""

    models: tuple[shapes.Shape, ...]
    kernels: bench.Sizes
    check_rounds: int
    check_s: float
    """Seconds after which a check begins no new round."""
    rows: int
    tokens_per_step: int
    steps: tuple[engine_steps.Case, ...]
    decode: tuple[tuple[int, int, int], ...]
    """(rows, context, output tokens)."""
    prefill: tuple[int, ...]
    nano_vllm: tuple[int, int, int]
    """Requests, shortest, longest."""
    sharegpt: tuple[int, int]
    """Requests, longest."""
    graph_tokens: int
    """Largest captured step, in addition to the default."""

    def longest(self) -> int:
        """Return the number of tokens in the longest sequence over all items."""
        most = max(context + output for _, context, output in self.decode)
        return max(most, max(self.prefill) + 1, 2 * self.nano_vllm[2], 2 * self.sharegpt[1]) + 16


FULL = Scale(
    models=(shapes.QWEN_06B, shapes.LLAMA_8B),
    kernels=bench.LLAMA_8B,
    check_rounds=60,
    check_s=45.0,
    rows=256,
    tokens_per_step=8192,
    steps=(
        *(engine_steps.Case(rows, 128, 0, 64) for rows in (1, 64, 256)),
        *(engine_steps.Case(8, 128, prompt, 40) for prompt in (24, 120)),
        *(engine_steps.Case(64, 128, prompt, 40) for prompt in (192, 448, 960, 1984)),
        *(engine_steps.Case(rows, 128, 0, 40, drafts=4) for rows in (1, 8, 64)),
        engine_steps.Case(8, 128, 120, 40, drafts=4),
    ),
    decode=((1, 1024, 256), (8, 1024, 256), (64, 1024, 256), (256, 1024, 192)),
    prefill=(2048, 8192),
    nano_vllm=(256, 100, 1024),
    sharegpt=(512, 1024),
    graph_tokens=2048,
)
REHEARSAL = Scale(
    models=(shapes.TINY,),
    kernels=bench.TINY,
    check_rounds=2,
    check_s=10.0,
    rows=4,
    tokens_per_step=64,
    steps=(
        engine_steps.Case(2, 5, 0, 4),
        engine_steps.Case(2, 5, 20, 4),
        engine_steps.Case(1, 5, 0, 4, drafts=2),
    ),
    decode=((1, 20, 400), (4, 20, 400)),  # enough tokens for all rows to decode together, even on a busy machine
    prefill=(100,),
    nano_vllm=(6, 5, 20),
    sharegpt=(6, 40),
    graph_tokens=40,
)


@dataclass(frozen=True, slots=True)
class Context:
    """Arguments of every part."""

    device: torch.device
    scale: Scale
    results: Results

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the kernel measurements."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


@dataclass(frozen=True, slots=True)
class Item:
    """A measurement through a service."""

    name: str
    measure: Callable[[Served], Figures]
    expected_s: float


def kernels(context: Context) -> None:
    """Run a one-minute smoke test, then measurements relative to the device's limits, then checks at random sizes."""
    for name, test in smoke(context.device, context.dtype, context.scale.kernels):
        context.results.run(name, test, 10.0)
    ceilings = _ceilings(context)
    with torch.inference_mode():
        for name, measure in bench.measurements(context.device, context.dtype, context.scale.kernels):
            context.results.run(name, partial(_measure_one, measure, ceilings), 10.0)
    limit_s = context.scale.check_s
    for name, check in checks.checks(context.device, context.scale.check_rounds, limit_s):
        context.results.run(name, check, limit_s)


def steps(context: Context) -> None:
    """Measure engine steps without the other processes, with and without captured graphs."""
    for shape in context.scale.models:
        _steps_of_shape(context, shape)


def weights(context: Context) -> None:
    """Measure products with quantised weights, and decode steps of models that are quantised at load."""
    ceilings = _ceilings(context)
    with torch.inference_mode():
        for name, measure in bench_weights.measurements(context.device, context.dtype, context.scale.kernels):
            context.results.run(name, partial(_measure_one, measure, ceilings), 10.0)
    # A CPU quantises with other kernels, which are not the subject here.
    kinds = ("none", "int8", "int4", "fp8") if context.device.type == "cuda" else ("none",)
    for shape in context.scale.models[-1:]:
        for kind in kinds:
            _steps_of_shape(context, shape, quantization=kind)


def _steps_of_shape(context: Context, shape: shapes.Shape, *, quantization: str | None = None) -> None:
    """Measure the steps of one model; with `quantization`, only those with graphs.

    This is a separate function so that no local variable retains the model afterwards.
    """
    label = shape.name if quantization is None else f"{shape.name} in {quantization}"
    model = f"{label}: model"
    try:
        with (
            context.results.patience(model, 30.0),
            engine_steps.loaded(
                shapes.make_folder(shape, WORK),
                context.device,
                rows=context.scale.rows + 2,
                tokens_per_step=context.scale.tokens_per_step,
                max_model_len=context.scale.longest(),
                utilization=0.6,
                quantization=quantization or "none",
            ) as loaded,
        ):
            cases = context.scale.steps
            _steps(context, f"{label}, graphs", loaded, cases)
            if quantization is None:
                _steps(context, f"{label}, no graphs", loaded, cases, graphs=False)
                tokens = context.scale.graph_tokens
                with_chunks = tuple(case for case in cases if case.prompt and not case.drafts)
                _steps(context, f"{label}, graphs up to {tokens:,} tokens", loaded, with_chunks, graph_tokens=tokens)
    except torch.OutOfMemoryError as error:  # Continue, because the next shape may succeed.
        context.results.fail(model, error)


def _steps(
    context: Context,
    name: str,
    loaded: engine_steps.Loaded,
    cases: tuple[engine_steps.Case, ...],
    *,
    graphs: bool = True,
    graph_tokens: int = 0,
) -> None:
    """Measure the cases, with one engine for each number of drafts."""
    for drafts in sorted({case.drafts for case in cases}):
        engine, start = loaded.engine(graphs=graphs, graph_tokens=graph_tokens, drafts=drafts)
        context.results.run(f"{name}{', drafts' if drafts else ''}: start", partial(dict, start))
        for case in cases:
            if case.drafts == drafts:
                context.results.run(f"{name}: {case.name}", engine_steps.Steps(engine, case).run, 5.0)
        del engine  # It holds GPU memory.


def tiles(context: Context) -> None:
    """Tune the missing entries of attention's table for this GPU, and write the table."""
    path = context.results.path.with_suffix(".tiles") if context.device.type == "cpu" else tuning.TABLE
    table = dict(tuning.read_table())
    sm = architecture(torch.empty(0, device=context.device))
    keys = [key for key in tune.keys(sm) if key not in table]
    for key in keys if context.device.type == "cuda" else keys[:1]:

        def measure(key: tuning.Key = key) -> Figures:
            with torch.inference_mode():
                found, share = tune.tune_entry(key, context.device)
            table[key] = found
            tuning.write_table(table, path)
            return {**asdict(found), "of_default": share}

        name = f"{key.kernel}, head dimension {key.dim_tile}, {key.kv_bytes} bytes, sm_{sm}"
        context.results.run(name, measure, 60.0)


def decode(context: Context) -> None:
    """Measure decode and prefill for each model shape relative to the roofline; compare CPU and GPU tokens."""
    ceilings = _ceilings(context)
    context.results.run("greedy tokens on CPU and device", lambda: _same_tokens(context), 60.0)
    for shape in context.scale.models:
        items = [
            Item(
                f"{shape.name}: decode, {rows} rows at {length}",
                partial(_decode, shape=shape, ceilings=ceilings, rows=rows, length=length, output=output),
                30.0,
            )
            for rows, length, output in context.scale.decode
        ]
        items += [
            Item(
                f"{shape.name}: prefill, {tokens} tokens",
                partial(_prefill, shape=shape, ceilings=ceilings, tokens=tokens),
                20.0,
            )
            for tokens in context.scale.prefill
        ]
        _serve(context, shape, items)


def workloads(context: Context) -> None:
    """Measure whole lists of requests, offline."""
    for shape in context.scale.models:
        items = [
            Item(f"{shape.name}: {name}", partial(_throughput, requests=requests, rows=context.scale.rows), 90.0)
            for name, requests in _lists(context.scale, shape)
        ]
        _serve(context, shape, items)


def peers(context: Context) -> None:
    """Measure the same requests with `transformers`."""
    from measure.gpu import hf

    device, scale = context.device, context.scale
    for shape in scale.models:
        items = [
            (
                f"{shape.name}: generate, {rows} rows at {length}",
                partial(hf.generate, requests=loads.decode_load(rows, length, output, shape.vocab_size), device=device),
                60.0,
            )
            for rows, length, output in scale.decode
        ]
        items += [
            (
                f"{shape.name}: continuous batching, {name}",
                partial(hf.continuous_batching, requests=requests, rows=scale.rows, device=device),
                200.0,
            )
            for name, requests in _lists(scale, shape)
        ]
        if context.results.all_done(name for name, _, _ in items):
            continue
        try:
            with hf.loaded(shape, shapes.make_folder(shape, WORK), device) as model:
                for name, measure, expected_s in items:
                    context.results.run(name, partial(measure, model), expected_s)
        except torch.OutOfMemoryError as error:  # Continue, because the next shape may succeed.
            context.results.fail(f"{shape.name}: loading", error)


PARTS: dict[str, Callable[[Context], None]] = {
    "kernels": kernels,
    "steps": steps,
    "weights": weights,
    "tiles": tiles,
    "decode": decode,
    "workloads": workloads,
    "peers": peers,
}


def _lists(scale: Scale, shape: shapes.Shape) -> list[tuple[str, list[OfflineRequest]]]:
    return [
        ("nano-vllm", loads.nano_vllm_load(*scale.nano_vllm, shape.vocab_size)),
        ("like ShareGPT", loads.sharegpt_like_load(*scale.sharegpt, shape.vocab_size)),
    ]


def _serve(context: Context, shape: shapes.Shape, items: list[Item]) -> None:
    """Run the missing items with one service."""
    scale = context.scale
    service = f"{shape.name}: service"
    if context.results.all_done(item.name for item in items) or context.results.is_broken(service):
        return

    def use(served: Served) -> None:
        for item in items:
            context.results.run(item.name, partial(item.measure, served), item.expected_s)

    try:
        with_service(
            shapes.make_folder(shape, WORK),
            str(context.device),
            use,
            starting=context.results.patience(service, 30.0),
            rows=scale.rows,
            tokens_per_step=scale.tokens_per_step,
            max_model_len=scale.longest(),
        )
    except ServeError as error:  # Continue, because the next shape may succeed.
        context.results.fail(service, error)


def _ceilings(context: Context) -> bench.Ceilings:
    """Return the device's limits, measured once per part."""

    def measure() -> Figures:
        with torch.inference_mode():
            found = asdict(bench.measure_ceilings(context.device, context.dtype, context.scale.kernels))
        if context.device.type == "cuda":
            torch.cuda.empty_cache()  # The worker process needs the memory.
        return found

    context.results.run("ceilings", measure, 10.0)
    found = context.results.items.get("ceilings")
    if found is None:  # The measurement failed or the time was used up. Try the next measurements anyway.
        return bench.Ceilings(math.nan, math.nan)
    return bench.Ceilings(float(found["copy_bytes_per_s"]), float(found["gemm_flop_per_s"]))


def _measure_one(measure: Callable[[], bench.Measurement], ceilings: bench.Ceilings) -> Figures:
    found = measure()
    figures: Figures = {
        "us": found.seconds * 1e6,
        "tb_per_s": found.bytes / found.seconds / 1e12,
        "tflop_per_s": found.flop / found.seconds / 1e12,
        "of_roof": found.share(ceilings),
    }
    if found.peer:
        figures |= {"peer": found.peer, "peer_us": found.peer_seconds * 1e6}
    return figures


def _decode(
    served: Served, *, shape: shapes.Shape, ceilings: bench.Ceilings, rows: int, length: int, output: int
) -> Figures:
    requests = loads.decode_load(rows, length, output, shape.vocab_size)
    served.send(requests, rows)  # warm-up: kernels are compiled on first use
    report, idle = served.send(requests, rows)
    found = loads.decode_figures(report.traces)
    least_s = shape.decode_seconds(rows, length + output // 2, ceilings.copy_bytes_per_s, ceilings.gemm_flop_per_s)
    return {**found, **idle, "of_roofline": 1e3 * least_s / float(found["step_ms"])}


def _prefill(served: Served, *, shape: shapes.Shape, ceilings: bench.Ceilings, tokens: int) -> Figures:
    found = loads.prefill_figures(served.send(loads.prefill_load(tokens, 5, shape.vocab_size), 1)[0].traces)
    least_s = shape.prefill_flop(tokens) / ceilings.gemm_flop_per_s
    return {**found, "of_gemm_peak": 1e3 * least_s / float(found["ttft_ms"])}


def _throughput(served: Served, *, requests: list[OfflineRequest], rows: int) -> Figures:
    served.send(requests[: min(8, len(requests))], 8)
    report, idle = served.send(requests, 4 * rows)
    return {**loads.throughput_figures(report.requests, report.traces, report.wall_s), **idle}


def _same_tokens(context: Context) -> Figures:
    """Compare the greedy tokens of the bundled float32 model on the CPU and on the device."""
    prompts = loads.nano_vllm_load(8, 10, 60, 1000)
    answers: list[list[tuple[int, ...]]] = []

    def use(served: Served) -> None:
        answers.append([trace.tokens for trace in served.send(prompts, 4)[0].traces])

    folder = Path("shared/demo_model")
    for device in ("cpu", str(context.device)):
        with_service(folder, device, use, rows=4, tokens_per_step=64, max_model_len=256, weights="auto")
    differing = sum(ours != theirs for ours, theirs in zip(*answers, strict=True))
    if differing:
        raise ValueError(f"{differing} of {len(prompts)} answers differ between CPU and device")
    return {"answers": len(prompts), "differing": differing}
