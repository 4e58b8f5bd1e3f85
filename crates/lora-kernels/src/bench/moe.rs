//! Deltas of a MoE block's experts on a device, to check and to time, the routing of their rows included.

mod table;

pub use table::{
    H200_MOE_SHAPES, HOST_MOE_SHAPES, MoeLayer, MoeShape, MoeTable, MoeTimes, QWEN3_30B_LAYER,
    TINY_MOE_LAYER, TINY_MOE_SHAPES,
};

use super::data::{Matrix, Projection, cold_copies};
use super::{BenchDevice, Work};
use crate::testing::{Fill, Rng, TestAdapter, Verdict, naive::Judge, naive_delta};
use crate::{
    BytesMoved, DeviceBuffer, ExpertRouting, ExpertSpace, KernelError, LaunchContext,
    LaunchOptions, LoraKernels, Problem, ProblemSite, RoutedX, RowGroups, RowGroupsSpec, Scratch,
    ScratchSpec, SiteKind, Stream, apply_lora_bgmv, bytes_moved,
};
use lora_weights::device::DeviceMemory;
use lora_weights::padded_rank;
use std::num::NonZeroU32;
use std::sync::Arc;

/// Rows of each projection that are compared with the reference.
const CHECKED_ROWS: usize = 12;

/// What a layer runs, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Group,
    GateUp,
    Down,
}

impl Part {
    const ALL: [Self; 3] = [Self::Group, Self::GateUp, Self::Down];
}

/// A [`MoeShape`] with its rows, its copies of experts and everything launches need, on a device.
pub struct MoeBench<'d> {
    device: &'d BenchDevice,
    shape: MoeShape,
    layer: MoeLayer,
    copies: usize,
    bytes: BytesMoved,
    /// Expert of each row.
    chosen: Vec<i32>,
    kernels: LoraKernels,
    scratch: Scratch,
    groups: RowGroups,
    routing: Routing,
    x: Matrix,
    activations: Matrix,
    gate: Projection,
    up: Projection,
    down: Projection,
}

/// What the device reads to route rows.
struct Routing {
    experts: DeviceBuffer,
    adapters: DeviceBuffer,
    residents: DeviceBuffer,
}

impl<'d> MoeBench<'d> {
    /// Makes random rows, experts and routing, uploads them, and groups the rows.
    ///
    /// # Errors
    /// What allocation and upload give.
    pub fn new(
        device: &'d BenchDevice,
        shape: MoeShape,
        layer: MoeLayer,
        options: LaunchOptions,
    ) -> Result<Self, KernelError> {
        let backend = device.backend();
        let memory: Arc<dyn DeviceMemory> = Arc::clone(backend) as Arc<_>;
        let mut rng = Rng::new(u64::from(shape.rank) + u64::from(shape.tokens));
        let chosen = chosen_experts(&mut rng, &shape, &layer);
        let bytes = bytes(&shape, &layer, &chosen);
        let copies = cold_copies(bytes, backend.caps().l2_bytes);
        let rows = chosen.len() as u32;
        let mut projection = |(k_in, n_out): (u32, u32)| {
            let pair = |_| TestAdapter::random(&mut rng, Fill::Signed, shape.rank, (k_in, n_out));
            let pairs = (0..shape.adapters * layer.experts).map(pair).collect();
            let out = Matrix::random(&memory, &mut rng, (rows, n_out))?;
            Projection::upload(&memory, out, pairs, (shape.rank, copies))
        };
        let gate = projection((layer.hidden, layer.width))?;
        let up = projection((layer.hidden, layer.width))?;
        let down = projection((layer.width, layer.hidden))?;
        let slots: Vec<i32> = (0..shape.tokens)
            .map(|i| (i % shape.adapters) as i32)
            .collect();
        let residents: Vec<i32> = (0..shape.adapters as i32).collect();
        let ints = |values: &[i32]| DeviceBuffer::from_slice(Arc::clone(&memory), values);
        let routing = Routing {
            experts: ints(&chosen)?,
            adapters: ints(&slots)?,
            residents: ints(&residents)?,
        };
        let groups =
            RowGroupsSpec::experts(rows, shape.adapters * layer.experts, options.gemv_max_m);
        let scratch = ScratchSpec {
            max_rows: rows,
            max_rank: shape.rank,
            max_sites: 2,
            max_k_in: layer.hidden.max(layer.width),
        };
        let mut bench = Self {
            x: Matrix::random(&memory, &mut rng, (shape.tokens, layer.hidden))?,
            activations: Matrix::random(&memory, &mut rng, (rows, layer.width))?,
            groups: RowGroups::new(Arc::clone(&memory), groups)?,
            scratch: Scratch::new(memory, scratch)?,
            kernels: LoraKernels::new(Arc::clone(backend), options),
            device,
            shape,
            layer,
            copies,
            bytes,
            chosen,
            routing,
            gate,
            up,
            down,
        };
        bench.enqueue(Part::Group, 0, Stream::OWN)?;
        backend.synchronize(Stream::OWN)?;
        Ok(bench)
    }

    /// Layers that [`work`](Self::work) runs: one for each copy of the experts.
    pub fn copies(&self) -> usize {
        self.copies
    }

    /// What a layer moves.
    pub fn bytes(&self) -> BytesMoved {
        self.bytes
    }

    /// Applies the first and the last copy to the first out, and compares rows of every projection with the reference.
    ///
    /// # Errors
    /// What launching gives.
    pub fn check(&mut self) -> Result<Verdict, KernelError> {
        let mut judge = Judge::default();
        let mut copies = vec![0, self.copies - 1];
        copies.dedup();
        for copy in copies {
            for projection in [&mut self.gate, &mut self.up, &mut self.down] {
                projection.reset()?;
            }
            for part in Part::ALL {
                self.enqueue(part, copy, Stream::OWN)?;
            }
            self.device.backend().synchronize(Stream::OWN)?;
            self.judge(&mut judge)?;
        }
        Ok(judge.verdict())
    }

    fn judge(&self, judge: &mut Judge) -> Result<(), KernelError> {
        let step = self.chosen.len().div_ceil(CHECKED_ROWS).max(1);
        for (row, expert) in self.chosen.iter().enumerate().step_by(step) {
            let token = row / self.layer.top_k as usize;
            let adapter = token % self.shape.adapters as usize;
            let entry = adapter * self.layer.experts as usize + *expert as usize;
            let hidden = self.x.row(token);
            for (projection, x) in [
                (&self.gate, hidden),
                (&self.up, hidden),
                (&self.down, self.activations.row(row)),
            ] {
                let out = &projection.out;
                let expected = naive_delta(x, &projection.adapters[entry]);
                let found = out.buffer.download(row * out.cols, out.cols)?;
                judge.row(out.row(row), &found, &expected);
            }
        }
        Ok(())
    }

    /// Every copy's grouping, gate and up, and down, in the order of the copies.
    ///
    /// # Errors
    /// What launching gives.
    pub fn work(&mut self) -> Result<Work<'_>, KernelError> {
        self.record(&Part::ALL)
    }

    fn record<'a>(&'a mut self, parts: &'a [Part]) -> Result<Work<'a>, KernelError> {
        let copies = self.copies;
        self.device.record(move |stream| {
            (0..copies).try_for_each(|copy| {
                let mut parts = parts.iter();
                parts.try_for_each(|part| self.enqueue(*part, copy, stream))
            })
        })
    }

    /// Times the layer and each of its parts: medians of `runs` runs.
    ///
    /// # Errors
    /// What launching gives.
    pub fn measure(&mut self, runs: usize) -> Result<MoeTimes, KernelError> {
        let copies = self.copies as f64;
        let mut us = |parts: &[Part]| -> Result<f64, KernelError> {
            Ok(self.record(parts)?.median_us(runs)? / copies)
        };
        let layer_us = us(&Part::ALL)?;
        let [group_us, gate_up_us, down_us] = [
            us(&[Part::Group])?,
            us(&[Part::GateUp])?,
            us(&[Part::Down])?,
        ];
        Ok(MoeTimes {
            shape: self.shape,
            layer_us,
            group_us,
            gate_up_us,
            down_us,
            bytes: self.bytes,
        })
    }

    fn enqueue(&mut self, part: Part, copy: usize, stream: Stream) -> Result<(), KernelError> {
        let rows = self.chosen.len();
        let top_k = NonZeroU32::new(self.layer.top_k).unwrap_or(NonZeroU32::MIN);
        if part == Part::Group {
            let routing = ExpertRouting::Unsorted {
                experts: self.routing.experts.expert_ids(rows)?,
                top_k,
            };
            let adapters = self.shape.adapters;
            let space = ExpertSpace {
                resident_of_slot: self.routing.residents.resident_of_slot(adapters as usize)?,
                residents: adapters,
                num_experts: self.layer.experts,
            };
            let tokens = self.routing.adapters.token_adapters(self.x.rows)?;
            let queue = (&**self.device.backend() as _, stream);
            return self.groups.build_experts(queue, routing, tokens, space);
        }
        let mut ctx = LaunchContext {
            kernels: &self.kernels,
            stream,
            scratch: &mut self.scratch,
        };
        let _ = if part == Part::GateUp {
            let x = RoutedX::repeated(self.x.view()?, top_k);
            let mut sites = [self.gate.site(copy)?, self.up.site(copy)?];
            apply_lora_bgmv(&mut ctx, SiteKind::Expert, x, &self.groups, &mut sites)?
        } else {
            let mut sites = [self.down.site(copy)?];
            let x = self.activations.view()?;
            apply_lora_bgmv(&mut ctx, SiteKind::Expert, x, &self.groups, &mut sites)?
        };
        Ok(())
    }
}

/// `top_k` different experts for each token.
fn chosen_experts(rng: &mut Rng, shape: &MoeShape, layer: &MoeLayer) -> Vec<i32> {
    let mut experts: Vec<i32> = (0..layer.experts as i32).collect();
    let count = experts.len();
    let mut chosen = Vec::with_capacity((shape.tokens * layer.top_k) as usize);
    for _ in 0..shape.tokens {
        for at in 0..layer.top_k as usize {
            experts.swap(at, rng.below(at..count));
            chosen.push(experts[at]);
        }
    }
    chosen
}

/// What the two launches of a layer move.
fn bytes(shape: &MoeShape, layer: &MoeLayer, chosen: &[i32]) -> BytesMoved {
    let mut groups = vec![0; (shape.adapters * layer.experts) as usize];
    for (row, expert) in chosen.iter().enumerate() {
        let adapter = (row as u32 / layer.top_k) % shape.adapters;
        groups[(adapter * layer.experts) as usize + *expert as usize] += 1;
    }
    let problem = |k_in, outs_per_x, n_outs: &[u32]| Problem {
        k_in,
        outs_per_x,
        small_max: LaunchOptions::default().gemv_max_m,
        sites: n_outs
            .iter()
            .map(|n_out| ProblemSite {
                n_out: *n_out,
                max_rank: padded_rank(shape.rank),
                ranks: vec![shape.rank; groups.len()],
            })
            .collect(),
        groups: groups.clone(),
    };
    let gate_up = problem(layer.hidden, layer.top_k, &[layer.width, layer.width]);
    let down = problem(layer.width, 1, &[layer.hidden]);
    [gate_up, down].iter().map(bytes_moved).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::HostBackend;

    #[test]
    fn a_check_passes_once_and_fails_on_a_delta_added_twice() {
        let device = BenchDevice::host(HostBackend::new());
        for shape in TINY_MOE_SHAPES {
            let options = LaunchOptions::default();
            let mut bench = MoeBench::new(&device, shape, TINY_MOE_LAYER, options).unwrap();
            assert!(bench.check().unwrap().passes(), "{shape}");
            bench.enqueue(Part::Down, 0, Stream::OWN).unwrap();
            let mut judge = Judge::default();
            bench.judge(&mut judge).unwrap();
            assert!(!judge.verdict().passes(), "{shape}");
        }
    }

    #[test]
    fn a_line_says_times_goal_and_floor() {
        let device = BenchDevice::host(HostBackend::new());
        let shape = H200_MOE_SHAPES[0];
        let options = LaunchOptions::default();
        let mut bench = MoeBench::new(&device, shape, TINY_MOE_LAYER, options).unwrap();
        let times = bench.measure(1).unwrap();
        assert!(times.layer_us > 0.0 && times.group_us > 0.0);
        let table = MoeTable {
            device: "NVIDIA H200".into(),
            lines: vec![times],
        };
        let text = table.to_string();
        let line = text.lines().nth(3).expect("a line below the rule");
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        assert_eq!(cells[1], "rank 16, 1 rows, 1 adapters");
        assert_eq!(cells[3..5], ["9.0", "7.0"]);
    }

    /// One row reads eight experts: a lone token's bytes are known.
    #[test]
    fn the_floor_counts_each_touched_expert_once() {
        let layer = QWEN3_30B_LAYER;
        let shape = MoeShape::new(16, 1, 1);
        let chosen = chosen_experts(&mut Rng::new(1), &shape, &layer);
        let bytes = bytes(&shape, &layer, &chosen);
        assert_eq!(bytes.adapters, 8 * 3 * 16 * (2048 + 768) * 2);
        assert_eq!(bytes.x, 2048 * 2 + 8 * 768 * 2);
        assert_eq!(bytes.out, 8 * (768 + 768 + 2048) * 4);
    }
}
