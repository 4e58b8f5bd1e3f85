//! A lock under shuttle's scheduler.
//!
//! Threads of a shuttle run are coroutines that give way at scheduling points alone. What is held under this lock has none, so one point
//! before it is taken is all that its order against other holders needs; two would square the number of schedules.

use parking_lot::MutexGuard;

/// A mutex that must not be held across a scheduling point.
#[derive(Debug)]
pub(in crate::slots) struct Mutex<T>(parking_lot::Mutex<T>);

impl<T> Mutex<T> {
    pub(in crate::slots) fn new(value: T) -> Self {
        Self(parking_lot::Mutex::new(value))
    }

    /// # Panics
    /// Where the lock is held: its holder has called out to something that locks again.
    pub(in crate::slots) fn lock(&self) -> MutexGuard<'_, T> {
        shuttle::thread::yield_now();
        self.0
            .try_lock()
            .expect("slot states are never locked across a call to memory or an extension")
    }
}
