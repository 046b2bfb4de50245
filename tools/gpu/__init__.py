"""`make gpu PART=…`: everything that only a GPU can tell, as commands of minutes each.

    kernels    kernels against float64 references on the device, then what they reach (`quire bench kernels`)
    decode     decode and prefill of two model shapes through the real three processes, beside the roofline;
               greedy tokens of a small float32 model on CPU and GPU
    workloads  nano-vllm's workload and one like ShareGPT, offline
    peers      the same by `transformers`: generate in static batches, and continuous batching

A part is a list of items. What an item gave is written to the part's JSON at once; an item that is there already, for
this commit and device, is not run again, and no item begins once the time is up: run the same command again to go on.
With `--rehearse` everything runs with a tiny model, on a CPU if there is no GPU; its figures mean nothing, and the JSON
says so.
"""
