// The limits of this machine with one instruction set, which the speed of kernels is compared with.
#pragma once

#include "kernels/isa.h"
#include "kernels/thread_pool.h"

namespace foreword::kernels {

// Per second, on all threads of a pool.
struct Roofline {
  double f32_flops, bf16_flops, i8_ops, memory_bytes;
};

// Best of a few rounds; memory is read from `megabytes` MiB.
Roofline measure_roofline(const Isa &isa, ThreadPool &pool, int megabytes);

}  // namespace foreword::kernels
