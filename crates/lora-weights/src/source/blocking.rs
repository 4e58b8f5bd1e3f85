//! From the synchronous interface to the stores' asynchronous one.

use std::future::Future;
use std::io;
use tokio::runtime::{Builder, Runtime};

/// A tokio runtime of the source's own, without worker threads: what is blocked on is driven by a thread made for that call. So a
/// call may come from any thread, one of an engine's own runtime included (which it blocks), and between calls nothing runs.
pub(super) struct Blocking(Option<Runtime>);

impl Blocking {
    pub(super) fn new() -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        Ok(Self(Some(runtime)))
    }

    /// Runs `future` to its end. A panic in it goes on in the caller.
    pub(super) fn run<T: Send>(&self, future: impl Future<Output = T> + Send) -> io::Result<T> {
        let Some(runtime) = &self.0 else {
            return Err(io::Error::other("the source is being dropped"));
        };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new()
                .name("lora-source".to_owned())
                .spawn_scoped(scope, || runtime.block_on(future))?;
            thread
                .join()
                .map_err(|panic| std::panic::resume_unwind(panic))
        })
    }
}

impl Drop for Blocking {
    fn drop(&mut self) {
        // Dropping a runtime waits for its blocking tasks, which a thread of another runtime may not do.
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}
