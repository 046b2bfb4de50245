"""Access to the device: choice, streams and events, copies to the device, and state on the device.

* `choice` – chooses the device and the number of CPU threads; makes workers on one GPU start one after the other.
* `accelerator` – interface to CUDA streams, events, pinned memory and graphs.
* `upload` – copies an array to the device without waiting for steps in flight.
* `state` – row state on the device, which the host updates by changes.
* `compiling` – asks the scheduler for more time before a kernel is compiled.
"""
