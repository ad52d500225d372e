#include <nanobind/stl/vector.h>

#include "batch/bind.h"
#include "batch/vllm_fast_path.h"

namespace foreword {
namespace {

// `arrays`: the plan, by name.
void init_front(VllmFastPath *self, RowsCore &rows, const nb::dict &arrays, nb::handle observers,
                nb::handle adapter_of, nb::handle with_extras) {
  VllmFastPath &front = *new (self) VllmFastPath(rows, observers.ptr(), adapter_of.ptr(), with_extras.ptr());
  front.out_rows = pointer<int32_t>(arrays, "rows");
  front.out_counts = pointer<int32_t>(arrays, "num_scheduled");
  front.out_num_drafts = pointer<int32_t>(arrays, "num_drafts");
  front.out_draft_ids = pointer<int32_t>(arrays, "draft_ids");
  front.max_draft_ids = int64_t(nb::cast<Vector<int32_t>>(arrays["draft_ids"], false).shape(0));
}

}  // namespace

void bind_vllm(nb::module_ &m) {
  nb::class_<VllmFastPath>(m, "VllmFastPath", "The common step of foreword.batch.adapters.vllm over one RequestStates.")
      .def("__init__", &init_front, nb::keep_alive<1, 2>(),
           nb::sig("def __init__(self, rows: RowsCore, arrays: dict[str, " PY_ARRAY
                   "], observers: collections.abc.Sequence[object], adapter_of: collections.abc.Mapping[str, int], "
                   "with_extras: collections.abc.Container[int], /) -> None"))
      .def("apply", [](VllmFastPath &front, nb::handle output) { return front.apply(output.ptr()); },
           nb::sig("def apply(self, output: object, /) -> int"))
      .def("step",
           [](VllmFastPath &front, nb::handle cached, nb::handle num_scheduled, nb::handle drafts) {
             return front.step(cached.ptr(), num_scheduled.ptr(), drafts.ptr());
           },
           nb::arg(), nb::arg(), nb::arg().none(),
           nb::sig("def step(self, cached: object, num_scheduled: object, drafts: object, /) -> int"))
      .def("admit", [](VllmFastPath &front, nb::handle requests) { return front.admit(requests.ptr()); },
           nb::sig("def admit(self, requests: collections.abc.Sequence[typing.Any], /) -> bool"))
      .def("special", [](const VllmFastPath &front) { return front.special; })
      .def("finish", [](VllmFastPath &front, nb::handle ids) { return front.finish(ids.ptr()); },
           nb::sig("def finish(self, ids: object, /) -> bool"));
}

}  // namespace foreword
