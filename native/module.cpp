// foreword._native: each folder of native/ binds itself here.
#include <nanobind/nanobind.h>

namespace foreword {
void bind_batch(nanobind::module_ &m);
void bind_kernels(nanobind::module_ &m);
}

NB_MODULE(_native, m) {
  m.doc() = "Native core of Foreword: step preparation, block pool, CPU kernels.";
  foreword::bind_batch(m);
  foreword::bind_kernels(m);
}
