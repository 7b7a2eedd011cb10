#include "timing/Trace.h"

#include "OsError.h"
#include "timing/VirtualClock.h"

#include <c10/util/Exception.h>

#include <cinttypes>
#include <cstdio>
#include <mutex>
#include <set>

namespace trn {

namespace {

constexpr int kHostTrack = -1;

struct TraceFile {
  std::mutex mutex;
  FILE* file = nullptr;
  std::string path;
  int rank = 0;
  std::set<int> tracks; // that have a name already
  int64_t memory_bytes = -1; // last written
  std::vector<std::string> names; // by name_id, escaped
};

TraceFile& trace() {
  static auto* instance = new TraceFile();
  return *instance;
}

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      result += '\\';
    }
    result += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return result;
}

const char* name_in(TraceFile& out, uint32_t id) {
  if (id >= out.names.size()) {
    out.names.resize(id + 1);
  }
  if (out.names[id].empty()) {
    out.names[id] = escaped(name_of(id));
  }
  return out.names[id].c_str();
}

// Times in the file are microseconds; with six decimals they are exact.
struct Microseconds {
  explicit Microseconds(Picoseconds ps) {
    std::snprintf(text, sizeof(text), "%" PRId64 ".%06" PRId64, ps / 1000000, ps % 1000000);
  }
  char text[32];
};

void name_track(TraceFile& out, int track, const char* kind) {
  if (!out.tracks.insert(track).second) {
    return;
  }
  const std::string label = track == kHostTrack ? "host" : c10::str("stream ", track, kind);
  std::fprintf(
      out.file,
      "{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"%s\"}},\n"
      "{\"ph\":\"M\",\"name\":\"thread_sort_index\",\"pid\":%d,\"tid\":%d,\"args\":{\"sort_index\":%d}},\n",
      out.rank,
      track,
      label.c_str(),
      out.rank,
      track,
      track);
}

void write_slice(
    TraceFile& out,
    int track,
    const char* name,
    Picoseconds start,
    Picoseconds end,
    const char* arguments) {
  std::fprintf(
      out.file,
      "{\"ph\":\"X\",\"name\":\"%s\",\"pid\":%d,\"tid\":%d,\"ts\":%s,\"dur\":%s,\"args\":{%s}},\n",
      name,
      out.rank,
      track,
      Microseconds(start).text,
      Microseconds(end - start).text,
      arguments);
}

void write_record(TraceFile& out, const Record& record) {
  char arguments[160];
  switch (record.activity) {
    case Activity::HostWait:
      name_track(out, kHostTrack, "");
      write_slice(out, kHostTrack, "wait", record.start, record.end, "");
      return;
    case Activity::Operator:
      name_track(out, record.stream, "");
      std::snprintf(
          arguments,
          sizeof(arguments),
          "\"engine\":\"%s\",\"hbm_bytes\":%" PRId64 ",\"flops\":%.0f,\"bound\":\"%s\"",
          engine_name(record.engine),
          record.bytes,
          record.flops,
          record.hbm_bound ? "hbm" : "engine");
      write_slice(out, record.stream, name_in(out, record.name), record.start, record.end, arguments);
      if (record.memory_bytes >= 0 && record.memory_bytes != out.memory_bytes) {
        out.memory_bytes = record.memory_bytes;
        std::fprintf(
            out.file,
            "{\"ph\":\"C\",\"name\":\"HBM allocated\",\"pid\":%d,\"ts\":%s,\"args\":{\"bytes\":%" PRId64 "}},\n",
            out.rank,
            Microseconds(record.start).text,
            record.memory_bytes);
      }
      return;
    case Activity::Collective: {
      name_track(out, record.stream, " (collectives)");
      const char* group = name_in(out, record.group);
      if (record.start > record.ready) {
        std::snprintf(arguments, sizeof(arguments), "\"sequence\":%" PRIu64, record.sequence);
        write_slice(out, record.stream, "wait for peers", record.ready, record.start, arguments);
      }
      std::snprintf(
          arguments,
          sizeof(arguments),
          "\"group\":\"%.60s\",\"sequence\":%" PRIu64 ",\"bytes\":%" PRId64,
          group,
          record.sequence,
          record.bytes);
      write_slice(out, record.stream, name_in(out, record.name), record.start, record.end, arguments);
      // One arrow through all members: they have the group's name and the sequence number in common.
      std::fprintf(
          out.file,
          "{\"ph\":\"%s\",\"cat\":\"collective\",\"name\":\"%s\",\"id\":\"%s:%d:%" PRIu64
          "\",\"pid\":%d,\"tid\":%d,\"ts\":%s,\"bp\":\"e\"},\n",
          record.first_rank == out.rank ? "s" : "t",
          group,
          group,
          record.first_rank,
          record.sequence,
          out.rank,
          record.stream,
          Microseconds(record.start).text);
      return;
    }
  }
}

} // namespace

void start_trace(const std::string& path, int rank) {
  TraceFile& out = trace();
  std::lock_guard<std::mutex> guard(out.mutex);
  TORCH_CHECK(out.file == nullptr, "neuron: a trace is being written to ", out.path, " already");
  out.file = std::fopen(path.c_str(), "w");
  TORCH_CHECK(out.file != nullptr, "neuron: cannot write the trace ", path, ": ", os_error());
  std::setvbuf(out.file, nullptr, _IOFBF, 1 << 20);
  out.path = path;
  out.rank = rank;
  std::fprintf(
      out.file,
      "[\n{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%d,\"args\":{\"name\":\"rank %d\"}},\n"
      "{\"ph\":\"M\",\"name\":\"process_sort_index\",\"pid\":%d,\"args\":{\"sort_index\":%d}},\n",
      rank,
      rank,
      rank,
      rank);
  set_tracing(true);
}

void flush_trace() {
  TraceFile& out = trace();
  std::lock_guard<std::mutex> guard(out.mutex);
  if (out.file == nullptr) {
    return;
  }
  for (const Record& record : take_trace()) {
    write_record(out, record);
  }
  TORCH_CHECK(std::fflush(out.file) == 0, "neuron: cannot write the trace ", out.path, ": ", os_error());
}

} // namespace trn
