// Matrix products of blocked attention by AMX, for heads of more than 64 columns. Products wait in a queue;
// the softmax executes them in steps between its own instructions.
#pragma once

#include "cpu/bf16_operands.h"

namespace flashjit::device {

// Tiles of an operand. `next`: bytes to the tile of the next 16 rows (of a) or query rows (of b);
// `next_terms`: bytes to the tile of the next 32 terms of the sum; `row`: bytes to the next row of a tile.
struct Tiles {
  const char* data;
  i64 next, next_terms, row;
};

// out = a b, or out += a b if `add`, for `groups` times 32 rows and for 32 query rows. A group's sums stay in
// tile registers 0 to 3. Registers 4 to 7 hold tiles of a and b, each loaded once for two products.
struct Multiplication {
  Tiles a, b;
  char* out;
  i64 out_row;  // bytes
  int terms, groups;
  bool add;
};

// A queue of multiplications, executed one after the other. A step is four products of tiles. Vector
// instructions between two steps run beside the products.
class TileQueue {
 public:
  FLASHJIT_FN void add(const Multiplication& m) {
    if (m.groups == 0 || m.terms == 0) return;
    if (size_ == 0) {
      now_ = m;
      begin();
    } else {
      next_ = m;
    }
    ++size_;
  }

  FLASHJIT_FN void step() {
    if (size_ == 0) return;
    if (term_ == 0) {
      if (now_.add) {
        for_each_sum([&](auto tile, char* p)
                         __attribute__((always_inline)) { load_tile<tile.index>(p, now_.out_row); });
      } else {
        zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
      }
    }
    add_product<0, 4, 6>(), add_product<1, 4, 7>(), add_product<2, 5, 6>(), add_product<3, 5, 7>();
    if (++term_ < now_.terms) {
      load(now_.a.data + term_ * now_.a.next_terms, now_.b.data + term_ * now_.b.next_terms);
    } else {
      end_group();
    }
  }
  __attribute__((noinline)) void finish() {
    while (size_ != 0) step();
  }

 private:
  template <int index_>
  struct Tile {
    static constexpr int index = index_;
  };
  template <class F>
  FLASHJIT_FN void for_each_sum(F f) const {
    char* const lower = now_.out + 16 * now_.out_row;
    f(Tile<0>{}, now_.out);
    f(Tile<1>{}, now_.out + 64);
    f(Tile<2>{}, lower);
    f(Tile<3>{}, lower + 64);
  }
  FLASHJIT_FN void load(const char* a, const char* b) const {
    load_tile<6>(b, now_.b.row);
    load_tile<4>(a, now_.a.row);
    load_tile<7>(b + now_.b.next, now_.b.row);
    load_tile<5>(a + now_.a.next, now_.a.row);
  }
  FLASHJIT_FN void begin() {
    term_ = 0;
    load(now_.a.data, now_.b.data);
  }
  // Loads do not overtake stores, so the tiles of the next group are loaded before this group's sums are
  // stored.
  FLASHJIT_FN void end_group() {
    char* const out = now_.out;
    const i64 row = now_.out_row;
    now_.a.data += 2 * now_.a.next;
    now_.out += 32 * row;
    if (--now_.groups == 0) {
      now_ = next_;
      --size_;
    }
    if (size_ > 0) begin();
    store_tile<0>(out, row);
    store_tile<1>(out + 64, row);
    store_tile<2>(out + 16 * row, row);
    store_tile<3>(out + 16 * row + 64, row);
  }

  Multiplication now_, next_;
  int size_ = 0;  // multiplications in the queue: now_, then next_
  int term_ = 0;  // the next 32 terms of the present group
};

template <class Spec, class Config>
struct AmxProducts : TileRegisters, Bf16Operands<Spec, Config> {
  using Operands = Bf16Operands<Spec, Config>;
  using Operands::k_tiles, Operands::v_tiles, Operands::tile, Operands::vectors, Operands::unit_rows;

  static constexpr int step_n = Operands::keys;
  static constexpr int score_blocks = 3;
  static constexpr bool ahead = true;
  // The softmax calls advance() every `step_keys` keys of a vector of rows. Each call takes a step of the
  // queue. The products of two units then take as long as the softmax.
  static constexpr int step_keys = 64 / (k_tiles + v_tiles / 2) / 2 * 2;

  FLASHJIT_FN void scores(int, const bf16* k, const bf16* q, float* s, Span keys) {
    queue.add({{bytes(k + keys.begin / 16 * k_tiles * tile), k_tiles * 1024, 1024, 64},
               {bytes(q), 1024, vectors * 1024, 64},
               reinterpret_cast<char*>(s + keys.begin * unit_rows),
               4 * unit_rows,
               k_tiles,
               keys.size() / 32,
               false});
  }

  __attribute__((noinline)) void add_product(int, const bf16* v, const float* p, const float* alpha, float* o,
                                             Span keys) {
    Operands::rescale(alpha, o, keys);
    queue.add({{bytes(v + keys.begin / 32 * v_tiles * tile), 1024, v_tiles * 1024, 64},
               {bytes(p), 64, 64 * unit_rows, 4 * unit_rows},
               reinterpret_cast<char*>(o),
               4 * unit_rows,
               keys.size() / 32,
               v_tiles / 2,
               alpha != nullptr});
  }
  FLASHJIT_FN void advance() { queue.step(); }
  FLASHJIT_FN void finish() { queue.finish(); }

 private:
  TileQueue queue;
  using Operands::bytes;
};

}  // namespace flashjit::device
