"""Worker service: one process per device that executes the scheduler's plans over a paged KV cache.

The worker makes no decisions about requests or blocks. It receives one plan and returns one result per step. The
modules, in the order in which a plan passes through them:

    main       the process: configuration, model, KV cache, signals, exit code
    identity   the name of the worker
    device     the choice of the device, and copies to it
    loop       takes plans from the link, runs them on the engine, sends results
    link       the socket to the scheduler; one incarnation per Hello
    session    the plan protocol of one incarnation (pure: no socket, no clock)
    engine     executes a plan and returns its result, without a socket
    swap       copies blocks to host memory and back; block_copies: copies between device blocks
    rows       the row table, which each plan updates (block_tables and sampling_columns are parts of it)
    batch      builds the flat batch of one step from the row table
    model/     decoders that compute logits over the paged KV cache
    sampler    turns logits into tokens (logits: penalties, biases, forbidden tokens; grammars: masks and matchers;
               host_tokens: copies the last tokens to the host for both)
    scores     log-probabilities; pooling: embeddings
    executor   runs a step on the device: synchronously on a CPU, asynchronously on CUDA
    tracing    spans of steps and rows

    accelerator    interface to CUDA streams, events and graphs (decode_graphs, device_state: captured decode steps)
    kv_pool        number of KV blocks that fit into memory, and their tensors
    profiling      runs the largest possible step once on a GPU to measure its memory
    compiling      asks the scheduler for more time before a kernel is compiled
    assembly       builds the engine for a loaded model (limits: the worker's limits)
    errors         the error of an invalid plan

The worker may import `shared`, `protos` and `kernels`, never the scheduler or the front end.
"""
