#include "fabric/Exchange.h"

#include "OsError.h"
#include "fabric/CallSite.h"
#include "fabric/Copy.h"
#include "fabric/Reduce.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <sstream>

namespace trn {

namespace {

// Ranks as "rank 3" or "ranks 0-2, 5".
std::string list_ranks(const std::vector<int>& ranks) {
  std::ostringstream text;
  text << (ranks.size() == 1 ? "rank " : "ranks ");
  for (size_t i = 0; i < ranks.size();) {
    size_t j = i;
    while (j + 1 < ranks.size() && ranks[j + 1] == ranks[j] + 1) {
      ++j;
    }
    text << (i ? ", " : "") << ranks[i];
    if (j > i) {
      text << (j > i + 1 ? "-" : ", ") << ranks[j];
    }
    i = j + 1;
  }
  return text.str();
}

// Where an all_reduce's range of a rank begins: whole cache lines.
uint64_t share_begin(uint64_t total, int rank, int size) {
  if (rank == size) {
    return total;
  }
  const uint64_t lines = total / 64;
  return lines / size * rank * 64 + std::min<uint64_t>(lines % size, rank) * 64;
}

constexpr uint64_t kScratchBytes = 512 << 10;

struct alignas(64) Line {
  std::byte bytes[64];
};

// Of this thread, for what passes through between two other ranks' private memory.
std::byte* scratch() {
  thread_local std::vector<Line> buffer(kScratchBytes / sizeof(Line));
  return buffer[0].bytes;
}

} // namespace

const char* collective_name(Collective collective) {
  static constexpr std::array<const char*, 9> names = {
      "barrier",
      "all_reduce",
      "reduce",
      "reduce_scatter",
      "broadcast",
      "all_gather",
      "gather",
      "scatter",
      "all_to_all"};
  const auto index = static_cast<size_t>(collective);
  return index < names.size() ? names[index] : "?";
}

const char* dtype_name(c10::ScalarType dtype) {
  using c10::ScalarType;
  switch (dtype) {
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::UInt16:
      return "uint16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::UInt32:
      return "uint32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::UInt64:
      return "uint64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::ComplexHalf:
      return "complex32";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Float8_e4m3fnuz:
      return "float8_e4m3fnuz";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    case ScalarType::Float8_e5m2fnuz:
      return "float8_e5m2fnuz";
    default:
      return c10::toString(dtype);
  }
}

bool is_reduction(Collective collective) {
  return collective == Collective::AllReduce || collective == Collective::Reduce ||
      collective == Collective::ReduceScatter;
}

bool has_root(Collective collective) {
  return collective == Collective::Reduce || collective == Collective::Broadcast || collective == Collective::Gather ||
      collective == Collective::Scatter;
}

std::string describe(const Post& post) {
  std::ostringstream text;
  text << collective_name(post.operation);
  if (is_reduction(post.operation) && has_root(post.operation)) {
    text << "(" << reduction_name(post.reduction) << ", root " << post.root << ")";
  } else if (is_reduction(post.operation)) {
    text << "(" << reduction_name(post.reduction) << ")";
  } else if (has_root(post.operation)) {
    text << "(root " << post.root << ")";
  }
  if (post.operation == Collective::Barrier) {
    return text.str();
  }
  text << " of " << dtype_name(post.dtype) << " [";
  for (int i = 0; i < std::min<int>(post.ndim, kMaxShape); ++i) {
    text << (i ? ", " : "") << post.shape[i];
  }
  text << (post.ndim > kMaxShape ? ", ...]" : "]");
  const uint32_t count = std::max(post.num_inputs, post.num_outputs);
  if (count > 1) {
    text << " and " << count - 1 << " more";
  }
  return text.str();
}

Exchange::Exchange(
    const ControlBlock& control,
    uint64_t sequence,
    int rank,
    const Fabric& fabric,
    const std::vector<int>& arena_ranks,
    const std::vector<PrivateMemory>& private_memory)
    : size_(control.size()), rank_(rank), private_memory_(&private_memory) {
  views_.reserve(size_);
  for (int r = 0; r < size_; ++r) {
    const Post& post = control.post(sequence, r);
    const Fabric::Peer& peer = fabric.peer(arena_ranks[r]);
    const Span* spans = post.spans;
    if (post.spans_offset != kNoOffset) {
      spans = reinterpret_cast<const Span*>(peer.base + post.spans_offset);
    }
    views_.push_back({&post, &peer, peer.base, peer.size, spans});
  }
}

Span Exchange::input(int rank, uint32_t tensor, int part) const {
  const View& view = views_[rank];
  if (view.post->chunked_inputs) {
    const Span whole = view.spans[tensor];
    const uint64_t chunk = whole.nbytes / size_;
    return {whole.offset + chunk * part, chunk};
  }
  const bool list = view.post->operation == Collective::ReduceScatter || view.post->operation == Collective::AllToAll ||
      view.post->operation == Collective::Scatter;
  return view.spans[list ? tensor * size_ + part : tensor];
}

Span Exchange::output(int rank, uint32_t tensor, int part) const {
  const View& view = views_[rank];
  const Span* outputs = view.spans + view.post->num_inputs;
  if (view.post->chunked_outputs) {
    const Span whole = outputs[tensor];
    const uint64_t chunk = whole.nbytes / size_;
    return {whole.offset + chunk * part, chunk};
  }
  const bool list = view.post->operation == Collective::AllGather || view.post->operation == Collective::AllToAll ||
      view.post->operation == Collective::Gather;
  return outputs[list ? tensor * size_ + part : tensor];
}

uint32_t Exchange::tensors() const {
  const Post& post = *views_[0].post;
  switch (post.operation) {
    case Collective::AllGather:
      return post.num_inputs;
    case Collective::ReduceScatter:
      return post.num_outputs;
    case Collective::Broadcast:
      return views_[post.root].post->num_inputs;
    case Collective::AllReduce:
    case Collective::Reduce:
      return post.num_inputs;
    default:
      return 1;
  }
}

uint64_t Exchange::total_inputs(int rank) const {
  uint64_t total = 0;
  for (uint32_t i = 0; i < views_[rank].post->num_inputs; ++i) {
    total += views_[rank].spans[i].nbytes;
  }
  return total;
}

std::optional<std::string> Exchange::out_of_bounds() const {
  for (int r = 0; r < size_; ++r) {
    const View& view = views_[r];
    const uint64_t count = static_cast<uint64_t>(view.post->num_inputs) + view.post->num_outputs;
    bool fits = true;
    if (view.post->spans_offset != kNoOffset) {
      fits = view.post->spans_offset < view.arena_bytes && view.post->spans_offset % alignof(Span) == 0 &&
          count <= (view.arena_bytes - view.post->spans_offset) / sizeof(Span);
    } else {
      fits = count <= kInlineSpans;
    }
    for (uint64_t i = 0; fits && i < count; ++i) {
      const Span& span = view.spans[i];
      if ((span.offset & kPrivate) != 0) { // the kernel checks it against the process that named it
        fits = private_memory_->size() == views_.size();
        continue;
      }
      fits = span.offset <= view.arena_bytes && span.nbytes <= view.arena_bytes - span.offset;
    }
    if (!fits) {
      return c10::str("rank ", r, " named memory outside its arena");
    }
  }
  return std::nullopt;
}

std::optional<std::string> Exchange::unequal_splits() const {
  for (int to = 0; to < size_; ++to) {
    for (int from = 0; from < size_; ++from) {
      const uint64_t sent = input(from, 0, to).nbytes;
      const uint64_t expected = output(to, 0, from).nbytes;
      if (sent != expected) {
        return c10::str(
            "rank ", from, " sends ", sent, " bytes to rank ", to, ", which expects ", expected, " bytes from it");
      }
    }
  }
  return std::nullopt;
}

std::optional<std::string> Exchange::disagreement(const std::vector<int>& group_ranks) const {
  const Post& first = *views_[0].post;
  bool agree = true;
  for (int r = 1; r < size_ && agree; ++r) {
    const Post& post = *views_[r].post;
    agree = post.operation == first.operation && post.dtype == first.dtype && post.agreement == first.agreement &&
        post.in_slot == first.in_slot && post.in_blocks == first.in_blocks &&
        (!has_root(post.operation) || post.root == first.root) &&
        (!is_reduction(post.operation) || post.reduction == first.reduction);
  }
  std::string reason = "the ranks do not agree on this call";
  if (agree) {
    if (first.in_slot || first.in_blocks) {
      return std::nullopt;
    }
    auto problem = out_of_bounds();
    if (!problem && first.operation == Collective::AllToAll) {
      problem = unequal_splits();
    }
    if (!problem) {
      return std::nullopt;
    }
    reason = *problem;
  }
  // Ranks with the same call share a line.
  std::map<std::string, std::vector<int>> calls;
  for (int r = 0; r < size_; ++r) {
    calls[describe(*views_[r].post) + call_site_text(*views_[r].peer, views_[r].post->site)].push_back(
        group_ranks.empty() ? r : group_ranks[r]);
  }
  std::vector<std::pair<std::vector<int>, std::string>> lines;
  for (const auto& [call, ranks] : calls) {
    lines.emplace_back(ranks, call);
  }
  std::sort(lines.begin(), lines.end());
  std::ostringstream text;
  text << reason << ":";
  for (const auto& [ranks, call] : lines) {
    text << "\n  " << list_ranks(ranks) << ": " << call;
  }
  return text.str();
}

template <typename Visit>
void Exchange::for_each_piece(int range, Visit visit) const {
  // visit(destination rank, output, source rank, input); pieces in the order in which a range counts its bytes.
  const Post& post = *views_[0].post;
  switch (post.operation) {
    case Collective::AllGather:
      for (uint32_t t = 0; t < tensors(); ++t) {
        for (int from = 0; from < size_; ++from) {
          visit(range, output(range, t, from), from, input(from, t, 0));
        }
      }
      break;
    case Collective::Broadcast:
      if (range != post.root) {
        for (uint32_t t = 0; t < tensors(); ++t) {
          visit(range, output(range, t, 0), post.root, input(post.root, t, 0));
        }
      }
      break;
    case Collective::Gather:
      visit(post.root, output(post.root, 0, range), range, input(range, 0, 0));
      break;
    case Collective::Scatter:
      visit(range, output(range, 0, 0), post.root, input(post.root, 0, range));
      break;
    case Collective::AllToAll:
      for (int from = 0; from < size_; ++from) {
        visit(range, output(range, 0, from), from, input(from, 0, range));
      }
      break;
    default:
      break;
  }
}

uint64_t Exchange::range_nbytes(int range) const {
  const Post& post = *views_[range].post;
  switch (post.operation) {
    case Collective::Barrier:
      return 0;
    case Collective::AllReduce:
    case Collective::Reduce: {
      if (post.operation == Collective::Reduce && views_[post.root].post->away) {
        return 0;
      }
      const uint64_t total = total_inputs(range);
      return share_begin(total, range + 1, size_) - share_begin(total, range, size_);
    }
    case Collective::Gather:
      return views_[post.root].post->away ? 0 : total_inputs(range);
    default: // the bytes it receives; a broadcast's root receives none
      return post.away ? 0 : post.output_nbytes;
  }
}

void Exchange::execute(int range, uint64_t begin, uint64_t end) const {
  if (is_reduction(views_[0].post->operation)) {
    reduce_interval(range, begin, end);
    return;
  }
  const bool streaming = range_nbytes(range) >= kStreamBytes;
  uint64_t at = 0;
  for_each_piece(range, [&](int to, const Span& output, int from, const Span& input) {
    const uint64_t first = std::max(begin, at);
    const uint64_t last = std::min(end, at + output.nbytes);
    const bool in_place = to == from && output.offset == input.offset; // an all_gather's input is part of its output
    if (first < last && !in_place) {
      copy(place(to, output, first - at), place(from, input, first - at), last - first, streaming);
    }
    at += output.nbytes;
  });
}

void Exchange::reduce_interval(int range, uint64_t begin, uint64_t end) const {
  const Post& post = *views_[0].post;
  const bool scatter = post.operation == Collective::ReduceScatter;
  if (!scatter) {
    const uint64_t base = share_begin(total_inputs(0), range, size_);
    begin += base;
    end += base;
  }
  c10::SmallVector<Place, 64> inputs;
  c10::SmallVector<Place, 64> outputs;
  c10::SmallVector<double, 64> factors(size_);
  for (int r = 0; r < size_; ++r) {
    factors[r] = views_[r].post->factor;
  }
  const bool streaming = scatter && range_nbytes(range) >= kStreamBytes;
  uint64_t at = 0;
  for (uint32_t t = 0; t < tensors() && at < end; ++t) {
    const uint64_t nbytes = input(0, t, range).nbytes;
    const uint64_t first = std::max(begin, at);
    const uint64_t last = std::min(end, at + nbytes);
    if (first < last) {
      const uint64_t offset = first - at;
      inputs.clear();
      for (int r = 0; r < size_; ++r) {
        inputs.push_back(place(r, input(r, t, range), offset));
      }
      outputs.clear();
      if (post.operation == Collective::AllReduce) {
        for (int r = 0; r < size_; ++r) {
          if (views_[r].post->away) {
            continue;
          }
          outputs.push_back(place(r, output(r, t, 0), offset));
        }
      } else {
        const int to = scatter ? range : post.root;
        outputs.push_back(place(to, output(to, t, 0), offset));
      }
      // A reduce_scatter's output may be the part of its input that it replaces.
      reduce_places(inputs, outputs, factors.data(), last - first, streaming && outputs[0].data != inputs[range].data);
    }
    at += nbytes;
  }
}

Exchange::Place Exchange::place(int rank, const Span& span, uint64_t offset) const {
  if ((span.offset & kPrivate) == 0) {
    return {views_[rank].base + span.offset + offset, 0, rank};
  }
  const uint64_t address = (span.offset & ~kPrivate) + offset;
  return {rank == rank_ ? reinterpret_cast<std::byte*>(address) : nullptr, address, rank};
}

void Exchange::read(const Place& from, std::byte* to, uint64_t nbytes) const {
  TORCH_CHECK_WITH(
      DistBackendError,
      (*private_memory_)[from.rank].read(to, from.address, nbytes),
      "neuron: cannot read the tensor of rank ",
      from.rank,
      " (process_vm_readv: ",
      os_error(),
      "); has its process ended?");
}

void Exchange::write(const Place& to, const std::byte* from, uint64_t nbytes) const {
  TORCH_CHECK_WITH(
      DistBackendError,
      (*private_memory_)[to.rank].write(to.address, from, nbytes),
      "neuron: cannot write the tensor of rank ",
      to.rank,
      " (process_vm_writev: ",
      os_error(),
      "); has its process ended?");
}

void Exchange::copy(const Place& to, const Place& from, uint64_t nbytes, bool streaming) const {
  if (to.data != nullptr && from.data != nullptr) {
    if (streaming) {
      copy_streaming(to.data, from.data, nbytes);
    } else {
      std::memcpy(to.data, from.data, nbytes);
    }
  } else if (to.data != nullptr) {
    read(from, to.data, nbytes);
  } else if (from.data != nullptr) {
    write(to, from.data, nbytes);
  } else {
    std::byte* piece = scratch();
    for (uint64_t at = 0; at < nbytes; at += kScratchBytes) {
      const uint64_t n = std::min(kScratchBytes, nbytes - at);
      read({nullptr, from.address + at, from.rank}, piece, n);
      write({nullptr, to.address + at, to.rank}, piece, n);
    }
  }
}

void Exchange::reduce_places(
    const c10::SmallVector<Place, 64>& inputs,
    const c10::SmallVector<Place, 64>& outputs,
    const double* factors,
    uint64_t nbytes,
    bool streaming) const {
  const Post& post = *views_[0].post;
  const uint64_t element = c10::elementSize(post.dtype);
  const auto far = [](const Place& place) { return place.data == nullptr; };
  const auto far_inputs = static_cast<uint64_t>(std::count_if(inputs.begin(), inputs.end(), far));
  const auto far_outputs = static_cast<uint64_t>(std::count_if(outputs.begin(), outputs.end(), far));
  // What is far is brought in by pieces that stay in the second-level cache.
  const uint64_t piece_bytes =
      far_inputs + far_outputs == 0 ? nbytes : std::min(nbytes, kScratchBytes / (far_inputs + 1) / 64 * 64);
  TORCH_INTERNAL_ASSERT(piece_bytes > 0);
  c10::SmallVector<const std::byte*, 64> sources(inputs.size());
  c10::SmallVector<std::byte*, 64> targets;
  for (uint64_t at = 0; at < nbytes; at += piece_bytes) {
    const uint64_t n = std::min(piece_bytes, nbytes - at);
    std::byte* room = far_inputs + far_outputs == 0 ? nullptr : scratch();
    std::byte* const result = room;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (far(inputs[i])) {
        room += piece_bytes;
        read({nullptr, inputs[i].address + at, inputs[i].rank}, room, n);
        sources[i] = room;
      } else {
        sources[i] = inputs[i].data + at;
      }
    }
    targets.clear();
    for (const Place& output : outputs) {
      if (!far(output)) {
        targets.push_back(output.data + at);
      }
    }
    if (targets.empty()) {
      targets.push_back(result);
    }
    reduce(
        post.dtype,
        post.reduction,
        sources.data(),
        factors,
        size_,
        targets.data(),
        static_cast<int>(targets.size()),
        n / element,
        streaming && far_outputs == 0);
    for (const Place& output : outputs) {
      if (far(output)) {
        write({nullptr, output.address + at, output.rank}, targets[0], n);
      }
    }
  }
}

void Exchange::reduce_payloads(std::byte* result, uint64_t offset, uint64_t nbytes) const {
  const Post& post = *views_[0].post;
  c10::SmallVector<const std::byte*, 64> inputs(size_);
  c10::SmallVector<double, 64> factors(size_);
  for (int r = 0; r < size_; ++r) {
    inputs[r] = views_[r].post->payload + offset;
    factors[r] = views_[r].post->factor;
  }
  reduce(
      post.dtype,
      post.reduction,
      inputs.data(),
      factors.data(),
      size_,
      &result,
      1,
      nbytes / c10::elementSize(post.dtype));
}

} // namespace trn
