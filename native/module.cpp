// foreword._native. Each folder of native/ has a function that binds it.
#include <nanobind/nanobind.h>

#if defined(__linux__)
#include <malloc.h>
#endif

namespace foreword {
void bind_batch(nanobind::module_ &m);
void bind_kernels(nanobind::module_ &m);
}

NB_MODULE(_native, m) {
  // At exit the interpreter does not free what a thread or another module holds, which nanobind reports as a fault.
  nanobind::set_leak_warnings(false);
  m.doc() = "Native core of Foreword: batch preparation and CPU kernels.";
  m.def("trim_memory", [] {
#if defined(__GLIBC__)
    malloc_trim(0);
#endif
  }, "Give memory that was freed back to the system, where the C library would keep it.");
  foreword::bind_batch(m);
#ifdef FOREWORD_KERNELS
  foreword::bind_kernels(m);
#endif
}
