// Finds the line of the user's program that makes a call, on every call: so it must cost next to nothing. c10d calls us
// without the interpreter lock. The frames of the own thread cannot change while it is in here, so they are read where they
// lie, and the lock is taken only for a line that was not met before.

#define Py_BUILD_CORE 1
#include <Python.h>
#if PY_VERSION_HEX < 0x030D0000
#include <internal/pycore_frame.h>
#endif
#undef Py_BUILD_CORE

#include "c10d/CallSite.h"

#include "fabric/CallSite.h"
#include "fabric/ControlBlock.h"

#include <c10/util/flat_hash_map.h>

#include <cstring>
#include <mutex>
#include <string>
#include <utility>

namespace trn {

#if PY_VERSION_HEX < 0x030D0000

namespace {

constexpr int kDeepestFrame = 128;
constexpr size_t kMostSites = 4096; // a program that makes its code anew in a loop must not fill the arena

struct Line {
  PyCodeObject* code;
  int instruction; // bytes from the code's begin
  bool operator==(const Line& other) const {
    return code == other.code && instruction == other.instruction;
  }
};

struct LineHash {
  size_t operator()(const Line& line) const {
    return reinterpret_cast<size_t>(line.code) / 64 * 31 + static_cast<size_t>(line.instruction);
  }
};

// Of one thread: no lock. Codes are kept alive, so that an address stands for one code for ever.
struct KnownLines {
  ska::flat_hash_map<PyCodeObject*, bool> of_library;
  ska::flat_hash_map<Line, uint64_t, LineHash> sites;
};

bool in_library(PyCodeObject* code) {
  const char* file = PyUnicode_AsUTF8(code->co_filename);
  if (file == nullptr) {
    PyErr_Clear();
    return true;
  }
  return std::strstr(file, "/site-packages/torch/") != nullptr || std::strstr(file, "/trn_dist/neuron/") != nullptr ||
      std::strncmp(file, "<frozen ", 8) == 0;
}

uint64_t make_site(const Line& line) {
  const char* file = PyUnicode_AsUTF8(line.code->co_filename);
  const char* function = PyUnicode_AsUTF8(line.code->co_name);
  std::string text = "?";
  if (file != nullptr && function != nullptr) {
    text =
        std::string(file) + ":" + std::to_string(PyCode_Addr2Line(line.code, line.instruction)) + " (" + function + ")";
  }
  PyErr_Clear();
  Py_INCREF(reinterpret_cast<PyObject*>(line.code));
  return intern_call_site(text);
}

template <typename F>
auto with_interpreter(F f) {
  const PyGILState_STATE state = PyGILState_Ensure();
  auto result = f();
  PyGILState_Release(state);
  return result;
}

} // namespace

uint64_t python_call_site() {
  PyThreadState* thread = PyGILState_GetThisThreadState();
  if (thread == nullptr || thread->cframe == nullptr) {
    return kNoOffset;
  }
  static thread_local KnownLines known;
  Line line{nullptr, 0};
  int depth = 0;
  for (const _PyInterpreterFrame* frame = thread->cframe->current_frame; frame != nullptr && depth < kDeepestFrame;
       frame = frame->previous, ++depth) {
    PyCodeObject* code = frame->f_code;
    auto entry = known.of_library.find(code);
    if (entry == known.of_library.end()) {
      const bool library = with_interpreter([&] {
        Py_INCREF(reinterpret_cast<PyObject*>(code));
        return in_library(code);
      });
      entry = known.of_library.emplace(code, library).first;
    }
    // Where all are of a library, as on a thread of autograd, the outermost.
    line = {
        code,
        _PyInterpreterFrame_LASTI(const_cast<_PyInterpreterFrame*>(frame)) * static_cast<int>(sizeof(_Py_CODEUNIT))};
    if (!entry->second) {
      break;
    }
  }
  if (line.code == nullptr) {
    return kNoOffset;
  }
  const auto site = known.sites.find(line);
  if (site != known.sites.end()) {
    return site->second;
  }
  if (known.sites.size() >= kMostSites) {
    return kNoOffset;
  }
  const uint64_t offset = with_interpreter([&] { return make_site(line); });
  known.sites.emplace(line, offset);
  return offset;
}

#else

// The layout of frames is another one in each version of Python.
uint64_t python_call_site() {
  return kNoOffset;
}

#endif

} // namespace trn
