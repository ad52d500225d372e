#include <nanobind/nanobind.h>

namespace foreword {
void bind_batch(nanobind::module_ &) {}
}
