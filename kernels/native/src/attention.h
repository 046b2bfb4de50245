// Attention of a whole batch: which rows go which way, and as which tasks.
#pragma once

#include "levels.h"

namespace quire {

void attend_pages(const Kernels& kernels, const Attention& attention);

}  // namespace quire
