//! An overlay built from a whole table of which one row in a hundred was trained: wall time of `build_overlay`, allocations and the wait for the device
//! included. On a GPU where there is one, else on the host. Without `--bench`, a tiny table.

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use lora_kernels::cuda::CudaBackend;
use lora_kernels::host::HostBackend;
use lora_kernels::overlay::{GatherSources, gather_rows};
use lora_kernels::{DeviceBuffer, KernelError, LoraBackend, Stream};
use lora_overlay::{
    EmbedOverlay, OverlayBuilder, OverlayRaw, OverlayRawSlot, ROWDIFF_THRESH, ServedTable,
    ServedTables, build_overlay,
};
use std::sync::Arc;

/// One row in so many is trained.
const ONE_IN: usize = 100;

/// The served table, and the adapter's, of which raw tables are copied.
struct Tables {
    backend: Arc<dyn LoraBackend>,
    rows: usize,
    hidden: usize,
    served: Arc<DeviceBuffer>,
    saved: DeviceBuffer,
    every_row: DeviceBuffer,
}

impl Tables {
    fn new(
        backend: Arc<dyn LoraBackend>,
        (rows, hidden): (usize, usize),
    ) -> Result<Self, KernelError> {
        let mut values: Vec<bf16> = (0..rows * hidden)
            .map(|at| bf16::from_f32((at % 251) as f32 / 128.0 - 1.0))
            .collect();
        let served = DeviceBuffer::from_slice(backend.clone(), &values)?;
        for row in (0..rows).step_by(ONE_IN) {
            values[row * hidden + row % hidden] += bf16::ONE;
        }
        let saved = DeviceBuffer::from_slice(backend.clone(), &values)?;
        let all: Vec<u32> = (0..rows as u32).collect();
        Ok(Self {
            every_row: DeviceBuffer::from_slice(backend.clone(), &all)?,
            served: Arc::new(served),
            saved,
            backend,
            rows,
            hidden,
        })
    }

    /// Raw tables as staging leaves them, to be built from once.
    fn raw(&self) -> Result<OverlayRaw, KernelError> {
        let (rows, hidden) = (self.rows, self.hidden);
        let mut base = DeviceBuffer::zeroed(self.backend.clone(), self.saved.bytes())?;
        let none = DeviceBuffer::zeroed(self.backend.clone(), 0)?;
        let sources = GatherSources {
            base: self.saved.mat(rows, hidden, hidden)?,
            delta: none.mat(0, hidden, hidden)?,
        };
        gather_rows(
            (&*self.backend, Stream::OWN),
            sources,
            self.every_row.row_indices(rows)?,
            base.mat_mut(rows, hidden, hidden)?,
        )?;
        self.backend.synchronize(Stream::OWN)?;
        Ok(OverlayRaw {
            hidden,
            embed: OverlayRawSlot {
                base: Some(base),
                base_rows: rows as u32,
                ..OverlayRawSlot::default()
            },
            lm_head: OverlayRawSlot::default(),
            base_is_tied: false,
        })
    }

    fn build(&self, raw: OverlayRaw, served: &ServedTables<'_>) -> EmbedOverlay {
        let builder = OverlayBuilder {
            backend: &self.backend,
            stream: Stream::OWN,
            threshold: ROWDIFF_THRESH,
        };
        let overlay = build_overlay(builder, raw, served).expect("builds");
        overlay.expect("rows differ")
    }
}

fn build(c: &mut Criterion) {
    let (backend, full): (Arc<dyn LoraBackend>, _) = match CudaBackend::new(0) {
        Ok(backend) => (Arc::new(backend), (152_064, 4096)),
        Err(error) => {
            println!("build: on the host: {error}");
            (Arc::new(HostBackend::new()), (32_768, 1024))
        }
    };
    // What criterion goes by: cargo bench passes `--bench`, cargo test does not.
    let timed = std::env::args().any(|argument| argument == "--bench");
    let size = if timed { full } else { (300, 64) };
    let tables = Tables::new(backend, size).expect("memory");
    let served = ServedTable::shared(Arc::clone(&tables.served), size.0, size.1).expect("fits");
    let served = ServedTables::tied(served);
    let built = tables.build(tables.raw().expect("memory"), &served);
    assert_eq!(built.n_override as usize, size.0.div_ceil(ONE_IN));
    let mut group = c.benchmark_group("build_overlay");
    group.sample_size(10);
    group.throughput(Throughput::Bytes(2 * tables.saved.bytes()));
    group.bench_function(format!("{} x {}", size.0, size.1), |b| {
        b.iter_batched(
            || tables.raw().expect("memory"),
            |raw| tables.build(raw, &served),
            BatchSize::PerIteration,
        );
    });
    group.finish();
}

criterion_group!(benches, build);
criterion_main!(benches);
