//! Captured graphs and device timers: what tests, benches and small engines need of both.

use super::CudaError;
use super::driver::Named;
use crate::KernelError;
use cudarc::driver::{result, sys};

/// A captured, instantiated CUDA graph.
pub struct Graph {
    graph: sys::CUgraph,
    executable: sys::CUgraphExec,
}

// SAFETY: graph handles are driver-owned names; `Graph` is not `Sync`, so that no two threads launch it at once.
unsafe impl Send for Graph {}

impl Graph {
    pub(super) fn capture(
        stream: sys::CUstream,
        enqueue: impl FnOnce() -> Result<(), KernelError>,
    ) -> Result<Self, KernelError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is live and of the current context.
        unsafe { result::stream::begin_capture(stream, mode) }.named("beginning a capture")?;
        let enqueued = enqueue();
        // SAFETY: the capture begun above ends here, on the same stream.
        let graph = unsafe { result::stream::end_capture(stream) }.named("ending a capture");
        enqueued?;
        let graph = graph?;
        // SAFETY: `graph` is what the capture returned.
        let executable =
            unsafe { result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)) }
                .named("instantiating a graph");
        match executable {
            Ok(executable) => Ok(Self { graph, executable }),
            Err(error) => {
                // SAFETY: nothing else holds the graph.
                let _ = unsafe { result::graph::destroy(graph) };
                Err(error.into())
            }
        }
    }

    pub(super) fn launch(&self, stream: sys::CUstream) -> Result<(), CudaError> {
        // SAFETY: `self` keeps the executable alive, and the caller the stream.
        unsafe { result::graph::launch(self.executable, stream) }.named("launching a graph")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: both handles are destroyed once; the driver keeps a running graph until it is done.
        unsafe {
            let _ = result::graph::exec_destroy(self.executable);
            let _ = result::graph::destroy(self.graph);
        }
    }
}

/// Two events on one stream: device time between them.
pub struct DeviceTimer {
    stream: sys::CUstream,
    events: [sys::CUevent; 2],
}

impl DeviceTimer {
    pub(super) fn new(stream: sys::CUstream) -> Result<Self, CudaError> {
        let event = || {
            result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)
                .named("creating a timing event")
        };
        Ok(Self {
            stream,
            events: [event()?, event()?],
        })
    }

    /// Marks the start.
    ///
    /// # Errors
    /// [`CudaError`] where the driver refuses.
    pub fn start(&self) -> Result<(), CudaError> {
        self.record(0)
    }

    /// Marks the end, waits for it, and returns microseconds since the start.
    ///
    /// # Errors
    /// [`CudaError`] where the driver refuses, or where the work in between failed.
    pub fn stop_us(&self) -> Result<f64, CudaError> {
        self.record(1)?;
        // SAFETY: both events are live and recorded.
        unsafe {
            result::event::synchronize(self.events[1]).named("waiting for a timing event")?;
            let milliseconds = result::event::elapsed(self.events[0], self.events[1])
                .named("reading device time")?;
            Ok(f64::from(milliseconds) * 1000.0)
        }
    }

    fn record(&self, which: usize) -> Result<(), CudaError> {
        // SAFETY: event and stream are live and of the current context.
        unsafe { result::event::record(self.events[which], self.stream) }
            .named("recording a timing event")
    }
}

impl Drop for DeviceTimer {
    fn drop(&mut self) {
        for event in self.events {
            // SAFETY: created once, destroyed once.
            let _ = unsafe { result::event::destroy(event) };
        }
    }
}
