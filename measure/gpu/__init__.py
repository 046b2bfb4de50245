"""`make gpu PART=…`: every measurement that needs a GPU, as commands of minutes each.

    kernels    kernels against float64 references on the device, then their speed (`quire bench kernels`)
    weights    products with quantised weights, and decode steps of a model that is quantised at load
    decode     decode and prefill of two model shapes through the real three processes, compared with the roofline;
               greedy tokens of a small float32 model on CPU and GPU
    workloads  nano-vllm's workload and one like ShareGPT, offline
    peers      the same workloads on `transformers`: generate in static batches, and continuous batching

A part is a list of items. Each item's results are written to the part's JSON immediately. An item is skipped if the
JSON already has its results for this commit and device. No item starts after the time limit. Run the same command again
to continue. With `--rehearse`, everything runs with a tiny model, on a CPU if there is no GPU. The JSON then marks the
numbers as meaningless.
"""
