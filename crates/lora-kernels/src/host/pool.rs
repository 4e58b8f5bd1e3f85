//! Threads that share out the tasks of one launch at a time.
//!
//! A decode step is a few microseconds of work, less than waking a thread takes. So the calling thread always works too, workers keep looking
//! for a short while after a launch before they sleep, and a launch that is too small to be worth a wake-up does not wake any: whoever is awake
//! helps. Which thread takes which task never decides a bit of the result.

use super::workspace::Workspace;
use crate::KernelError;
use parking_lot::{Condvar, Mutex};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long an idle worker keeps looking for the next launch before it sleeps.
const LINGER: Duration = Duration::from_micros(60);

/// Looks at a flag between two looks at the clock, or before a waiting thread offers its core.
const LOOKS: usize = 64;

/// Work in two phases: every task of the first is done before one of the second begins.
pub(super) trait Job: Send + Sync {
    /// Tasks of each phase.
    fn tasks(&self) -> [usize; 2];

    /// Runs one task of one phase.
    fn run(&self, phase: usize, task: usize, workspace: &mut Workspace);
}

/// A job under way.
struct Run {
    job: Box<dyn Job>,
    tasks: [usize; 2],
    next: AtomicUsize,
    done: [AtomicUsize; 2],
    panicked: AtomicBool,
}

impl Run {
    fn new(job: Box<dyn Job>) -> Self {
        Self {
            tasks: job.tasks(),
            job,
            next: AtomicUsize::new(0),
            done: [AtomicUsize::new(0), AtomicUsize::new(0)],
            panicked: AtomicBool::new(false),
        }
    }

    /// Takes tasks until none is left.
    fn work(&self, workspace: &mut Workspace) {
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            let phase = usize::from(index >= self.tasks[0]);
            let task = index - phase * self.tasks[0];
            if task >= self.tasks[phase] {
                return;
            }
            if phase == 1 {
                // First-phase tasks were all taken by running threads, which wait for nothing, so this ends.
                self.wait(0);
            }
            let run = AssertUnwindSafe(|| self.job.run(phase, task, workspace));
            if catch_unwind(run).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
            }
            // Publishes what the task wrote to whoever sees the count.
            self.done[phase].fetch_add(1, Ordering::Release);
        }
    }

    /// Waits until every task of `phase` is done.
    fn wait(&self, phase: usize) {
        let mut looks = 0;
        while self.done[phase].load(Ordering::Acquire) < self.tasks[phase] {
            looks += 1;
            if looks % LOOKS == 0 {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
    }
}

#[derive(Default)]
struct State {
    run: Option<Arc<Run>>,
    sleeping: usize,
    closed: bool,
}

#[derive(Default)]
struct Shared {
    /// Counts launches, so that a looking worker sees a new one without the lock. Changed only under it.
    launches: AtomicU64,
    state: Mutex<State>,
    wake: Condvar,
}

impl Shared {
    /// The next launch after `seen`, or `None` when the pool closes.
    fn next(&self, seen: &mut u64) -> Option<Arc<Run>> {
        loop {
            self.linger(*seen);
            let mut state = self.state.lock();
            while !state.closed && self.launches.load(Ordering::Relaxed) == *seen {
                state.sleeping += 1;
                self.wake.wait(&mut state);
                state.sleeping -= 1;
            }
            if state.closed {
                return None;
            }
            *seen = self.launches.load(Ordering::Relaxed);
            // None where the launch was over before this worker saw it.
            if let Some(run) = &state.run {
                return Some(Arc::clone(run));
            }
        }
    }

    fn linger(&self, seen: u64) {
        let since = Instant::now();
        while since.elapsed() < LINGER {
            for _ in 0..LOOKS {
                if self.launches.load(Ordering::Acquire) != seen {
                    return;
                }
                std::hint::spin_loop();
            }
        }
    }
}

/// The calling thread and its helpers.
pub(super) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    workspace: Workspace,
}

impl Pool {
    /// The caller alone.
    pub(super) fn single() -> Self {
        Self {
            shared: Arc::default(),
            workers: Vec::new(),
            workspace: Workspace::default(),
        }
    }

    /// A pool of `threads` threads, the caller among them.
    pub(super) fn new(threads: usize) -> Result<Self, KernelError> {
        let mut pool = Self::single();
        for index in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let worker = std::thread::Builder::new()
                .name(format!("lora-host-{index}"))
                .spawn(move || worker(&shared))
                .map_err(|error| KernelError::Thread {
                    index,
                    detail: error.to_string(),
                })?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    pub(super) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs all of `job` and returns when it is done. `wake`: whether it is large enough to wake sleeping workers for.
    pub(super) fn run(&mut self, job: Box<dyn Job>, wake: bool) {
        let run = Arc::new(Run::new(job));
        if !self.workers.is_empty() {
            let mut state = self.shared.state.lock();
            state.run = Some(Arc::clone(&run));
            self.shared.launches.fetch_add(1, Ordering::Release);
            if wake && state.sleeping > 0 {
                self.shared.wake.notify_all();
            }
        }
        run.work(&mut self.workspace);
        run.wait(0);
        run.wait(1);
        if !self.workers.is_empty() {
            self.shared.state.lock().run = None;
        }
        if run.panicked.load(Ordering::Relaxed) {
            resume_unwind(Box::new("a task of a host launch panicked"));
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.launches.fetch_add(1, Ordering::Release);
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its tasks, so there is nothing to hear from it.
            let _ = worker.join();
        }
    }
}

fn worker(shared: &Shared) {
    let mut workspace = Workspace::default();
    let mut seen = 0;
    while let Some(run) = shared.next(&mut seen) {
        run.work(&mut workspace);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts each task, and in the second phase checks that the first is complete.
    struct Count {
        first: Arc<Vec<AtomicUsize>>,
        second: Arc<Vec<AtomicUsize>>,
        complete: Arc<AtomicBool>,
    }

    impl Job for Count {
        fn tasks(&self) -> [usize; 2] {
            [self.first.len(), self.second.len()]
        }

        fn run(&self, phase: usize, task: usize, _: &mut Workspace) {
            let counts = if phase == 0 {
                &self.first
            } else {
                &self.second
            };
            counts[task].fetch_add(1, Ordering::Relaxed);
            let complete = self.first.iter().all(|c| c.load(Ordering::Relaxed) == 1);
            if phase == 1 && !complete {
                self.complete.store(false, Ordering::Relaxed);
            }
        }
    }

    fn counters(n: usize) -> Arc<Vec<AtomicUsize>> {
        Arc::new((0..n).map(|_| AtomicUsize::new(0)).collect())
    }

    #[test]
    fn every_task_runs_once_and_phases_do_not_mix() {
        for threads in [1, 2, 5] {
            let mut pool = Pool::new(threads).unwrap();
            assert_eq!(pool.threads(), threads);
            for (a, b) in [(0, 0), (1, 0), (0, 3), (7, 5), (100, 100)] {
                for wake in [false, true] {
                    let (first, second) = (counters(a), counters(b));
                    let complete = Arc::new(AtomicBool::new(true));
                    let job = Count {
                        first: first.clone(),
                        second: second.clone(),
                        complete: complete.clone(),
                    };
                    pool.run(Box::new(job), wake);
                    let once = |c: &AtomicUsize| c.load(Ordering::Relaxed) == 1;
                    assert!(first.iter().chain(second.iter()).all(once));
                    assert!(complete.load(Ordering::Relaxed));
                }
            }
        }
    }

    #[test]
    fn sleeping_workers_wake_for_large_work() {
        struct Where(Arc<Mutex<std::collections::HashSet<std::thread::ThreadId>>>);
        impl Job for Where {
            fn tasks(&self) -> [usize; 2] {
                [200, 0]
            }
            fn run(&self, _: usize, _: usize, _: &mut Workspace) {
                std::thread::sleep(Duration::from_micros(200));
                self.0.lock().insert(std::thread::current().id());
            }
        }
        let mut pool = Pool::new(2).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        let threads = Arc::default();
        pool.run(Box::new(Where(Arc::clone(&threads))), true);
        assert_eq!(threads.lock().len(), 2);
    }

    #[test]
    fn a_panicking_task_ends_the_launch_and_not_the_pool() {
        struct Bad;
        impl Job for Bad {
            fn tasks(&self) -> [usize; 2] {
                [4, 4]
            }
            fn run(&self, phase: usize, task: usize, _: &mut Workspace) {
                assert!(phase == 1 || task != 2, "planted");
            }
        }
        let mut pool = Pool::new(2).unwrap();
        let run = AssertUnwindSafe(|| pool.run(Box::new(Bad), true));
        assert!(catch_unwind(run).is_err());
        let first = counters(9);
        let job = Count {
            first: first.clone(),
            second: counters(0),
            complete: Arc::default(),
        };
        pool.run(Box::new(job), true);
        assert!(first.iter().all(|c| c.load(Ordering::Relaxed) == 1));
    }
}
