//! A case on a device, and the three ways to fold it.

use super::{MoeCase, Outs};
use crate::{
    ExpertFold, ExpertRows, ExpertTables, ExpertTablesSpec, SortedExperts, apply_expert_lora_sorted,
};
use half::bf16;
use lora_kernels::testing::TestBackend;
use lora_kernels::{
    Applied, DeviceBuffer, ExpertRouting, GateUpOut, LaunchContext, LaunchOptions, LoraBackend,
    LoraKernels, Scratch, ScratchSpec, Stream,
};
use lora_weights::device::{DeviceMemory, LoraPair};
use lora_weights::{ExpertLoraLayer, ExpertProj};
use std::num::NonZeroU32;
use std::sync::Arc;

/// The layer that cases adapt.
const LAYER: usize = 2;

/// Tables, adapters and buffers of a case. Its methods panic where the backend gives an error.
pub struct DeviceMoe {
    backend: TestBackend,
    kernels: LoraKernels,
    scratch: Scratch,
    tables: ExpertTables,
    rows: ExpertRows,
    /// By slot.
    layers: Vec<ExpertLoraLayer>,
    /// What the pairs point into.
    _weights: Vec<DeviceBuffer>,
    buffers: Buffers,
    top_k: NonZeroU32,
}

/// What a step reads and writes.
struct Buffers {
    token_slots: DeviceBuffer,
    experts: DeviceBuffer,
    x: DeviceBuffer,
    activations: DeviceBuffer,
    outs: [DeviceBuffer; 3],
}

impl DeviceMoe {
    /// Uploads the case and installs its adapters.
    pub fn new(backend: &TestBackend, case: &MoeCase) -> Self {
        let memory = || Arc::clone(backend) as Arc<dyn DeviceMemory>;
        let shape = case.shape();
        let spec = ExpertTablesSpec {
            layers: vec![0, LAYER],
            num_experts: shape.num_experts as u32,
            slots: MoeCase::SLOTS,
            residents: MoeCase::RESIDENT_SLOTS.len() as u32,
            projections: ExpertProj::ALL.map(MoeCase::dims),
            max_rank: MoeCase::MAX_RANK,
        };
        let options = LaunchOptions::default();
        let tables = ExpertTables::new(memory(), spec).expect("tables");
        let max_rows = case.rows() as u32;
        let scratch = ScratchSpec {
            max_rows,
            max_rank: MoeCase::MAX_RANK,
            max_sites: 2,
            max_k_in: MoeCase::HIDDEN,
        };
        let mut weights = Vec::new();
        let layers =
            (0..MoeCase::SLOTS).map(|slot| upload_layer(backend, case, slot, &mut weights));
        let layers = layers.collect();
        let device = Self {
            rows: ExpertRows::new(memory(), &tables, max_rows, options.gemv_max_m).expect("rows"),
            scratch: Scratch::new(memory(), scratch).expect("scratch"),
            kernels: LoraKernels::new(Arc::clone(backend), options),
            buffers: Buffers::upload(backend, case),
            backend: Arc::clone(backend),
            tables,
            layers,
            _weights: weights,
            top_k: NonZeroU32::new(shape.top_k as u32).expect("top-k is not 0"),
        };
        for slot in 0..MoeCase::SLOTS {
            device.install(slot);
        }
        device
    }

    /// Its tables.
    pub fn tables(&self) -> &ExpertTables {
        &self.tables
    }

    /// Installs a slot's experts.
    pub fn install(&self, slot: u32) {
        let mut layers = vec![ExpertLoraLayer::default(); LAYER + 1];
        layers[LAYER] = self.layers[slot as usize].clone();
        self.tables.install(slot, &layers).expect("install");
    }

    /// Folds with unsorted rows.
    pub fn unsorted(&mut self, case: &MoeCase) -> Outs {
        self.buffers = Buffers::upload(&self.backend, case);
        self.enqueue_unsorted(case, Stream::OWN);
        self.outs()
    }

    /// Enqueues grouping and folds of unsorted rows on what the buffers hold, and nothing else. `case` gives the sizes.
    pub fn enqueue_unsorted(&mut self, case: &MoeCase, stream: Stream) {
        let routing = ExpertRouting::Unsorted {
            experts: self.buffers.experts.expert_ids(case.rows()).expect("view"),
            top_k: self.top_k,
        };
        let adapters = self.buffers.token_slots.token_adapters(case.shape().tokens);
        let queue = (&*self.backend as &dyn LoraBackend, stream);
        self.rows
            .build(queue, &self.tables, routing, adapters.expect("view"))
            .expect("build");
        let x = (&self.buffers.x, case.shape().tokens);
        let mut ctx = LaunchContext {
            kernels: &self.kernels,
            stream,
            scratch: &mut self.scratch,
        };
        let outs = &mut self.buffers.outs;
        let fold = (&self.tables, &self.rows, &self.buffers.activations);
        launch(&mut ctx, fold, (routing, x), outs, case.rows());
    }

    /// Writes another case of the same sizes into the buffers, at the same addresses.
    pub fn reset(&mut self, case: &MoeCase) {
        let buffers = &mut self.buffers;
        let written = [
            buffers.token_slots.upload(0, &case.token_slots),
            buffers.experts.upload(0, &case.experts),
            buffers.x.upload(0, &case.x),
            buffers.activations.upload(0, &case.activations),
        ];
        for result in written {
            result.expect("upload");
        }
        for (out, base) in buffers.outs.iter_mut().zip(&case.base) {
            out.upload(0, base).expect("upload");
        }
    }

    /// What the outs hold once the backend's own stream is done.
    pub fn outs(&self) -> Outs {
        self.backend.synchronize(Stream::OWN).expect("synchronize");
        self.buffers.outs.each_ref().map(download)
    }

    /// Folds with rows sorted by expert, and gives the outs in unsorted order.
    pub fn sorted(&mut self, case: &MoeCase) -> Outs {
        let (order, offsets) = case.sorted_rows();
        let sorted = permuted(case, &order);
        let tokens: Vec<u32> = order.iter().map(|row| *row as u32 / self.top_k).collect();
        let memory = || Arc::clone(&self.backend) as Arc<dyn DeviceMemory>;
        let upload = |values: &[u32]| DeviceBuffer::from_slice(memory(), values).expect("upload");
        let (bounds, tokens) = (upload(&offsets), upload(&tokens));
        let routing = ExpertRouting::Sorted {
            offsets: bounds.row_indices(offsets.len()).expect("view"),
            tokens: tokens.row_indices(order.len()).expect("view"),
        };
        let mut buffers = Buffers::upload(&self.backend, &sorted);
        let adapters = buffers.token_slots.token_adapters(case.shape().tokens);
        let queue = (&*self.backend as &dyn LoraBackend, Stream::OWN);
        self.rows
            .build(queue, &self.tables, routing, adapters.expect("view"))
            .expect("build");
        let mut ctx = LaunchContext {
            kernels: &self.kernels,
            stream: Stream::OWN,
            scratch: &mut self.scratch,
        };
        let x = (&buffers.x, case.shape().tokens);
        let fold = (&self.tables, &self.rows, &buffers.activations);
        launch(&mut ctx, fold, (routing, x), &mut buffers.outs, case.rows());
        self.backend.synchronize(Stream::OWN).expect("synchronize");
        let outs = buffers.outs.each_ref().map(download);
        unpermuted(&case.base, &outs, &order)
    }

    /// Folds adapter by adapter from the host, at most `max_rows` rows a launch, and gives the outs in unsorted order.
    pub fn host_driven(&mut self, case: &MoeCase, max_rows: usize) -> Outs {
        let mut outs = case.base.clone();
        for slot in MoeCase::RESIDENT_SLOTS {
            let (mut order, _) = case.sorted_rows();
            order.retain(|row| case.slot_of_row(*row) == Some(slot));
            let offsets = bounds_of(case, &order);
            for proj in ExpertProj::ALL {
                let out = self.host_driven_slot(case, (slot, proj), (&order, &offsets), max_rows);
                let width = MoeCase::dims(proj).1 as usize;
                for (at, row) in order.iter().enumerate() {
                    outs[proj as usize][row * width..][..width]
                        .copy_from_slice(&out[at * width..][..width]);
                }
            }
        }
        outs
    }

    fn host_driven_slot(
        &mut self,
        case: &MoeCase,
        (slot, proj): (u32, ExpertProj),
        (order, offsets): (&[usize], &[u32]),
        max_rows: usize,
    ) -> Vec<bf16> {
        let (k_in, n_out) = MoeCase::dims(proj);
        let (k_in, n_out) = (k_in as usize, n_out as usize);
        let top_k = case.shape().top_k;
        let x: Vec<bf16> = match proj {
            ExpertProj::Down => gather(&case.activations, k_in, order.iter().copied()),
            _ => gather(&case.x, k_in, order.iter().map(|row| row / top_k)),
        };
        let base = gather(&case.base[proj as usize], n_out, order.iter().copied());
        let memory = || Arc::clone(&self.backend) as Arc<dyn DeviceMemory>;
        let x = DeviceBuffer::from_slice(memory(), &x).expect("upload");
        let mut out = DeviceBuffer::from_slice(memory(), &base).expect("upload");
        let mut ctx = LaunchContext {
            kernels: &self.kernels,
            stream: Stream::OWN,
            scratch: &mut self.scratch,
        };
        let experts = SortedExperts {
            layer: &self.layers[slot as usize],
            proj,
            offsets,
        };
        let x = x.mat(order.len(), k_in, k_in).expect("x");
        let view = out.mat_mut(order.len(), n_out, n_out).expect("out");
        let _: Applied =
            apply_expert_lora_sorted(&mut ctx, experts, x, view, max_rows).expect("fold");
        self.backend.synchronize(Stream::OWN).expect("synchronize");
        download(&out)
    }
}

/// Gate and up, then down.
fn launch(
    ctx: &mut LaunchContext<'_>,
    (tables, rows, activations): (&ExpertTables, &ExpertRows, &DeviceBuffer),
    (routing, (x, tokens)): (ExpertRouting<'_>, (&DeviceBuffer, usize)),
    [gate, up, down]: &mut [DeviceBuffer; 3],
    count: usize,
) {
    let (hidden, width) = (MoeCase::HIDDEN as usize, MoeCase::WIDTH as usize);
    let fold = ExpertFold::new(tables, LAYER).expect("layer");
    let x = x.mat(tokens, hidden, hidden).expect("x");
    let out = GateUpOut {
        gate: gate.mat_mut(count, width, width).expect("gate"),
        up: up.mat_mut(count, width, width).expect("up"),
    };
    let launched = Applied::Launched { launches: 1 };
    let applied = fold.apply_gate_up(ctx, rows, routing, x, out);
    assert_eq!(applied.expect("gate and up"), launched);
    let x = activations.mat(count, width, width).expect("activations");
    let out = down.mat_mut(count, hidden, hidden).expect("down");
    let applied = fold.apply_down(ctx, rows, x, out);
    assert_eq!(applied.expect("down"), launched);
}

impl Buffers {
    fn upload(backend: &TestBackend, case: &MoeCase) -> Self {
        let memory = || Arc::clone(backend) as Arc<dyn DeviceMemory>;
        let ints = |values: &[i32]| DeviceBuffer::from_slice(memory(), values).expect("upload");
        let values = |values: &[bf16]| DeviceBuffer::from_slice(memory(), values).expect("upload");
        Self {
            token_slots: ints(&case.token_slots),
            experts: ints(&case.experts),
            x: values(&case.x),
            activations: values(&case.activations),
            outs: case.base.each_ref().map(|base| values(base)),
        }
    }
}

/// Uploads the adapters of a slot in one buffer, and gives the pairs that point into it.
fn upload_layer(
    backend: &TestBackend,
    case: &MoeCase,
    slot: u32,
    weights: &mut Vec<DeviceBuffer>,
) -> ExpertLoraLayer {
    let of_slot = || {
        case.adapters
            .iter()
            .filter(|((other, ..), _)| *other == slot)
    };
    let image: Vec<bf16> = of_slot()
        .flat_map(|(_, adapter)| adapter.a.iter().chain(&adapter.b).copied())
        .collect();
    let memory = Arc::clone(backend) as Arc<dyn DeviceMemory>;
    let buffer = DeviceBuffer::from_slice(memory, &image).expect("upload");
    let mut at = buffer.ptr();
    let pairs = of_slot().map(|((_, expert, proj), adapter)| {
        let (a, b) = (at, at.offset(adapter.a.len() as u64 * 2));
        at = b.offset(adapter.b.len() as u64 * 2);
        let pair = LoraPair {
            a,
            b,
            rank: adapter.rank,
            k_in: adapter.k_in,
            n_out: adapter.n_out,
            scale: adapter.scale,
            max_rank: adapter.max_rank,
        };
        (*expert, *proj, pair)
    });
    let layer = ExpertLoraLayer::from_pairs(None, pairs);
    weights.push(buffer);
    layer
}

/// First row of each expert among `order`, and one past the last.
fn bounds_of(case: &MoeCase, order: &[usize]) -> Vec<u32> {
    let experts = case.shape().num_experts;
    let key = |row: &usize| usize::try_from(case.experts[*row]).map_or(experts, |e| e.min(experts));
    (0..=experts)
        .map(|expert| order.partition_point(|row| key(row) < expert) as u32)
        .collect()
}

fn permuted(case: &MoeCase, order: &[usize]) -> MoeCase {
    let rows = |values: &[bf16], width: u32| gather(values, width as usize, order.iter().copied());
    let mut sorted = case.clone();
    sorted.activations = rows(&case.activations, MoeCase::WIDTH);
    for proj in ExpertProj::ALL {
        let base = &case.base[proj as usize];
        sorted.base[proj as usize] = rows(base, MoeCase::dims(proj).1);
    }
    sorted
}

fn unpermuted(base: &Outs, outs: &Outs, order: &[usize]) -> Outs {
    let mut unsorted = base.clone();
    for proj in ExpertProj::ALL {
        let width = MoeCase::dims(proj).1 as usize;
        for (at, row) in order.iter().enumerate() {
            unsorted[proj as usize][row * width..][..width]
                .copy_from_slice(&outs[proj as usize][at * width..][..width]);
        }
    }
    unsorted
}

fn gather(values: &[bf16], width: usize, rows: impl Iterator<Item = usize>) -> Vec<bf16> {
    rows.flat_map(|row| values[row * width..][..width].iter().copied())
        .collect()
}

fn download(buffer: &DeviceBuffer) -> Vec<bf16> {
    buffer
        .download(0, buffer.bytes() as usize / 2)
        .expect("download")
}
