"""OpenVINO GenAI: its continuous batching pipeline, in process. Variants: bf16, int8, int4 (weights).

On a CPU without bf16 instructions it computes in f32 and accepts no bf16 cache, so f32 is used there. `optimum-cli`
exports the model. Requests beyond the concurrency limit are not submitted, because the pipeline looks up cached
prefixes when a request is added.
"""

import os

import numpy as np
import openvino
import openvino_genai as genai
from pace import main

KV_TOKENS = 16_384
PAGE = 32
MAX_NUM_BATCHED_TOKENS = int(os.environ.get("MAX_NUM_BATCHED_TOKENS", "512"))
PRECISION = "bf16" if "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES") else "f32"


class Peer:
    def __init__(self, options):
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS
        scheduler.cache_size = 0
        scheduler.num_kv_blocks = KV_TOKENS // PAGE
        scheduler.max_num_seqs = 16
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        properties = {
            "INFERENCE_NUM_THREADS": options.threads,
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": "1",
            "INFERENCE_PRECISION_HINT": PRECISION,
        }
        if options.variant == "bf16":
            # With int8 and int4 weights, its own default (u8) is used.
            properties["KV_CACHE_PRECISION"] = PRECISION
        self._pipeline = genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU", properties)
        self._handles = {}
        self._left = {}
        self._next_id = 0

    def start(self, index, request):
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = request["max_tokens"]
        config.ignore_eos = True
        config.do_sample = False
        self._next_id += 1
        tokens = openvino.Tensor(np.array([request["prompt_token_ids"]], dtype=np.int64))
        self._handles[index] = self._pipeline.add_request(self._next_id, tokens, config)
        self._left[index] = request["max_tokens"]

    def poll(self):
        self._pipeline.step()
        updates = []
        for index, handle in list(self._handles.items()):
            count = 0
            while handle.can_read():
                count += sum(len(output.generated_ids) for output in handle.read().values())
            self._left[index] -= count
            if self._left[index] <= 0:
                del self._handles[index]
            if count:
                updates.append((index, count, self._left[index] <= 0))
        return updates


if __name__ == "__main__":
    main(Peer, lambda: {"openvino": openvino.__version__, "openvino_genai": genai.__version__, "precision": PRECISION})
