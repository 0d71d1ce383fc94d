// One tile of a launch.
#pragma once

namespace flashjit::device {

struct TileIndex {
  int batch, head_q, m_block;  // of packed heads the first one
};

}  // namespace flashjit::device
