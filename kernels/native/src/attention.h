// Attention of a whole batch: splits its rows into tasks for the decode and prefill kernels.
#pragma once

#include "levels.h"

namespace quire {

void attend_pages(const Kernels& kernels, const Attention& attention);
void attend_latents(const Kernels& kernels, const LatentAttention& attention);

}  // namespace quire
