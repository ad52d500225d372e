// Attributes of Python objects of one type, such as the fields of a dataclass or of a msgspec.Struct.
#pragma once

#include <Python.h>
#include <structmember.h>

#include <array>
#include <memory>

namespace foreword {

struct Release {
  void operator()(PyObject *o) const { Py_XDECREF(o); }
};
using Owned = std::unique_ptr<PyObject, Release>;

// An attribute that may be missing. The result is then null, with no error set.
inline Owned attribute(PyObject *object, PyObject *name) {
  PyObject *value = PyObject_GetAttr(object, name);
  if (!value) PyErr_Clear();
  return Owned(value);
}

// Some attributes of one object after another. Those that the type keeps in slots are read from memory; where they are
// is found once per type.
template <size_t kCount>
class Attributes {
 public:
  explicit Attributes(const std::array<const char *, kCount> &names) {
    for (size_t i = 0; i < kCount; ++i) names_[i] = PyUnicode_InternFromString(names[i]);
  }

  // Set the object that `get` reads.
  void of(PyObject *object) {
    object_ = object;
#if !defined(Py_LIMITED_API)
    const PyTypeObject *type = Py_TYPE(object);
    if (type == type_ && type->tp_version_tag == version_) return;  // no two states of types have the same version
    offsets_.fill(0);
    for (size_t i = 0; i < kCount; ++i) offsets_[i] = slot_of(Py_TYPE(object), names_[i]);
    version_ = type->tp_version_tag;
    type_ = version_ ? type : nullptr;
#endif
  }

  Owned get(size_t i) const {
#if !defined(Py_LIMITED_API)
    if (offsets_[i])
      if (PyObject *value = *reinterpret_cast<PyObject **>(reinterpret_cast<char *>(object_) + offsets_[i])) {
        Py_INCREF(value);
        return Owned(value);
      }
#endif
    return attribute(object_, names_[i]);
  }

 private:
  std::array<PyObject *, kCount> names_;
  PyObject *object_ = nullptr;
#if !defined(Py_LIMITED_API)
  // The offset of the attribute in objects of the type; 0 if it is not in a slot.
  static Py_ssize_t slot_of(PyTypeObject *type, PyObject *name) {
    if (type->tp_getattro != PyObject_GenericGetAttr) return 0;
    const Owned found = attribute(reinterpret_cast<PyObject *>(type), name);
    if (!found || !Py_IS_TYPE(found.get(), &PyMemberDescr_Type)) return 0;
    const auto *slot = reinterpret_cast<const PyMemberDescrObject *>(found.get());
    const int kind = slot->d_member->type;
    const bool holds = PyType_IsSubtype(type, slot->d_common.d_type) && (kind == T_OBJECT_EX || kind == T_OBJECT);
    return holds ? slot->d_member->offset : 0;
  }

  const PyTypeObject *type_ = nullptr;
  unsigned int version_ = 0;
  std::array<Py_ssize_t, kCount> offsets_{};
#endif
};

}  // namespace foreword
