//! How work is timed: by device events on a GPU, by the clock on the host.

use crate::cuda::{CudaBackend, DeviceTimer, Graph};
use crate::{KernelError, LoraBackend, Stream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Runs before the counted ones.
const WARM_RUNS: usize = 3;

/// What is measured.
#[derive(Clone)]
pub struct BenchDevice {
    backend: Arc<dyn LoraBackend>,
    cuda: Option<Arc<CudaBackend>>,
}

impl BenchDevice {
    /// A host: calls are timed by its clock.
    pub fn host(backend: impl LoraBackend + 'static) -> Self {
        let backend = Arc::new(backend);
        Self {
            backend,
            cuda: None,
        }
    }

    /// A GPU: graphs are timed by its own events.
    pub fn cuda(backend: CudaBackend) -> Self {
        let backend = Arc::new(backend);
        Self {
            cuda: Some(Arc::clone(&backend)),
            backend,
        }
    }

    /// What launches go to.
    pub fn backend(&self) -> &Arc<dyn LoraBackend> {
        &self.backend
    }

    /// Whether launches only enqueue, so that the host's share of one can be timed apart.
    pub fn is_asynchronous(&self) -> bool {
        self.cuda.is_some()
    }

    /// Captures what `enqueue` launches in a graph; on the host, remembers `enqueue`.
    ///
    /// # Errors
    /// What `enqueue` gives; what the driver refuses.
    pub fn record<'a>(
        &'a self,
        enqueue: impl FnMut(Stream) -> Result<(), KernelError> + 'a,
    ) -> Result<Work<'a>, KernelError> {
        let mut enqueue = Box::new(enqueue);
        let graph = match &self.cuda {
            None => None,
            Some(backend) => Some(Recorded {
                graph: backend.capture(&mut enqueue)?,
                timer: backend.timer()?,
                backend,
            }),
        };
        Ok(Work {
            graph,
            backend: &*self.backend,
            enqueue,
        })
    }
}

/// A graph and the events around it.
struct Recorded<'a> {
    graph: Graph,
    timer: DeviceTimer,
    backend: &'a CudaBackend,
}

/// Work to run and time again and again. It borrows what it works on.
pub struct Work<'a> {
    graph: Option<Recorded<'a>>,
    backend: &'a dyn LoraBackend,
    enqueue: Box<dyn FnMut(Stream) -> Result<(), KernelError> + 'a>,
}

impl Work<'_> {
    /// Runs it once and gives its time, microseconds: between two events on the device, or on the host's clock.
    ///
    /// # Errors
    /// What launching gives, or what the work failed with.
    pub fn run_us(&mut self) -> Result<f64, KernelError> {
        if let Some(recorded) = &self.graph {
            recorded.timer.start()?;
            recorded.backend.replay(&recorded.graph)?;
            return Ok(recorded.timer.stop_us()?);
        }
        let start = Instant::now();
        (self.enqueue)(Stream::OWN)?;
        self.backend.synchronize(Stream::OWN)?;
        Ok(start.elapsed().as_secs_f64() * 1e6)
    }

    /// Time of `layers` layers, from as many runs as hold them: a run is `copies` layers.
    ///
    /// # Errors
    /// As [`run_us`](Self::run_us).
    pub fn device_time(&mut self, layers: u64, copies: u64) -> Result<Duration, KernelError> {
        let runs = layers.div_ceil(copies);
        let mut us = 0.0;
        for _ in 0..runs {
            us += self.run_us()?;
        }
        let layer_us = us / (runs * copies) as f64;
        Ok(Duration::from_secs_f64(layer_us * layers as f64 / 1e6))
    }

    /// Median of `runs` runs, after a few that are not counted.
    ///
    /// # Errors
    /// As [`run_us`](Self::run_us).
    pub fn median_us(&mut self, runs: usize) -> Result<f64, KernelError> {
        for _ in 0..WARM_RUNS {
            self.run_us()?;
        }
        let times = (0..runs.max(1)).map(|_| self.run_us());
        let mut times = times.collect::<Result<Vec<f64>, _>>()?;
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }
}
