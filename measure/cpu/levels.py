"""Speed of the CPU kernels at every instruction level of this processor, compared with oneDNN: `make cpu-levels`.

`python -m measure.cpu.levels [--formats bf16,Q4_0] [--rows 1,16,128] [--inputs 1024] [--outputs 4096] [--seconds 3]`
measures matrix products over packed weights. All levels and a peer compute in turn, so that other programs on the
machine slow all of them alike. Each call uses the next of many weights, so that the weight comes from memory. With
`--num-threads 1`, times are CPU times of the process.

The peer is oneDNN (torch's packed products); for int4 weights with bf16 activations it is torch's own product. For the
types of GGUF, the peers are the best level's products over int8 and bf16 weights. The levels start from float32
activations, and torch from converted activations. The output is the median time of each, and the median ratio between
each peer and the best level in the same turn.

One row is limited by memory bandwidth. The last column compares the best level with a loop in which all threads only
read the weight: the loop's time divided by the level's time. Above 1, the product reads faster than that loop.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from kernels import gguf
from kernels.linear import PackedLinear, empty_weight, pack, quantise, quantise_int4
from kernels.native.library import Native, native_levels
from kernels.native.selftest import failure
from kernels.native.structures import STORE_FLOAT
from worker_svc.device.choice import set_threads

_WEIGHTS = 24
_FEWEST_TURNS = 5
_CALLS = 4
"""Calls in a turn. The first is not counted, because threads from the previous turn may still be waiting for work."""
_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8")

Product = Callable[[int], object]
"""Computes the product with the weight at this index."""
Peer = Callable[[torch.Tensor], Product]
"""Returns the product with these activations."""


@torch.inference_mode()
def main() -> None:
    """Measure and print a table for each format of weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="bf16,int8,int4,Q4_0,Q8_0,Q4_K,Q5_K,Q6_K")
    parser.add_argument("--rows", default="1,4,5,8,16,32,64,128,256,512")
    parser.add_argument("--inputs", type=int, default=1024)
    parser.add_argument("--outputs", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=3.0, help="least time for each number of rows")
    parser.add_argument("--num-threads", type=int, default=0, help="0: all cores")
    options = parser.parse_args()
    set_threads(options.num_threads)
    levels = _serving_levels()
    if not levels:
        raise SystemExit(
            "cpu-levels: the CPU kernels are not available on this machine; install Quire with a C++ compiler"
        )
    clock = time.process_time if options.num_threads == 1 else time.perf_counter
    print(
        f"{_processor()}, {options.num_threads or len(os.sched_getaffinity(0))} threads, load {os.getloadavg()[0]:.1f}"
    )
    for name in options.formats.split(","):
        weights = [torch.randn(options.outputs, options.inputs).bfloat16() for _ in range(_WEIGHTS)]
        packed = _OWN[name](weights, levels[0]) if name in _OWN else _gguf(name, weights)
        peers = _peers(name, weights, levels)
        print(f"\n{name}: {options.inputs} inputs, {options.outputs} outputs, {_WEIGHTS} weights; µs (GFLOP/s)")
        columns = [level.level_name for level in levels]
        print("rows  " + "".join(f"{each:>18}" for each in [*columns, *peers, "ratios"]))
        for rows in map(int, options.rows.split(",")):
            x = torch.randn(rows, options.inputs)
            products = [_by_level(packed, level, x) for level in levels]
            read = _read(packed, levels[0])
            times = _in_turn([*products, *(peer(x) for peer in peers.values()), read], options.seconds, clock)
            _print_line(
                rows, 2e-3 * rows * options.inputs * options.outputs, packed[0].tensors[0].nbytes, times, len(peers)
            )


def _serving_levels() -> list[Native]:
    """Return the levels that could serve here, the best one last."""
    return [level for level in native_levels() if level.level_name != "portable" and failure(level) is None]


def _processor() -> str:
    fields = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines())
    values = {key.strip(): value.strip() for key, value in fields.items()}
    flags = [flag for flag in _FLAGS if flag in values.get("flags", "").split()]
    return f"{values.get('model name', 'unknown processor')}: {' '.join(flags)}"


def _bf16(weights: list[torch.Tensor], kernels: Native) -> list[PackedLinear]:
    packed = []
    for weight in weights:
        destination = empty_weight(weight.shape[0], weight.shape[1], weight.dtype)
        destination.copy_(weight)
        packed.append(pack(destination, kernels=kernels))
    return packed


def _int8(weights: list[torch.Tensor], kernels: Native) -> list[PackedLinear]:
    return [quantise(weight, kernels=kernels) for weight in weights]


def _int4(weights: list[torch.Tensor], kernels: Native) -> list[PackedLinear]:
    return [quantise_int4(weight, kernels=kernels) for weight in weights]


def _gguf(kind: str, weights: list[torch.Tensor]) -> list[PackedLinear]:
    """Pack random codes with scales from 1 to 2; the time does not depend on them."""
    shape = (*weights[0].shape[:1], weights[0].shape[1] // gguf.block_inputs(kind), gguf.BLOCK_BYTES[kind])
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8)
    for at in gguf.scales_at(kind):
        blocks[..., at + 1] = 0x3C
    return [gguf.pack(kind, blocks) for _ in weights]


_OWN = {"bf16": _bf16, "int8": _int8, "int4": _int4}


def _peers(name: str, weights: list[torch.Tensor], levels: list[Native]) -> dict[str, Peer]:
    """Return the other products that are measured, by name."""
    if name in _ONEDNN:
        return {"torch" if name == "int4" else "oneDNN": _ONEDNN[name](weights)}
    best = levels[-1]
    others = {kind: _OWN[kind](weights, best) for kind in ("int8", "bf16")}
    return {f"{best.level_name} {kind}": partial(_by_level, packed, best) for kind, packed in others.items()}


def _read(packed: list[PackedLinear], kernels: Native) -> Product:
    bytes_of = [(linear.tensors[0].data_ptr(), linear.tensors[0].nbytes) for linear in packed]
    return lambda i: kernels.library.quire_read(*bytes_of[i])


def _by_level(packed: list[PackedLinear], kernels: Native, x: torch.Tensor) -> Product:
    first = packed[0]
    out = torch.empty(len(x), first.outputs)
    return lambda i: kernels.linear(packed[i].structure, x, out, STORE_FLOAT, first.outputs)


def _onednn_bf16(weights: list[torch.Tensor]) -> Peer:
    def product(x: torch.Tensor) -> Product:
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight, len(x)) for weight in weights]
        narrow = x.bfloat16()
        return lambda i: torch.ops.mkldnn._linear_pointwise(narrow, packed[i], None, "none", [], "")

    return product


def _onednn_int8(weights: list[torch.Tensor]) -> Peer:
    scales = [weight.float().abs().amax(1) / 127 for weight in weights]
    rounded = [
        (weight.float() / scale[:, None]).round().to(torch.int8) for weight, scale in zip(weights, scales, strict=True)
    ]
    zeros = torch.zeros(len(weights[0]), dtype=torch.int32)

    def product(x: torch.Tensor) -> Product:
        packed = [torch.ops.onednn.qlinear_prepack(weight, list(x.shape)) for weight in rounded]
        scale = float(x.abs().amax()) / 127
        narrow = ((x / scale).round() + 128).to(torch.uint8)
        pointwise = torch.ops.onednn.qlinear_pointwise
        return lambda i: pointwise(
            narrow, scale, 128, packed[i], scales[i], zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )

    return product


def _torch_int4(weights: list[torch.Tensor]) -> Peer:
    group = 64
    packed = []
    for weight in weights:
        groups = weight.float().view(len(weight), -1, group)
        scales = groups.abs().amax(-1) / 7
        values = (groups / scales[..., None]).round().int() + 8
        both = torch.stack((scales, torch.zeros_like(scales)), -1).transpose(0, 1).contiguous().bfloat16()
        packed.append((torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.flatten(1), 1), both))

    def product(x: torch.Tensor) -> Product:
        narrow = x.bfloat16()
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        return lambda i: multiply(narrow, packed[i][0], group, packed[i][1])

    return product


_ONEDNN = {"bf16": _onednn_bf16, "int8": _onednn_int8, "int4": _torch_int4}


def _in_turn(products: list[Product], seconds: float, clock: Callable[[], float]) -> list[list[float]]:
    """Return the microseconds of each product in each turn."""
    times: list[list[float]] = [[] for _ in products]
    end, turn = time.perf_counter() + seconds, 0
    while turn < _FEWEST_TURNS or time.perf_counter() < end:
        for place, product in enumerate(products):
            # All levels share the weights. Start each level at another weight, so that it does not read one that is
            # still cached.
            first = turn * _CALLS + place * _WEIGHTS // len(products)
            calls = [_microseconds(product, (first + call) % _WEIGHTS, clock) for call in range(_CALLS)]
            times[place].append(statistics.median(calls[1:]))
        turn += 1
    return times


def _microseconds(product: Product, number: int, clock: Callable[[], float]) -> float:
    began = clock()
    product(number)
    return (clock() - began) * 1e6


def _print_line(rows: int, kiloflop: float, weight_bytes: int, times: list[list[float]], num_peers: int) -> None:
    """Print one line; `times` contains the times for the levels, for the peers, and for reading a weight."""
    *products, read = times
    levels, peers = products[: len(products) - num_peers], products[len(products) - num_peers :]
    best = min(levels, key=statistics.median)
    cells = [f"{statistics.median(each):,.0f} ({kiloflop / statistics.median(each):,.0f})" for each in products]
    cells.extend(f"{_median_ratio(peer, best):.2f}" for peer in peers)
    if rows == 1:
        read_speed = weight_bytes / statistics.median(read) / 1e3
        cells.append(f"{_median_ratio(read, best):.2f} of {read_speed:.1f} GB/s")
    print(f"{rows:>4}  " + "".join(f"{cell:>18}" for cell in cells), flush=True)


def _median_ratio(first: list[float], second: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(first, second, strict=True))


if __name__ == "__main__":
    main()
