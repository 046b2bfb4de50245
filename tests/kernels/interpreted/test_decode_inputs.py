"""The kernels that bring a step's changes to the device and make its inputs there, against their references."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.decode_inputs import DecodeInputs, prepare_decode, prepare_decode_reference
from kernels.scatter import scatter_words, scatter_words_reference
from tests.examples import examples


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**31), st.data())
def test_scatter_words(size: int, seed: int, data: st.DataObject) -> None:
    """Any number of words, none and more than one program's included, arrive at their places and nowhere else."""
    generator = torch.Generator().manual_seed(seed)
    count = data.draw(st.integers(0, size))
    places = torch.randperm(size, generator=generator)[:count]
    values = torch.randint(-(2**31), 2**31 - 1, (count,), generator=generator)
    changes = torch.stack((places, values)).int()
    ours, expected = torch.full((2, size), -7, dtype=torch.int32)
    scatter_words(ours, changes)
    scatter_words_reference(expected, changes)

    assert torch.equal(ours, expected)


@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_prepare_decode(data: st.DataObject) -> None:
    """Any lanes, including empty ones, with tables shorter and longer than one program's part."""
    block_size = data.draw(st.sampled_from([8, 16, 24, 128]))
    num_rows = data.draw(st.integers(1, 6))
    max_blocks = data.draw(st.sampled_from([1, 5, 1030]))
    lanes = data.draw(st.permutations(range(num_rows))) + [-1] * data.draw(st.integers(0, 3))
    lane_rows = torch.tensor(data.draw(st.permutations(lanes)), dtype=torch.int32)
    num_lanes = len(lane_rows)
    computed = torch.tensor(
        [data.draw(st.integers(0, max_blocks * block_size - 1)) for _ in range(num_lanes)], dtype=torch.int32
    )
    last_token = torch.randint(0, 200_000, (num_rows + 1,))
    tables = torch.randint(0, 1 << 24, (num_rows, max_blocks)).int()
    results = []
    for prepare in (prepare_decode, prepare_decode_reference):
        wide = torch.full((4, num_lanes), 99)
        narrow, counts = torch.full((num_lanes,), 98, dtype=torch.int32), computed.clone()
        out = DecodeInputs(
            wide[0], wide[1], wide[2], wide[3], narrow, torch.full((num_lanes, max_blocks), 97, dtype=torch.int32)
        )
        prepare(lane_rows, counts, last_token, tables, block_size, out)
        results.append((*wide, narrow, out.block_tables, counts))

    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)
    padding = lane_rows < 0
    assert (results[0][2][padding] == -1).all(), "a lane without a row writes no KV"
    assert (results[0][4][padding] == 0).all()
