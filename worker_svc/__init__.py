"""The worker service: one process per device that executes the scheduler's plans over a paged KV cache.

It decides nothing about requests or blocks. One plan comes in, one result goes out; follow it through the modules:

    main       the process: configuration, model, KV pool, signals, exit code
    identity   what the worker is called
    device     which device it computes on
    loop       takes plans from the link, keeps the engine busy, sends results
    link       the socket to the scheduler; one incarnation per Hello
    session    what the frames of one incarnation mean (pure; no socket, no clock)
    engine     plan in, result out, without a socket
    swap       blocks to host memory and back; block_copies: from block to block
    rows       the table of rows that a plan's differences change (block_tables, sampling_columns: parts of it)
    batch      the flat batch of one step, from the row table
    model/     decoders that compute logits over the paged cache
    sampler    logits to tokens (logits: penalties, biases and what is forbidden; grammars: masks and matchers;
               host_tokens: what these must see first)
    scores     log-probabilities of those that ask for them; pooling: embeddings instead of tokens
    executor   when the device computes: at once on a CPU, asynchronously on CUDA
    tracing    spans of steps and of rows

    accelerator    what of a GPU is used besides tensors; decode_graphs, device_state: steps that need little of a host
    kv_pool        how many KV blocks fit, and the blocks themselves
    profiling      the largest step there can be, run once on a GPU
    compiling      more time for a step that compiles a kernel first
    assembly       pool and engine for a loaded model, within its `limits`
    errors         what can go wrong with a step as a whole

The worker may import `shared`, `protos` and `kernels`, never the scheduler or the front end.
"""
