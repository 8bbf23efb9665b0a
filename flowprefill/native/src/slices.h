// Slices that one call runs one behind the other, and when it stops between two of them.
//
// Pieces of work are handed out in order. No thread waits at the end of a slice: whoever finds no
// more of it begins the next one, unless somebody wants the device. So a boundary costs one look.
#pragma once

#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace flowprefill {

// Matches flowprefill/interrupt.py. Other threads raise it at any time.
struct Interrupt {
  std::atomic<uint32_t> is_raised;
  double leave_s;  // CLOCK_MONOTONIC
  std::atomic<uint64_t> num_more;  // slices that began behind the first one of a call

  bool is_due() const {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return is_raised.load() != 0 || now.tv_sec + 1e-9 * now.tv_nsec >= leave_s;
  }
};

static_assert(sizeof(Interrupt) == 24 && offsetof(Interrupt, leave_s) == 8);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

struct Piece {
  int start, rows;
  int part;  // of those rows
};

template <class BlockRows>
class Slices {
 public:
  // Slices of consecutive rows from 0 on; ends[i]: where slice i ends.
  // block_rows(rows of a slice) -> rows of a piece; each has `parts` parts, handed out one by one.
  // may_leave: stop at a slice's end once the interrupt, which may be null, is due
  Slices(const int32_t* ends, int count, Interrupt* interrupt, bool may_leave, int parts,
         const BlockRows& block_rows)
      : ends_(ends), count_(count), interrupt_(interrupt), may_leave_(may_leave), parts_(parts),
        block_rows_(block_rows) {}

  // The next piece; false if there is none. From any thread.
  bool take(Piece& piece) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (row_ == end_ && !begin_next()) return false;
    piece = {row_, std::min(rows_each_, end_ - row_), part_};
    if (++part_ == parts_) {
      part_ = 0;
      row_ += piece.rows;
    }
    return true;
  }

  // Slices whose pieces have all been handed out, once take() has said that there is no more.
  int num_run() const { return num_begun_; }

 private:
  bool begin_next() {
    const bool is_more = num_begun_ > 0 && interrupt_;
    if (is_more && may_leave_ && interrupt_->is_due()) count_ = num_begun_;  // for all threads
    if (num_begun_ == count_) return false;
    if (is_more) interrupt_->num_more.fetch_add(1);
    end_ = ends_[num_begun_++];
    rows_each_ = block_rows_(end_ - row_);
    return true;
  }

  const int32_t* ends_;
  int count_;
  Interrupt* const interrupt_;
  const bool may_leave_;
  const int parts_;
  const BlockRows& block_rows_;
  std::mutex mutex_;
  int num_begun_ = 0, row_ = 0, end_ = 0, rows_each_ = 0, part_ = 0;
};

}  // namespace flowprefill
