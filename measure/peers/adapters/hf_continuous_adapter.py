"""transformers' own continuous batching (sdpa over a paged cache). Variants: bf16, fp32."""

import torch
import transformers
from pace import main

KV_TOKENS = 16_384
PAGE = 32


class Peer:
    def __init__(self, options):
        torch.set_num_threads(options.threads)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            options.model,
            dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[options.variant],
            attn_implementation="sdpa",
        ).eval()
        batching = transformers.ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=KV_TOKENS // PAGE,
            max_batch_tokens=512,
            max_requests_per_batch=16,
            allow_block_sharing=True,
        )
        greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=2, max_new_tokens=16)
        self._manager = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=batching)
        self._manager.start()
        self._index_of = {}
        self._sent = {}

    def start(self, index, request):
        name = f"r{len(self._index_of)}"
        self._index_of[name] = index
        self._sent[name] = 0
        self._manager.add_request(
            list(request["prompt_token_ids"]), request_id=name, max_new_tokens=request["max_tokens"], streaming=True
        )

    def poll(self):
        output = self._manager.get_result(timeout=1.0)
        if output is None:
            if not self._manager.is_running():
                raise SystemExit("the generation thread died")
            return []
        if output.error:
            raise SystemExit(str(output.error))
        count = len(output.generated_tokens) - self._sent[output.request_id]
        self._sent[output.request_id] += count
        return [(self._index_of[output.request_id], count, output.is_finished())]


if __name__ == "__main__":
    main(Peer, lambda: {"transformers": transformers.__version__, "torch": torch.__version__})
