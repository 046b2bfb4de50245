"""The device: its choice, its streams and events, copies to it, and state that is kept on it.

* `choice` – chooses the device and the number of CPU threads; orders the start of workers on one GPU.
* `accelerator` – interface to CUDA streams, events, pinned memory and graphs.
* `upload` – copies an array to the device without waiting for steps in flight.
* `state` – row state on the device, which the host updates by changes.
* `compiling` – asks the scheduler for more time before a kernel is compiled.
"""
