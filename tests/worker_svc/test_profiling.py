"""The memory profile: what it counts as KV, and that no step needs more memory besides."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from checks.driver import CPU, Driver, make_engine
from measure.testbed.checkpoints import VOCAB_SIZE, edit_config, make_checkpoint
from protos.quire.plan.v1 import plan_pb2
from shared.columns import to_column
from shared.config import WorkerConfig
from worker_svc.execution.profiling import run_captured_step, run_largest_step
from worker_svc.interface.limits import Limits
from worker_svc.memory.kv_pool import block_bytes
from worker_svc.model.loader import load_model

NUM_ROWS = 8
NUM_TOKENS = 256


class PeakBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that were created within the context and are still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live: dict[int, tuple[int, int]] = {}
        """Number of tensors and bytes of each storage."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                count, size = self._live.get(key, (0, storage.nbytes()))
                self._live[key] = (count + 1, size)
                weakref.finalize(tensor, self._release, key)
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result

    def _release(self, key: int) -> None:
        count, size = self._live.pop(key)
        if count > 1:
            self._live[key] = (count - 1, size)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_the_profile_runs_without_a_pool(architecture: str, tmp_path: Path) -> None:
    """The profile computes the maximum number of tokens, in sequences of the maximum length, and counts their KV."""
    config = WorkerConfig(model=str(make_checkpoint(architecture, tmp_path)), max_model_len=60)
    model, description = load_model(config, CPU)
    limits = Limits(
        max_rows=4, max_tokens_per_step=150, max_model_len=60, block_size=16, num_blocks=0, vocab_size=VOCAB_SIZE
    )

    largest = run_largest_step(model, limits, description.dtype, CPU)
    captured = run_captured_step(model, limits, 4, description.dtype, CPU)

    assert largest == captured == (4 + 4 + 2) * block_bytes(model.kv_shapes, 16, torch.float32)


def test_no_step_needs_more_memory_than_the_profile(tmp_path: Path) -> None:
    """Log-probabilities of prompts, and rules and typical-p in all rows, need no more memory than the profile had."""
    folder = make_checkpoint("LlamaForCausalLM", tmp_path)
    edit_config(folder, lambda config: config.update(vocab_size=8192))
    settings: dict[str, Any] = {
        "max_num_seqs": NUM_ROWS, "max_num_batched_tokens": NUM_TOKENS, "load_format": "random"
    }  # fmt: skip
    engine = make_engine(folder, **settings)
    model, description = load_model(WorkerConfig(model=str(folder), device="cpu", load_format="random"), CPU)
    with PeakBytes() as profile:
        kv = run_largest_step(model, engine.limits, description.dtype, CPU)

    driver = Driver(engine)
    sampling = plan_pb2.SamplingParams(
        temperature=1.0, seed=5, top_p=0.9, top_k=50, min_p=0.01, typical_p=0.9, repetition_penalty=1.1,
        presence_penalty=0.5, bias_token_ids=to_column([3]), bias_values=b"\0\0\x80?", logprobs=20, prompt_logprobs=20,
    )  # fmt: skip
    for _ in range(NUM_ROWS):
        length = NUM_TOKENS // NUM_ROWS
        driver.chunk(driver.admit(list(range(1, length + 1)), sampling=sampling), length)
    with PeakBytes() as step:
        driver.step()

    assert len(driver.last_result.scores) > 0
    assert step.peak > NUM_TOKENS * 8192 * 4  # The logits of all tokens.
    assert step.peak <= profile.peak - kv
