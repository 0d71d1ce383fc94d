// One tile of a launch.
#pragma once

namespace flashjit::device {

struct TileIndex {
  int batch, head_q, m_block;  // head_q: the first of packed heads
};

}  // namespace flashjit::device
