"""`transformers` on the same machine with the same random weights, with both of its generation modes."""

import inspect
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from measure.gpu.results import Figures
from measure.gpu.shapes import Shape
from measure.offline import OfflineRequest


@contextmanager
def loaded(shape: Shape, folder: Path, device: torch.device) -> Iterator[Any]:
    """Load the model with random weights generated on the device; release its memory on exit."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device(device):
        classes: Any = AutoModelForCausalLM
        model = classes.from_config(config, dtype=getattr(torch, shape.dtype), attn_implementation="sdpa").eval()
    yield model
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()


@torch.inference_mode()
def generate(model: Any, requests: Sequence[OfflineRequest], device: torch.device) -> Figures:
    """Generate one static batch. The prefill time is subtracted, so that only decode remains."""
    prompts = torch.tensor([request.prompt for request in requests], device=device)
    output = requests[0].max_tokens
    times = []
    for count in (1, output):
        for attempt in range(2):  # The first request is a warm-up.
            began = time.perf_counter()
            found = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=2,
            )
            if found.shape[1] != prompts.shape[1] + count:
                raise ValueError("generate did not return the requested tokens")
            if attempt:
                times.append(time.perf_counter() - began)
    seconds = times[1] - times[0]
    return {
        "decode_tok_per_s": len(requests) * (output - 1) / seconds,
        "step_ms": 1e3 * seconds / (output - 1),
        "ttft_ms": 1e3 * times[0],
    }


def continuous_batching(model: Any, requests: Sequence[OfflineRequest], rows: int, device: torch.device) -> Figures:
    """Send all requests at once through continuous batching."""
    settings: Any = GenerationConfig
    greedy = settings(do_sample=False, eos_token_id=-1, pad_token_id=2, max_new_tokens=16)
    manager = model.init_continuous_batching(generation_config=greedy, **_batching(rows, device))
    manager.start()
    try:
        seconds = 0.0
        for part in (requests[:4], requests):  # The first requests are a warm-up.
            began = time.perf_counter()
            for request in part:
                manager.add_request(list(request.prompt), max_new_tokens=request.max_tokens)
            out = 0
            for _ in part:
                out += _tokens_of_next(manager)
            seconds = time.perf_counter() - began
            if out != sum(request.max_tokens for request in part):
                raise ValueError(f"{out} tokens were generated, but {sum(r.max_tokens for r in part)} were requested")
    finally:
        manager.stop(block=True)
    prompts = sum(len(request.prompt) for request in requests)
    return {"out_tok_per_s": out / seconds, "total_tok_per_s": (out + prompts) / seconds, "wall_s": seconds}


def _tokens_of_next(manager: Any) -> int:
    while True:
        output = manager.get_result(timeout=1.0)
        if output is None:
            if not manager.is_running():
                raise ValueError("its generation thread died")
            continue
        if output.error:
            raise ValueError(str(output.error))
        if output.is_finished():
            return len(output.generated_tokens)


def _batching(rows: int, device: torch.device) -> dict[str, Any]:
    """Return the row limit, and on a CPU the page limit, under the names that this version of transformers uses."""
    import transformers

    kind = getattr(transformers, "ContinuousBatchingConfig", None)
    if kind is None:
        return {}
    page_size = "page_size" if "page_size" in inspect.signature(kind).parameters else "block_size"
    pages = {page_size: 32, "num_blocks": 64} if device.type == "cpu" else {}
    return {"continuous_batching_config": kind(max_requests_per_batch=rows, **pages)}
