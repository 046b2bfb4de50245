// Sums over the processes of one machine through memory that they share.
//
// Each rank publishes its numbers in a slot of its own and adds up the slots of all ranks in the same order, so that the
// results have the same bits. Two sets of slots are used in turn: a rank writes to a set again only after all ranks have
// published in the other one, and therefore have read this one. A rank that waits polls for a short time, then yields.
#pragma once

#include <cstdint>

namespace quire {

// Size of the shared memory, which must be zero at first and aligned to a cache line.
std::int64_t shared_sum_bytes(std::int64_t ranks);

// Adds up `count` floats over all ranks, in place; returns false if a rank did not take part within `timeout_s`.
bool shared_sum(void* shared, std::int64_t rank, std::int64_t ranks, float* data, std::int64_t count, double timeout_s);

}  // namespace quire
