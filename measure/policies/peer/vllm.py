"""vLLM's own V1 scheduler and KV cache manager, without its engine, a model or a GPU. Pinned to vLLM 0.32.0.

With two steps in flight it is vLLM's `AsyncScheduler`, as with `--async-scheduling`.

With host memory, it uses vLLM's `SimpleCPUOffloadConnector`, whose worker side is simulated. Copies in one direction
follow one another and do not slow down steps, as on a separate stream of a GPU. Copies to the device begin with their
step, and copies to the host when it ends. The next result reports the copies that have ended, as in vLLM.
"""

import json
import os
import sys
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

from measure.policies.jobs import Piece, first_token
from measure.policies.peer.absent import stand_in

stand_in(
    "anthropic", "compressed_tensors", "cv2", "depyf", "fastapi", "gguf", "ijson", "interegular", "lark", "llguidance",
    "lmformatenforcer", "mcp", "mistral_common", "model_hosting_container_standards", "opentelemetry", "outlines_core",
    "prometheus_fastapi_instrumentator", "starlette", "tiktoken", "tvm_ffi", "uvicorn", "watchfiles", "xgrammar",
)  # fmt: skip

import torch  # noqa: E402
from vllm import __version__  # noqa: E402
from vllm.config import CacheConfig, KVTransferConfig, ObservabilityConfig, ParallelConfig, SchedulerConfig  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata  # noqa: E402

_TOKENS = 1 << 30


def main() -> None:
    """Respond to lines until the input ends."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # Output that vLLM prints must not disturb the protocol.
    peer = None
    for line in sys.stdin:
        message = json.loads(line)
        op = message.pop("op")
        if op == "start":
            peer = _Peer(**message)
            answer = {"version": f"vLLM {__version__}", "settings": peer.settings}
        else:
            answer = getattr(peer, op)(**message)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class _Peer:
    """One scheduler for each worker."""

    def __init__(
        self, costs: dict[str, Any], policy: str, settings: dict[str, Any], workers: int, in_flight: int
    ) -> None:
        init_none_hash(sha256)
        self._workers = [_Worker(costs, policy, settings, in_flight) for _ in range(workers)]
        shown = self._workers[0].scheduler.scheduler_config
        self.settings = {
            name: getattr(shown, name)
            for name in (
                "policy", "max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold",
                "long_prefill_token_threshold_adaptive", "scheduler_reserve_full_isl", "watermark", "async_scheduling",
            )
        }  # fmt: skip

    def next(self, worker: int, now: float, jobs: list[Any]) -> dict[str, Any]:
        """Return the next step of a worker."""
        its = self._workers[worker]
        for job in jobs:
            its.add(*job, now)
        work = its.next(now)
        return {"work": work, "due": its.next_due() if work is None else None, "cpu_s": self._cpu_s()}

    def done(self, worker: int, now: float) -> dict[str, Any]:
        """Apply the results of a worker's oldest step."""
        tokens, ended = self._workers[worker].done(now)
        return {"tokens": tokens, "ended": ended, "cpu_s": self._cpu_s()}

    def _cpu_s(self) -> float:
        return sum(worker.cpu_s for worker in self._workers)


class _Copies:
    """Copies between device and host in progress, by vLLM's numbers for the copies of one step."""

    def __init__(self, block_s: float) -> None:
        self._block_s = block_s
        self._free_at = {True: 0.0, False: 0.0}
        """Times when the copies to the device (True) and to the host (False) that are in progress end."""
        self._loads: list[tuple[float, list[str]]] = []
        """Ends of copies to the device, each with its requests."""
        self._stores: list[tuple[float, int]] = []

    def load(self, meta: Any, now: float) -> None:
        """Begin the copies to the device of a step."""
        if meta is not None and meta.load_event >= 0:
            requests = meta.load_event_to_reqs[meta.load_event]
            self._loads.append((self._end(len(meta.load_gpu_blocks), now, is_load=True), requests))

    def store(self, meta: Any, now: float) -> None:
        """Begin the copies to the host of a step."""
        if meta is not None and meta.store_event >= 0:
            self._stores.append((self._end(len(meta.store_gpu_blocks), now, is_load=False), meta.store_event))

    def _end(self, num_blocks: int, now: float, *, is_load: bool) -> float:
        self._free_at[is_load] = max(now, self._free_at[is_load]) + num_blocks * self._block_s
        return self._free_at[is_load]

    def next_due(self) -> float | None:
        """Return when the next copy ends. A copy to the host blocks device memory, too."""
        return min((end for end, _ in (*self._loads, *self._stores)), default=None)

    def take_ended(self, now: float) -> KVConnectorOutput | None:
        """Return and drop the copies that have ended."""
        requests = {name for end, names in self._loads if end <= now for name in names}
        stores = {number: 1 for end, number in self._stores if end <= now}
        self._loads = [each for each in self._loads if each[0] > now]
        self._stores = [each for each in self._stores if each[0] > now]
        if not requests and not stores:
            return None
        return KVConnectorOutput(
            finished_recving=requests, kv_connector_worker_meta=SimpleCPUOffloadWorkerMetadata(stores)
        )


class _Worker:
    def __init__(self, costs: dict[str, Any], policy: str, settings: dict[str, Any], in_flight: int) -> None:
        self._copies = _Copies(costs["block_copy_s"])
        self.scheduler = _scheduler(costs, policy, settings, in_flight)
        self.cpu_s = 0.0
        self._hasher = get_request_block_hasher(costs["block_size"], sha256)
        self._live: dict[str, tuple[Request, int]] = {}
        """Live requests by id, each with its first output token."""
        self._cached: dict[str, int] = {}
        self._steps: deque[tuple[Any, list[str], set[str]]] = deque()
        """Steps in flight: the scheduler output, its requests, and those that sample."""

    def add(self, number: int, prompt: list[Any], outputs: list[int], priority: int, now: float) -> None:
        """Add a job."""
        tokens = [token for piece in prompt for token in Piece(*piece).tokens().tolist()]
        request = Request(
            request_id=str(number),
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=outputs[1], ignore_eos=True, temperature=0.0),
            pooling_params=None,
            arrival_time=now,
            priority=priority,
            block_hasher=self._hasher,
        )
        self._live[request.request_id] = (request, first_token(outputs[0]))
        began = time.thread_time()
        self.scheduler.add_request(request)
        self.cpu_s += time.thread_time() - began

    def next(self, now: float) -> list[int] | None:
        """Schedule a step and return its work; None if there is nothing to do."""
        scheduler = self.scheduler
        # A first step without tokens may only report requests that have ended, or begin copies.
        for _ in range(2):
            if not scheduler.has_requests():
                return None
            began = time.thread_time()
            out = scheduler.schedule()
            self._copies.load(out.kv_connector_metadata, now)
            if not out.total_num_scheduled_tokens:
                self._copies.store(out.kv_connector_metadata, now)
                scheduler.update_from_output(out, _result([], [], self._copies.take_ended(now)))
            self.cpu_s += time.thread_time() - began
            if out.total_num_scheduled_tokens:
                return self._begin(out)
        return None

    def next_due(self) -> float | None:
        """Return when a request can continue that waits for a copy, if no other event happens."""
        return self._copies.next_due()

    def _begin(self, out: Any) -> list[int]:
        for new in out.scheduled_new_reqs:
            self._cached.setdefault(new.req_id, new.num_computed_tokens)
        prefill = decodes = context = prefill_context = 0
        samples = set()
        for name, count in out.num_scheduled_tokens.items():
            request = self._live[name][0]
            length = request.num_computed_tokens  # including the tokens of this step
            start = length - count
            if count == 1 and start >= request.num_prompt_tokens:
                decodes += 1
                context += length
            else:
                prefill += count
                prefill_context += count * start + count * (count + 1) // 2
            if not request.is_prefill_chunk:
                samples.add(name)
        self._steps.append((out, list(out.num_scheduled_tokens), samples))
        return [prefill, decodes, context, prefill_context]

    def done(self, now: float) -> tuple[list[int], list[list[int]]]:
        """Apply the results of the oldest step; return the jobs that got a token, and the jobs that ended."""
        out, names, samples = self._steps.popleft()
        self._copies.store(out.kv_connector_metadata, now)
        before = {name: self._live[name][0].num_output_tokens for name in names if name in self._live}
        sampled = [
            [(self._live[name][1] + before[name]) % _TOKENS] if name in samples and name in before else []
            for name in names
        ]
        result = _result(names, sampled, self._copies.take_ended(now))
        began = time.thread_time()
        self.scheduler.update_from_output(out, result)
        self.cpu_s += time.thread_time() - began
        tokens, ended = [], []
        for name in before:
            request = self._live[name][0]
            tokens += [int(name)] * (request.num_output_tokens - before[name])
            if request.is_finished():
                del self._live[name]
                ended.append([int(name), request.num_output_tokens, self._cached.pop(name), request.num_preemptions])
        return tokens, ended


def _result(names: list[str], sampled: list[list[int]], copies: KVConnectorOutput | None) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: at for at, name in enumerate(names)},
        sampled_token_ids=sampled,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
        kv_connector_output=copies,
    )


def _scheduler(costs: dict[str, Any], policy: str, settings: dict[str, Any], in_flight: int) -> Any:
    """Return a vLLM scheduler that has the configuration fields it reads."""
    block_size, num_blocks = costs["block_size"], costs["num_blocks"] + 1  # vLLM reserves one block for itself.
    layer = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    # The connector computes the number of host blocks from the size of a device block, here one byte.
    memory = KVCacheTensor(size=num_blocks, layers=["layer"], layer_stride=0, block_stride=1, offset=0)
    kv = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[memory], kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)]
    )
    host_blocks = costs["host_tokens"] // block_size
    offload = {"cpu_bytes_to_use": host_blocks, "lazy_offload": settings.get("lazy_offload", False)}
    scheduling = SchedulerConfig(
        **{
            "max_num_seqs": costs["max_num_seqs"],
            "max_num_batched_tokens": costs["max_num_batched_tokens"],
            "max_model_len": costs["max_model_len"],
            "is_encoder_decoder": False,
            "policy": policy,
            "async_scheduling": in_flight > 1,
            **{name: value for name, value in settings.items() if name != "lazy_offload"},
        }
    )
    cache = CacheConfig(block_size=block_size, enable_prefix_caching=True)
    cache.num_gpu_blocks = num_blocks
    model = SimpleNamespace(
        uses_mrope=False,
        runner_type="generate",
        return_sampling_mask=False,
        supports_multimodal_inputs=False,
        max_model_len=costs["max_model_len"],
        is_encoder_decoder=False,
        enable_return_routed_experts=False,
        is_multimodal_model=False,
        multimodal_config=None,
        is_hybrid=False,
        is_diffusion=False,
        skip_tokenizer_init=True,
    )
    config = SimpleNamespace(
        scheduler_config=scheduling,
        cache_config=cache,
        parallel_config=ParallelConfig(),
        observability_config=ObservabilityConfig(),
        model_config=model,
        lora_config=None,
        kv_events_config=None,
        kv_transfer_config=KVTransferConfig(
            kv_connector="SimpleCPUOffloadConnector", kv_role="kv_both", kv_connector_extra_config=offload
        )
        if host_blocks
        else None,
        ec_transfer_config=None,
        speculative_config=None,
        structured_outputs_config=None,
        diffusion_config=None,
        aux_output_config=SimpleNamespace(enabled=False),
        ec_manager_config=SimpleNamespace(get_encoder_cache_manager_obj=lambda: None),
        is_mm_encoder_only=False,
        num_lookahead_tokens=0,
        num_prefill_lookahead_tokens=0,
        num_speculative_tokens=0,
        use_v2_model_runner=False,
        max_concurrent_batches=in_flight,
        max_in_flight_tokens=in_flight * scheduling.max_num_batched_tokens,
    )
    grammars = SimpleNamespace(accept_tokens=lambda *_: True)
    return scheduling.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=grammars,
        block_size=block_size,
        hash_block_size=block_size,
        log_stats=False,
    )


if __name__ == "__main__":
    main()
