// Tiles of AMX: eight registers of up to 16 rows of 64 bytes. With FOREWORD_EMULATE they are arrays in memory, and
// the same kernels run on any machine.
//
//   dot_i8    c[m][n] += Σ_k a[m][4 k + i] b[k][4 n + i]  for i = 0 … 3: signed bytes of a, unsigned ones of b
//   dot_s8    the same for signed bytes of both; dot_u8: for unsigned bytes of a, signed ones of b
//   dot_bf16  c[m][n] += (Σ_k a[m][2 k] b[k][2 n]) + (Σ_k a[m][2 k + 1] b[k][2 n + 1]), denormals as zeros
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(FOREWORD_EMULATE)
#include <cmath>
#endif

namespace foreword::kernels::FOREWORD_ISA {

constexpr int kTileRows = 16, kTileBytes = 64, kNumTiles = 8;
constexpr int kTileNumbers = kTileRows * kTileBytes / 4;  // numbers in a tile of sums

// The operand of `ldtilecfg`.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

#if !defined(FOREWORD_EMULATE)

inline __attribute__((always_inline)) void set_tile_shapes(const TileShapes &shapes) {
  asm volatile("ldtilecfg %0" ::"m"(shapes));
}
inline __attribute__((always_inline)) void release_tiles() { asm volatile("tilerelease"); }

template <int T>
inline __attribute__((always_inline)) void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
inline __attribute__((always_inline)) void tile_load(const void *from, size_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
// Does the same; the data that it reads does not displace other lines of the first-level cache.
template <int T>
inline __attribute__((always_inline)) void tile_load_once(const void *from, size_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline __attribute__((always_inline)) void tile_store(void *to, size_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
template <int C, int A, int B>
inline __attribute__((always_inline)) void dot_i8() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
inline __attribute__((always_inline)) void dot_s8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
inline __attribute__((always_inline)) void dot_u8() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
inline __attribute__((always_inline)) void dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#else

struct EmulatedTiles {
  TileShapes shapes;
  uint8_t data[kNumTiles][kTileRows][kTileBytes];
};
inline thread_local EmulatedTiles tiles;

inline void set_tile_shapes(const TileShapes &shapes) {
  tiles = {};
  tiles.shapes = shapes;
}
inline void release_tiles() { tiles = {}; }

template <int T>
void tile_zero() {
  std::memset(tiles.data[T], 0, sizeof tiles.data[T]);
}
template <int T>
void tile_load(const void *from, size_t stride) {
  tile_zero<T>();
  for (int row = 0; row < tiles.shapes.rows[T]; ++row) {
    const uint8_t *bytes = static_cast<const uint8_t *>(from) + stride * size_t(row);
    std::memcpy(tiles.data[T][row], bytes, tiles.shapes.row_bytes[T]);
  }
}
template <int T>
void tile_load_once(const void *from, size_t stride) {
  tile_load<T>(from, stride);
}
template <int T>
void tile_store(void *to, size_t stride) {
  for (int row = 0; row < tiles.shapes.rows[T]; ++row) {
    std::memcpy(static_cast<uint8_t *>(to) + stride * size_t(row), tiles.data[T][row], tiles.shapes.row_bytes[T]);
  }
}

// f(m, n, c[m][n]) of all numbers of tile C.
template <int C, class Number, class F>
void for_tile(F &&f) {
  for (int m = 0; m < tiles.shapes.rows[C]; ++m) {
    for (int n = 0; n < tiles.shapes.row_bytes[C] / 4; ++n) {
      Number number;
      std::memcpy(&number, &tiles.data[C][m][4 * n], 4);
      number = f(m, n, number);
      std::memcpy(&tiles.data[C][m][4 * n], &number, 4);
    }
  }
}

template <int C, int A, int B, class Left = int8_t, class Right = uint8_t>
void dot_i8() {
  for_tile<C, int32_t>([](int m, int n, int32_t sum) {
    for (int k = 0; k < tiles.shapes.row_bytes[A]; ++k) {
      sum += int32_t(Left(tiles.data[A][m][k])) * int32_t(Right(tiles.data[B][k / 4][4 * n + k % 4]));
    }
    return sum;
  });
}
template <int C, int A, int B>
void dot_s8() {
  dot_i8<C, A, B, int8_t, int8_t>();
}
template <int C, int A, int B>
void dot_u8() {
  dot_i8<C, A, B, uint8_t, int8_t>();
}

inline float tile_bf16(const uint8_t *at) {
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  const uint32_t wide = uint32_t(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return std::fpclassify(x) == FP_SUBNORMAL ? 0.f : x;
}

template <int C, int A, int B>
void dot_bf16() {
  for_tile<C, float>([](int m, int n, float number) {
    float sums[2] = {0.f, 0.f};
    for (int k = 0; k < tiles.shapes.row_bytes[A] / 2; ++k) {
      sums[k % 2] = std::fma(tile_bf16(&tiles.data[A][m][2 * k]), tile_bf16(&tiles.data[B][k / 2][4 * n + 2 * (k % 2)]),
                             sums[k % 2]);
    }
    return number + (sums[0] + sums[1]);
  });
}

#endif

}  // namespace foreword::kernels::FOREWORD_ISA
