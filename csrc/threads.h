// SPDX-License-Identifier: Apache-2.0
// The pool: persistent threads that sleep between calls. Safe after fork, and when several threads call at once.
#pragma once

#include <cstdint>

namespace linbias {

using Body = void (*)(void* context, std::int64_t task, int worker);

// Runs body(context, task, worker) for every task in [0, tasks), each once, in rising order of start, with
// `worker` < threads; returns when all are done. The caller is worker 0. While another call holds the pool, this one
// runs its tasks alone: the result is the same, and the machine is not oversubscribed. If a task throws, tasks that have
// not started are dropped, those that have are awaited, and the first exception goes on to the caller.
void parallel(int threads, std::int64_t tasks, Body body, void* context);

template <class F>
void parallel(int threads, std::int64_t tasks, F&& body) {
  parallel(
      threads, tasks, [](void* f, std::int64_t task, int worker) { (*static_cast<F*>(f))(task, worker); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace linbias
