//! A swap while other slots decode: what it costs their steps, and how long it takes itself.

use super::{Synthetic, median_us};
use crate::CliError;
use crate::report::table;
use lora_kernels::bench::{BenchDevice, Work};
use lora_kernels::{
    DeviceBuffer, KernelError, LaunchContext, MAX_SITES, RouteSite, Scratch, SiteKind, Stream,
    apply_lora_bgmv,
};
use lora_runtime::config::{ModelSpec, ParseOptions};
use lora_runtime::weights::device::{DeviceMemory, DevicePtr, MemoryError, UploadCopy};
use lora_runtime::weights::{
    AdapterSlot, LoraAdapterInput, LoraModule, LoraWeights, SlotTarget, StagedAdapter,
};
use lora_runtime::{Adapter, LoraRuntime, RoutedBatch, RuntimeError, RuntimeOptions};
use serde::Serialize;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Slots that decode while the one after them is swapped.
const DECODING: u32 = 3;

/// Rows of a decode step.
const ROWS: u32 = 32;

/// Projections of a layer that read the same x, and go in one launch.
const GROUPS: [&[LoraModule]; 4] = [
    &[LoraModule::QProj, LoraModule::KProj, LoraModule::VProj],
    &[LoraModule::OProj],
    &[LoraModule::GateProj, LoraModule::UpProj],
    &[LoraModule::DownProj],
];

/// Times of many repetitions, microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// Repetitions.
    pub count: usize,
    /// Median.
    pub median: f64,
    /// 95th of a hundred.
    pub p95: f64,
    /// The longest.
    pub most: f64,
}

impl Spread {
    fn of(times: impl Iterator<Item = f64>) -> Option<Self> {
        let mut times: Vec<f64> = times.collect();
        times.sort_by(f64::total_cmp);
        let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
        (!times.is_empty()).then(|| Self {
            count: times.len(),
            median: at(0.5),
            p95: at(0.95),
            most: at(1.0),
        })
    }
}

/// What other slots see in one phase of a swap. `None` where no step fell into it.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct PhaseTimes {
    /// The phase.
    pub phase: &'static str,
    /// Device time of a step: the deltas of all layers, from one captured graph.
    pub step_us: Option<Spread>,
    /// Host time of routing a step.
    pub route_us: Option<Spread>,
}

/// What a swap takes and what it costs.
#[derive(Debug, Clone, Serialize)]
pub struct SwapTimes {
    /// Bytes of the slot image.
    pub image_bytes: usize,
    /// Steps and routing of other slots, phase by phase.
    pub others: Vec<PhaseTimes>,
    /// A copy of as many bytes from staging memory to the device and nothing else, microseconds.
    pub copy_us: f64,
    /// From a staged image to the adapter's being visible, while nothing else runs, microseconds.
    pub visible_us: f64,
    /// The same while other slots decode, microseconds.
    pub visible_busy_us: f64,
    /// Auditing the adapter, microseconds.
    pub audit_us: f64,
    /// Packing it, microseconds.
    pub pack_us: f64,
}

impl fmt::Display for SwapTimes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [step, route] = [["step us", "p95", "most"], ["route us", "p95", "most"]];
        let mut rows = table(&[&["swap of another slot", "steps"][..], &step, &route].concat());
        for phase in &self.others {
            let count = phase.step_us.map_or(0, |spread| spread.count);
            let mut cells = vec![phase.phase.to_owned(), count.to_string()];
            for spread in [phase.step_us, phase.route_us] {
                cells.extend(spread.map_or([const { String::new() }; 3], |spread| {
                    [spread.median, spread.p95, spread.most].map(|us| format!("{us:.1}"))
                }));
            }
            rows.add_row(cells);
        }
        let (bytes, copy) = (self.image_bytes, self.copy_us);
        let rate = bytes as f64 / copy / 1e3;
        let copies = |us: f64| format!("{us:.0} us ({:.2} copies)", us / copy);
        write!(
            f,
            "{rows}\nimage of {bytes} bytes: bare copy {copy:.0} us ({rate:.1} GB/s); staged to visible {}, beside decode {}; \
             audit {:.0} us, pack {:.0} us",
            copies(self.visible_us),
            copies(self.visible_busy_us),
            self.audit_us,
            self.pack_us,
        )
    }
}

/// Times a swap of `synthetic` beside slots that decode: `swaps` swaps after `quiet` steps without any.
///
/// # Errors
/// A pool that the backend has no room for.
pub fn swap_times(
    synthetic: &Synthetic,
    device: &BenchDevice,
    (swaps, quiet): (usize, usize),
) -> Result<SwapTimes, CliError> {
    let world = World::new(synthetic, device)?;
    let mut steps = Steps::new(&world, device)?;
    let (samples, swapped) = world.swap_beside(&mut steps, (swaps, quiet))?;
    drop(steps);
    let report = world.weights().audit(&world.input());
    let audit = || {
        std::hint::black_box(world.weights().audit(&world.input()));
        Ok::<(), CliError>(())
    };
    let pack = || {
        let staged = world.weights().stage(&world.input().with_report(&report));
        staged.map(drop).map_err(RuntimeError::from)
    };
    let image_bytes = world.stage()?.image_bytes();
    let alone = (0..swaps)
        .map(|_| world.swap_once(world.stage()?))
        .collect::<Result<Vec<_>, CliError>>()?;
    let times = |swaps: &[Duration]| Spread::of(swaps.iter().map(|time| micros(*time)));
    let median = |swaps: &[Duration]| times(swaps).map_or(0.0, |spread| spread.median);
    Ok(SwapTimes {
        image_bytes,
        others: samples.by_phase(&swapped),
        copy_us: copy_us(&**device.backend(), image_bytes, swaps)?,
        visible_us: median(&alone),
        visible_busy_us: median(&swapped.iter().map(Swapped::visible).collect::<Vec<_>>()),
        audit_us: median_us(swaps, audit)?,
        pack_us: median_us(swaps, pack)?,
    })
}

/// A runtime whose first slots hold adapters, and one more to swap.
struct World {
    runtime: LoraRuntime,
    adapter: Adapter,
}

impl World {
    fn new(synthetic: &Synthetic, device: &BenchDevice) -> Result<Self, CliError> {
        let model = ModelSpec::from_hf_config(&synthetic.shape().model_config())?;
        let open = |name: String| Adapter::open(name, synthetic.dir(), &ParseOptions::default());
        let mut options = RuntimeOptions::new(DECODING + 1, synthetic.shape().rank as u32);
        options.pool.policy.allow_rotation = true;
        let runtime = LoraRuntime::new(Arc::clone(device.backend()), model, options)?;
        let residents = (0..DECODING).map(|slot| open(format!("resident {slot}")));
        runtime.load(&residents.collect::<Result<Vec<_>, _>>()?)?;
        let adapter = open("swapped".to_owned())?;
        Ok(Self { runtime, adapter })
    }

    fn weights(&self) -> &LoraWeights {
        self.runtime.weights()
    }

    fn input(&self) -> LoraAdapterInput<'_> {
        LoraAdapterInput::new(
            self.adapter.name(),
            self.adapter.store(),
            self.adapter.config(),
        )
    }

    fn stage(&self) -> Result<StagedAdapter, CliError> {
        let staged = self.weights().stage(&self.input());
        Ok(staged.map_err(RuntimeError::from)?)
    }

    /// From a staged image to visible.
    fn swap_once(&self, staged: StagedAdapter) -> Result<Duration, CliError> {
        let start = Instant::now();
        let transaction = staged.begin(SlotTarget::Slot(DECODING));
        let transaction = transaction.map_err(|refused| RuntimeError::from(refused.error))?;
        let adapter: Arc<AdapterSlot> = transaction.commit().map_err(RuntimeError::from)?;
        let taken = start.elapsed();
        debug_assert_eq!(adapter.slot(), DECODING);
        Ok(taken)
    }

    /// Swaps on a thread of its own while this one decodes.
    fn swap_beside(
        &self,
        steps: &mut Steps<'_>,
        (swaps, quiet): (usize, usize),
    ) -> Result<(Samples, Vec<Swapped>), CliError> {
        let mut samples = Samples::default();
        for _ in 0..quiet {
            samples.0.push(steps.run(&self.runtime)?);
        }
        let done = AtomicBool::new(false);
        let swapped = std::thread::scope(|scope| {
            let swapping = scope.spawn(|| {
                let swapped = (0..swaps).map(|_| self.watched_swap()).collect();
                done.store(true, Ordering::Release);
                swapped
            });
            let mut stepped = Ok(());
            while stepped.is_ok() && !done.load(Ordering::Acquire) {
                stepped = steps
                    .run(&self.runtime)
                    .map(|sample| samples.0.push(sample));
            }
            let swapped: Result<Vec<Swapped>, CliError> = match swapping.join() {
                Ok(swapped) => swapped,
                Err(panic) => std::panic::resume_unwind(panic),
            };
            stepped.and(swapped)
        })?;
        Ok((samples, swapped))
    }

    fn watched_swap(&self) -> Result<Swapped, CliError> {
        let staging = Instant::now();
        let staged = self.stage()?;
        let begun = Instant::now();
        self.swap_once(staged)?;
        Ok(Swapped {
            staging,
            begun,
            visible: Instant::now(),
        })
    }
}

/// When a swap was in which phase.
struct Swapped {
    staging: Instant,
    begun: Instant,
    visible: Instant,
}

impl Swapped {
    fn visible(&self) -> Duration {
        self.visible - self.begun
    }

    /// The phase that a step between two moments fell into; the later one where it saw two.
    fn phase(&self, start: Instant, end: Instant) -> Option<&'static str> {
        let overlaps = |from: Instant, to: Instant| start < to && from < end;
        if overlaps(self.begun, self.visible) {
            return Some(UPLOADING);
        }
        overlaps(self.staging, self.begun).then_some(PACKING)
    }
}

const QUIET: &str = "no swap";
const PACKING: &str = "audit, pack";
const UPLOADING: &str = "upload, commit";

/// Steps that were taken: when, the device's time, the routing's.
#[derive(Default)]
struct Samples(Vec<Sample>);

struct Sample {
    start: Instant,
    end: Instant,
    step_us: f64,
    route_us: f64,
}

impl Samples {
    fn by_phase(&self, swapped: &[Swapped]) -> Vec<PhaseTimes> {
        let phase_of = |sample: &Sample| {
            let phases = swapped
                .iter()
                .map(|swap| swap.phase(sample.start, sample.end));
            phases.flatten().last().unwrap_or(QUIET)
        };
        let phases: Vec<_> = self.0.iter().map(phase_of).collect();
        let of = |phase| {
            self.0
                .iter()
                .zip(&phases)
                .filter(move |(_, p)| **p == phase)
        };
        [QUIET, PACKING, UPLOADING]
            .map(|phase| PhaseTimes {
                phase,
                step_us: Spread::of(of(phase).map(|(sample, _)| sample.step_us)),
                route_us: Spread::of(of(phase).map(|(sample, _)| sample.route_us)),
            })
            .to_vec()
    }
}

/// Decode steps of the slots that are not swapped.
struct Steps<'d> {
    work: Work<'d>,
    /// Routed anew before each step, beside the one that the graph reads.
    batch: RoutedBatch,
    requests: Vec<i32>,
}

impl<'d> Steps<'d> {
    fn new(world: &'d World, device: &'d BenchDevice) -> Result<Self, CliError> {
        let runtime = &world.runtime;
        let requests: Vec<i32> = (0..ROWS).map(|row| (row % DECODING) as i32).collect();
        let mut routed = runtime.batch(ROWS)?;
        runtime.route(&mut routed, Stream::OWN, &requests, ROWS as usize)?;
        let mut buffers = Buffers::new(runtime)?;
        let layers = runtime.model().layers.len();
        let work = device.record(move |stream| {
            (0..layers).try_for_each(|layer| buffers.enqueue(runtime, &routed, (layer, stream)))
        });
        Ok(Self {
            work: work.map_err(RuntimeError::from)?,
            batch: runtime.batch(ROWS)?,
            requests,
        })
    }

    fn run(&mut self, runtime: &LoraRuntime) -> Result<Sample, CliError> {
        let start = Instant::now();
        runtime.route(&mut self.batch, Stream::OWN, &self.requests, ROWS as usize)?;
        let routed = Instant::now();
        let step_us = self.work.run_us().map_err(RuntimeError::from)?;
        Ok(Sample {
            start,
            end: Instant::now(),
            step_us,
            route_us: micros(routed - start),
        })
    }
}

/// Rows of a step: x, and an out for each projection of a launch.
struct Buffers {
    x: DeviceBuffer,
    outs: Vec<DeviceBuffer>,
    scratch: Scratch,
}

impl Buffers {
    fn new(runtime: &LoraRuntime) -> Result<Self, CliError> {
        let modules = GROUPS.iter().copied().flatten();
        let dims = modules.filter_map(|module| module.dims(runtime.model(), 0));
        let widest = dims.map(|(n_out, k_in)| n_out.max(k_in)).max().unwrap_or(1);
        let memory = || Arc::clone(runtime.kernels().backend()) as Arc<dyn DeviceMemory>;
        let rows = || DeviceBuffer::zeroed(memory(), u64::from(ROWS) * widest as u64 * 2);
        let rows = || rows().map_err(RuntimeError::from);
        Ok(Self {
            x: rows()?,
            outs: (0..3).map(|_| rows()).collect::<Result<_, _>>()?,
            scratch: runtime.scratch(ROWS)?,
        })
    }

    /// The deltas of one layer.
    fn enqueue(
        &mut self,
        runtime: &LoraRuntime,
        routed: &RoutedBatch,
        (layer, stream): (usize, Stream),
    ) -> Result<(), KernelError> {
        for group in GROUPS {
            let mut sites = arrayvec::ArrayVec::<RouteSite<'_>, MAX_SITES>::new();
            let mut k_in = 0;
            for (module, out) in group.iter().zip(&mut self.outs) {
                let Some(route) = runtime.weights().route(layer, *module) else {
                    continue;
                };
                let width = route.n_out as usize;
                k_in = route.k_in as usize;
                let out = out.mat_mut(ROWS as usize, width, width)?;
                sites.push(RouteSite { route, out });
            }
            let mut ctx = LaunchContext {
                kernels: runtime.kernels(),
                stream,
                scratch: &mut self.scratch,
            };
            let x = self.x.mat(ROWS as usize, k_in, k_in)?;
            let groups = routed.groups();
            apply_lora_bgmv(&mut ctx, SiteKind::Attention, x, groups, &mut sites)?;
        }
        Ok(())
    }
}

/// The bare copy: median of `runs`.
fn copy_us(memory: &dyn DeviceMemory, bytes: usize, runs: usize) -> Result<f64, CliError> {
    let copied = |dst: DevicePtr| -> Result<f64, MemoryError> {
        let mut staging = Some(memory.stage(bytes)?);
        median_us(runs, || {
            let Some(source) = staging.take() else {
                return Ok(());
            };
            let copy = UploadCopy::contiguous(0, dst, bytes);
            staging = Some(memory.upload(source, &[copy])?.wait()?);
            Ok(())
        })
    };
    let dst = memory.alloc_zeroed(bytes as u64).map_err(KernelError::from);
    let dst = dst.map_err(RuntimeError::from)?;
    let copied = copied(dst).map_err(KernelError::from);
    let freed = memory.free(dst).map_err(KernelError::from);
    let copied = copied.map_err(RuntimeError::from)?;
    freed.map_err(RuntimeError::from)?;
    Ok(copied)
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_belongs_to_the_phase_that_it_overlaps() {
        let zero = Instant::now();
        let at = |ms: u64| zero + Duration::from_millis(ms);
        let swapped = Swapped {
            staging: at(10),
            begun: at(20),
            visible: at(30),
        };
        assert_eq!(swapped.phase(at(5), at(10)), None);
        assert_eq!(swapped.phase(at(5), at(11)), Some(PACKING));
        assert_eq!(swapped.phase(at(15), at(21)), Some(UPLOADING));
        assert_eq!(swapped.phase(at(30), at(31)), None);
    }

    #[test]
    fn spread_says_median_p95_and_most() {
        let spread = Spread::of((1..=101).rev().map(f64::from)).expect("some times");
        assert_eq!(
            (spread.median, spread.p95, spread.most),
            (51.0, 96.0, 101.0)
        );
        assert_eq!(Spread::of(std::iter::empty()), None);
    }
}
