// SPDX-License-Identifier: Apache-2.0
#include "threads.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace linbias {
namespace {

struct Job {
  Body body;
  void* context;
  std::int64_t tasks;
  std::atomic<std::int64_t> next{0};

  void work(int worker) {
    for (std::int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) body(context, task, worker);
  }
};

class Pool {
 public:
  void run(int threads, Job& job) {
    grow(threads - 1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      wanted_ = threads - 1;
      running_ = wanted_;
      ++generation_;
    }
    wake_.notify_all();
    job.work(0);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
    job_ = nullptr;
  }

  std::mutex busy;  // held for the length of a call

 private:
  void grow(int helpers) {
    while (static_cast<int>(threads_.size()) < helpers) {
      int index = static_cast<int>(threads_.size());
      std::uint64_t seen = generation_;
      threads_.emplace_back([this, index, seen] { serve(index, seen); });
      threads_.back().detach();
    }
  }

  void serve(int index, std::uint64_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return generation_ != seen; });
      seen = generation_;
      if (index >= wanted_) continue;
      Job* job = job_;
      lock.unlock();
      job->work(index + 1);
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;
  Job* job_ = nullptr;
  int wanted_ = 0, running_ = 0;
  std::uint64_t generation_ = 0;
};

// Never destroyed: its threads may outlive static destructors.
Pool* pool = nullptr;
std::once_flag once;

void make_pool() {
  pool = new Pool;
  // A child has none of the parent's threads and perhaps a lock that nobody will release: it starts afresh.
  pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
}

}  // namespace

void parallel(int threads, std::int64_t tasks, Body body, void* context) {
  if (threads > tasks) threads = static_cast<int>(tasks);
  Job job{body, context, tasks};
  if (threads <= 1) return job.work(0);
  std::call_once(once, make_pool);
  std::unique_lock<std::mutex> busy(pool->busy, std::try_to_lock);
  if (!busy.owns_lock()) return job.work(0);
  pool->run(threads, job);
}

}  // namespace linbias
