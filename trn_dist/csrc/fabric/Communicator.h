#pragma once

// One process group on the fabric: posts collectives and messages, finishes them by work stealing, and turns whatever goes
// wrong into an error on every rank. ProcessGroupNeuron (c10d/) translates c10d's calls into it.
//
// [Note: Progress]
// There are no progress threads. Whoever waits for an operation carries out what is left of it, also the share of a rank
// that is busy elsewhere, and looks after this process's other communicators while it sleeps. A rank that has posted is
// therefore never needed again for that collective.
//
// [Note: Locks]
// A communicator's mutex is held while its shared state is read or work is carried out, never while sleeping, never while
// Python may run, and never while a tensor may be freed (which can call into Python): tensors go to `retired_tensors_` and
// are dropped later, outside.

#include "fabric/ControlBlock.h"
#include "fabric/Exchange.h"
#include "fabric/Fabric.h"
#include "fabric/Host.h"
#include "fabric/Operation.h"
#include "fabric/Region.h"

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace c10d {
class Store;
}

namespace trn {

class PointToPoint;

struct CollectiveCall {
  Collective operation = Collective::Barrier;
  c10::ScalarType dtype = c10::ScalarType::Byte;
  Reduction reduction = Reduction::Sum;
  double factor = 1; // of this rank, for PremulSum
  int root = 0;
  // A list, or with chunked_* one region a tensor that is cut in equal parts, one a rank. In place where they coincide.
  c10::SmallVector<Region, 4> inputs;
  c10::SmallVector<Region, 4> outputs;
  bool chunked_inputs = false;
  bool chunked_outputs = false;
  c10::SmallVector<int64_t, 6> shape; // of the first tensor, for messages
  std::vector<at::Tensor> tensors; // kept alive until the collective is done
  Enqueued enqueued;
  std::chrono::milliseconds timeout{0};
};

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  // Collective over the group. fabric_ranks[r] is the place in the fabric of group rank r.
  static std::shared_ptr<Communicator> create(
      std::shared_ptr<Fabric> fabric,
      std::vector<int> fabric_ranks,
      int rank,
      std::string name,
      const c10::intrusive_ptr<c10d::Store>& store,
      std::chrono::milliseconds timeout);
  ~Communicator();

  // Has the costs of an operation worked out. Without any lock held.
  void prepare_costs(Collective operation);
  void prepare_message_costs();

  std::shared_ptr<Operation> post(CollectiveCall&& call);
  std::shared_ptr<Operation>
  send(const at::Tensor& tensor, Region region, int to, int tag, std::chrono::milliseconds timeout, Enqueued enqueued);
  // from < 0: any source
  std::shared_ptr<Operation> receive(
      const at::Tensor& tensor,
      Region region,
      int from,
      int tag,
      std::chrono::milliseconds timeout,
      Enqueued enqueued);

  // Fails the group on every rank: all operations, present and later, raise `reason`.
  void fail(const std::string& reason);
  // The error that failed the group, or an empty string.
  std::string failure() const;
  // Leaves the group without waiting for anybody. Others may still complete what was posted. May be called again.
  void depart();

  int rank() const {
    return rank_;
  }
  int size() const {
    return control_.size();
  }
  uint64_t next_sequence() const {
    return next_sequence_.load(std::memory_order_relaxed);
  }
  const std::string& name() const {
    return name_;
  }
  // "rank 1", with the rank in the job where it is another.
  std::string rank_label(int rank) const;

  // Keeps tensors that a peer may be in the middle of reading or writing until the process ends.
  static void abandon(std::vector<at::Tensor> tensors);
  // Moves along what this process has in flight on all communicators but `except`.
  static void progress_all(const Communicator* except);

 private:
  friend class Operation;
  friend class CollectiveOperation;
  friend class PointToPoint;
  friend class SendOperation;
  friend class ReceiveOperation;

  Communicator(std::shared_ptr<Fabric> fabric, std::vector<int> fabric_ranks, int rank, std::string name);
  void attach(const c10::intrusive_ptr<c10d::Store>& store, std::chrono::milliseconds timeout);
  const Fabric::Peer& peer(int rank) const {
    return fabric_->peer(fabric_ranks_[rank]);
  }

  // The mutex, and the tensors that may be dropped once it is released. See [Note: Locks].
  class Section {
   public:
    explicit Section(Communicator& communicator) : communicator_(communicator) {
      lock();
    }
    ~Section() {
      if (held_) {
        unlock();
      }
    }
    void lock() {
      if (!communicator_.mutex_.try_lock()) {
        // Whoever holds it never wants the interpreter lock meanwhile, but another thread that waits for it might.
        HostLockRelease released;
        communicator_.mutex_.lock();
      }
      held_ = true;
    }
    void unlock() {
      std::vector<at::Tensor> tensors;
      tensors.swap(communicator_.retired_tensors_);
      communicator_.mutex_.unlock();
      held_ = false;
    }

   private:
    Communicator& communicator_;
    bool held_ = false;
  };

  using Advance = c10::function_ref<bool(Operation::Wait&, bool thorough)>;
  using Missing = c10::function_ref<std::vector<int>()>;
  using What = c10::function_ref<std::string()>;
  // Runs `advance` in the section until it says true, sleeping outside of it in between. Throws when the group fails, on
  // timeout, and when a missing rank has died or left. Ends inside the section, also by an exception.
  void wait_until(
      Section& section,
      Advance advance,
      Missing missing,
      What what,
      std::chrono::milliseconds timeout,
      bool fail_on_timeout);
  // Whether another rank was last seen on the processor that this one runs on: spinning would keep it from working.
  bool shares_cpu() const;
  // True when nothing changed within the wait's patience.
  bool sleep(const Operation::Wait& wait);
  // Fails the group if one of the missing ranks can never do its part.
  void check_health(Missing missing, What what);
  [[noreturn]] void time_out(Missing missing, What what, std::chrono::milliseconds timeout, bool fail_group);
  void throw_if_failed() const;
  void throw_if_unusable() const;
  void wake_everybody();
  std::string list_ranks(const std::vector<int>& ranks) const;

  // All with the mutex held.
  void progress(bool work);
  void retire();
  bool slot_free(uint64_t sequence);
  // Compares the posts and opens, or at once completes, the collective.
  void open_slot(uint64_t sequence);
  // When it begins and ends in virtual time.
  void time_slot(Slot& slot, const Exchange& exchange);
  void finish_slot(Slot& slot, uint64_t sequence);
  // Takes segments of an open collective; true when it is done.
  bool help(uint64_t sequence, bool thorough);

  std::shared_ptr<Fabric> fabric_;
  std::vector<int> fabric_ranks_;
  int rank_;
  std::string name_;
  ControlBlock control_;
  std::unique_ptr<StagedBlock> own_control_; // rank 0's
  std::atomic<bool> departed_{false};

  mutable std::mutex mutex_;
  std::atomic<uint64_t> next_sequence_{0};
  uint64_t retired_ = 0;
  uint64_t retired_by_all_ = 0; // a lower bound
  std::deque<std::shared_ptr<Operation>> outstanding_; // collectives, by sequence from retired_ on
  std::unique_ptr<PointToPoint> messages_;
  std::vector<at::Tensor> retired_tensors_;
  std::atomic<int> spin_limit_{0}; // in pauses; adapts to whether spinning has paid
  std::atomic<size_t> next_suspect_{0};
};

} // namespace trn
