#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include "batch/sampling_probe.h"
#include "batch/vllm_front.h"

namespace nb = nanobind;

namespace foreword {
namespace {

template <class T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
T *pointer(const nb::dict &arrays, const char *name) {
  return nb::cast<Vector<T>>(arrays[name]).data();
}

// `arrays`: num_placeholders and the plan, by name.
VllmFront make_front(RowsCore &rows, const nb::dict &arrays) {
  VllmFront front;
  front.rows = &rows;
  front.placeholders = pointer<int32_t>(arrays, "num_placeholders");
  front.out_rows = pointer<int32_t>(arrays, "rows");
  front.out_counts = pointer<int32_t>(arrays, "num_scheduled");
  front.out_num_drafts = pointer<int32_t>(arrays, "num_drafts");
  front.out_draft_ids = pointer<int32_t>(arrays, "draft_ids");
  front.max_draft_ids = int64_t(nb::cast<Vector<int32_t>>(arrays["draft_ids"]).shape(0));
  return front;
}

}  // namespace

void bind_vllm(nb::module_ &m) {
  nb::class_<SamplingProbe>(m, "SamplingProbe", "Which of the last batches this is, by its rows and their parameters.")
      .def("__init__",
           [](SamplingProbe *self, Vector<const int32_t> needs, Vector<const int64_t> stamp) {
             new (self) SamplingProbe{};
             self->needs = needs.data();
             self->stamp = stamp.data();
           })
      .def("look", [](SamplingProbe &probe, Vector<const int32_t> rows, int64_t version) {
        const SamplingProbe::Answer a = probe.look(rows.data(), int64_t(rows.shape(0)), version);
        return nb::make_tuple(a.slot, a.known, a.needs);
      });
  nb::class_<VllmFront>(m, "VllmFront", "The common step of foreword.batch.adapters.vllm over one RequestStates.")
      .def("__init__",
           [](VllmFront *self, RowsCore &rows, const nb::dict &arrays) { new (self) VllmFront(make_front(rows, arrays)); },
           nb::keep_alive<1, 2>())
      .def("step", [](VllmFront &front, nb::handle cached, nb::handle num_scheduled, nb::handle drafts) {
        return front.step(cached.ptr(), num_scheduled.ptr(), drafts.ptr());
      }, nb::arg(), nb::arg(), nb::arg().none())
      .def("admit", [](VllmFront &front, nb::handle requests, int64_t first_content_id, int64_t stamp) {
        std::vector<int32_t> special;
        const bool done = front.admit(requests.ptr(), first_content_id, stamp, special);
        return nb::make_tuple(done, special);
      })
      .def("finish", [](VllmFront &front, nb::list ids, int64_t first_content_id, int64_t stamp) {
        return front.finish(ids.ptr(), first_content_id, stamp);
      });
}

}  // namespace foreword
