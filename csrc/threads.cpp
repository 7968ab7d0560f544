// SPDX-License-Identifier: Apache-2.0
#include "threads.h"

#include <pthread.h>

#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

namespace linbias {
namespace {

struct Job {
  Body body;
  void* context;
  std::int64_t tasks;
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error{};
  std::fenv_t modes{};  // the caller's, so that no result depends on which thread made it

  // An exception ends the job, not the process: it would leave a helper's thread, or the caller's frame, which holds
  // this job, while helpers still read it.
  void work(int worker) {
    try {
      for (std::int64_t task; !failed.load(std::memory_order_relaxed) &&
                              (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;)
        body(context, task, worker);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
  }
  // Once nobody works any more.
  void finish() const {
    if (error) std::rethrow_exception(error);
  }
};

class Pool {
 public:
  void run(int threads, Job& job) {
    threads = grow(threads - 1) + 1;
    std::fegetenv(&job.modes);
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
  // How many helpers there are, of those wanted: fewer where the system has no thread left.
  int grow(int helpers) {
    try {
      for (; helpers_ < helpers; ++helpers_)
        std::thread([this, index = helpers_, seen = generation_] { serve(index, seen); }).detach();
    } catch (const std::system_error&) {
      helpers = helpers_;
    }
    return helpers;
  }

  void serve(int index, std::uint64_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return generation_ != seen; });
      seen = generation_;
      if (index >= wanted_) continue;
      Job* job = job_;
      lock.unlock();
      std::fesetenv(&job->modes);
      job->work(index + 1);
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  int helpers_ = 0, wanted_ = 0, running_ = 0;
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
  std::unique_lock<std::mutex> busy;
  if (threads > 1) {
    std::call_once(once, make_pool);
    busy = std::unique_lock<std::mutex>(pool->busy, std::try_to_lock);
  }
  if (busy.owns_lock())
    pool->run(threads, job);
  else
    job.work(0);
  job.finish();
}

}  // namespace linbias
