"""vLLM's CPU backend: its engine runs in this process and is stepped explicitly, so that every token is timed. Variant:
bf16.
"""

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import vllm
from pace import main
from vllm.sampling_params import RequestOutputKind

MAX_NUM_BATCHED_TOKENS = int(os.environ.get("MAX_NUM_BATCHED_TOKENS", "512"))


class Peer:
    def __init__(self, options):
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{options.threads - 1}")
        self._engine = vllm.LLMEngine.from_engine_args(
            vllm.EngineArgs(
                model=options.model,
                dtype="bfloat16",
                max_num_seqs=16,
                max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
                max_model_len=4096,
                enable_prefix_caching=True,
                enable_chunked_prefill=True,
                disable_log_stats=True,
                block_size=32,
            )
        )
        self._index_of = {}

    def start(self, index, request):
        name = str(len(self._index_of))
        self._index_of[name] = index
        self._engine.add_request(
            name,
            {"prompt_token_ids": request["prompt_token_ids"]},
            vllm.SamplingParams(
                temperature=0.0,
                max_tokens=request["max_tokens"],
                min_tokens=request["max_tokens"],
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            ),
        )

    def poll(self):
        return [
            (self._index_of[output.request_id], len(output.outputs[0].token_ids), output.finished)
            for output in self._engine.step()
        ]


if __name__ == "__main__":
    main(Peer, lambda: {"vllm": vllm.__version__, "torch": torch.__version__})
