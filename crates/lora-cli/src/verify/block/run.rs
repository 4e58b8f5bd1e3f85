//! A recorded block run on a device, and its output compared.

use super::GoldenBlock;
use crate::CliError;
use crate::verify::case::Case;
use crate::verify::compare::{Factors, UNIT, Worst};
use half::bf16;
use lora_runtime::kernels::{DeviceBuffer, ExpertRouting, GateUpOut, RoutedX, Scratch, Stream};
use lora_runtime::moe::ExpertRows;
use lora_runtime::weights::{BASE_SLOT, ExpertProj, LoraTarget};
use lora_runtime::{LoraRuntime, RuntimeError};
use std::sync::Arc;

/// One projection's base output on the device and what became of it, a vector a row.
struct Folded {
    base: Vec<Vec<f32>>,
    got: Vec<Vec<f32>>,
}

/// What running a block gave.
pub(in crate::verify) struct BlockOutcome {
    /// The element of the block's output that lies furthest from what was recorded.
    pub(in crate::verify) worst: Option<Worst>,
    /// Rows of projections of tokens without an adapter, and how many of them changed.
    pub(in crate::verify) base_rows: (usize, usize),
}

/// A block on a device: its tokens with the adapter of `request`, then the same tokens without one.
pub(in crate::verify) struct BlockRun<'a> {
    pub(in crate::verify) runtime: &'a LoraRuntime,
    pub(in crate::verify) case: &'a Case,
    pub(in crate::verify) block: &'a GoldenBlock,
    /// The case's slot, as requests name it.
    pub(in crate::verify) slot: i32,
}

impl BlockRun<'_> {
    /// Routes, folds and compares.
    ///
    /// # Errors
    /// What allocation and launches give.
    pub(in crate::verify) fn run(&self) -> Result<BlockOutcome, CliError> {
        Ok(self.folded()?)
    }

    fn folded(&self) -> Result<BlockOutcome, RuntimeError> {
        let block = self.block;
        let (rows, tokens) = (block.rows(), block.hidden.shape().0);
        let upload = |values: &[i32]| {
            let memory = Arc::clone(self.runtime.kernels().backend()) as Arc<_>;
            DeviceBuffer::from_slice(memory, values)
        };
        // The same tokens twice: with the adapter, and without one.
        let mut slots = vec![self.slot; tokens];
        slots.resize(2 * tokens, BASE_SLOT);
        let adapters = upload(&slots)?;
        let routing = RoutingBuffers::new(self.runtime, block)?;
        let max_rows = u32::try_from(2 * rows).unwrap_or(u32::MAX);
        let mut grouped = self.runtime.expert_rows(max_rows)?;
        let scratch = &mut self.runtime.scratch(max_rows)?;
        self.runtime.route_experts(
            &mut grouped,
            Stream::OWN,
            routing.routing(block)?,
            adapters.token_adapters(2 * tokens)?,
        )?;

        let hidden = doubled((0..tokens).map(|token| block.hidden.row(token).to_vec()));
        let in_order: Vec<usize> = (0..2 * tokens).collect();
        let x = self.buffer(&hidden, &in_order)?;
        let width = block.hidden.shape().1;
        let token_x = routing
            .routing(block)?
            .token_x(x.mat(2 * tokens, width, width)?);
        let [gate, up] = self.gate_up((&grouped, &routing.order), token_x, scratch)?;
        let act: Vec<Vec<f32>> = gate
            .got
            .iter()
            .zip(&up.got)
            .map(|(g, u)| {
                let pairs = g.iter().zip(u);
                let act = pairs.map(|(g, u)| block.activation.apply(*g, *u));
                act.map(|value| bf16::from_f32(value).to_f32()).collect()
            })
            .collect();
        let down = self.down((&grouped, &routing.order), &act, scratch)?;
        let changed = [&gate, &up, &down].map(|folded| {
            let base_rows = folded.base[rows..].iter().zip(&folded.got[rows..]);
            base_rows.filter(|(base, got)| base != got).count()
        });
        Ok(BlockOutcome {
            worst: self.compare(&gate, &up, &act, &down),
            base_rows: (3 * rows, changed.iter().sum()),
        })
    }

    fn gate_up(
        &self,
        grouped: (&ExpertRows, &[usize]),
        x: RoutedX<'_>,
        scratch: &mut Scratch,
    ) -> Result<[Folded; 2], RuntimeError> {
        let block = self.block;
        let base = [ExpertProj::Gate, ExpertProj::Up].map(|proj| {
            doubled((0..block.rows()).map(|row| {
                let x = block.hidden.row(block.token(row));
                block.product(&block.before, row, proj, x)
            }))
        });
        let (rows, width) = (base[0].len(), base[0][0].len());
        let (grouped, order) = grouped;
        let (mut gate, mut up) = (self.buffer(&base[0], order)?, self.buffer(&base[1], order)?);
        let out = GateUpOut {
            gate: gate.mat_mut(rows, width, width)?,
            up: up.mat_mut(rows, width, width)?,
        };
        let mut ctx = self.runtime.context(Stream::OWN, scratch);
        let _ = self
            .runtime
            .apply_expert_gate_up(&mut ctx, grouped, block.layer, x, out)?;
        let got = [self.rows_of(&gate, order)?, self.rows_of(&up, order)?];
        let [gate_base, up_base] = base.map(rounded);
        let [gate_got, up_got] = got;
        Ok([
            Folded {
                base: gate_base,
                got: gate_got,
            },
            Folded {
                base: up_base,
                got: up_got,
            },
        ])
    }

    fn down(
        &self,
        grouped: (&ExpertRows, &[usize]),
        act: &[Vec<f32>],
        scratch: &mut Scratch,
    ) -> Result<Folded, RuntimeError> {
        let block = self.block;
        let product = |(row, act): (usize, &Vec<f32>)| {
            block.product(&block.before, row % block.rows(), ExpertProj::Down, act)
        };
        let base: Vec<Vec<f32>> = act.iter().enumerate().map(product).collect();
        let (rows, width, k_in) = (base.len(), base[0].len(), act[0].len());
        let (grouped, order) = grouped;
        let (x, mut out) = (self.buffer(act, order)?, self.buffer(&base, order)?);
        let mut ctx = self.runtime.context(Stream::OWN, scratch);
        let x = x.mat(rows, k_in, k_in)?;
        let folded = out.mat_mut(rows, width, width)?;
        let _ = self
            .runtime
            .apply_expert_down(&mut ctx, grouped, block.layer, x, folded)?;
        Ok(Folded {
            got: self.rows_of(&out, order)?,
            base: rounded(base),
        })
    }

    /// Rows on the device: place i holds row `order[i]`.
    fn buffer(&self, rows: &[Vec<f32>], order: &[usize]) -> Result<DeviceBuffer, RuntimeError> {
        let values = order.iter().flat_map(|row| &rows[*row]);
        let values: Vec<bf16> = values.map(|value| bf16::from_f32(*value)).collect();
        self.runtime.buffer(&values)
    }

    /// The rows of a buffer that [`buffer`](Self::buffer) made.
    fn rows_of(
        &self,
        buffer: &DeviceBuffer,
        order: &[usize],
    ) -> Result<Vec<Vec<f32>>, RuntimeError> {
        self.runtime.kernels().backend().synchronize(Stream::OWN)?;
        let values = buffer.download::<bf16>(0, buffer.bytes() as usize / size_of::<bf16>())?;
        let mut rows = vec![Vec::new(); order.len()];
        for (place, row) in values.chunks(values.len() / order.len()).zip(order) {
            rows[*row] = place.iter().map(|value| value.to_f32()).collect();
        }
        Ok(rows)
    }

    /// Compares the sums of the rows with an adapter, each element at the tolerance that its rows' projections have.
    fn compare(
        &self,
        gate: &Folded,
        up: &Folded,
        act: &[Vec<f32>],
        down: &Folded,
    ) -> Option<Worst> {
        let block = self.block;
        let rows = block.rows();
        let got = block.sum(&down.got[..rows]);
        let (tokens, width) = block.out.shape();
        let mut tolerance = vec![vec![0.0_f64; width]; tokens];
        for row in 0..rows {
            let x = block.hidden.row(block.token(row));
            let off = |proj: ExpertProj, x: &[f32], base: &[f32]| -> Vec<f64> {
                let wanted = block.product(&block.after, row, proj, x);
                let terms = self.terms(row, proj, x);
                let each = base.iter().zip(&wanted).enumerate();
                each.map(|(at, (base, wanted))| {
                    let terms = terms.get(at).copied().unwrap_or(0.0);
                    UNIT * (f64::from(base.abs()) + f64::from(wanted.abs()) + terms)
                })
                .collect()
            };
            let gate_off = off(ExpertProj::Gate, x, &gate.base[row]);
            let up_off = off(ExpertProj::Up, x, &up.base[row]);
            let act_off: Vec<f64> = (0..act[row].len())
                .map(|at| {
                    let (g, u) = (gate.got[row][at], up.got[row][at]);
                    let rounding = UNIT * f64::from(act[row][at].abs());
                    block.activation.spread((g, u), (gate_off[at], up_off[at])) + rounding
                })
                .collect();
            let down_off = off(ExpertProj::Down, &act[row], &down.base[row]);
            let after = &block.after[block.experts[row]][ExpertProj::Down as usize];
            let to = &mut tolerance[block.token(row)];
            for (n, to) in to.iter_mut().enumerate() {
                let carried = after.row(n).iter().zip(&act_off);
                let carried: f64 = carried.map(|(w, off)| f64::from(w.abs()) * off).sum();
                *to += f64::from(block.weights[row].abs()) * (down_off[n] + carried);
            }
        }
        let of_token = |token: usize| {
            Worst::within(
                token,
                got.row(token),
                block.out.row(token),
                &tolerance[token],
            )
        };
        (0..tokens).filter_map(of_token).reduce(Worst::further)
    }

    /// `|scale| * (|B| |A| |x|)` of a row's pair, empty where its expert is not adapted.
    fn terms(&self, row: usize, proj: ExpertProj, x: &[f32]) -> Vec<f64> {
        let n = self.block.experts[row];
        let factors: Option<Factors> = self
            .case
            .factors(self.block.layer, LoraTarget::Expert { n, proj });
        factors.map_or_else(Vec::new, |factors| factors.magnitude(x))
    }
}

/// Rows, and the same rows once more.
fn doubled(rows: impl Iterator<Item = Vec<f32>>) -> Vec<Vec<f32>> {
    let once: Vec<Vec<f32>> = rows.collect();
    [&once[..], &once[..]].concat()
}

/// Rows as BF16 holds them.
fn rounded(rows: Vec<Vec<f32>>) -> Vec<Vec<f32>> {
    let row = |row: Vec<f32>| {
        row.into_iter()
            .map(|v| bf16::from_f32(v).to_f32())
            .collect()
    };
    rows.into_iter().map(row).collect()
}

/// A block's routing on the device, for its rows twice.
struct RoutingBuffers {
    /// Which row is in each place.
    order: Vec<usize>,
    experts: DeviceBuffer,
    offsets: DeviceBuffer,
    tokens: DeviceBuffer,
    num_experts: usize,
}

impl RoutingBuffers {
    fn new(runtime: &LoraRuntime, block: &GoldenBlock) -> Result<Self, RuntimeError> {
        let memory = || Arc::clone(runtime.kernels().backend()) as Arc<_>;
        let num_experts = block.before.len();
        let rows = block.rows();
        let experts: Vec<i32> = block.experts.iter().map(|expert| *expert as i32).collect();
        let mut order: Vec<usize> = (0..2 * rows).collect();
        if block.is_sorted {
            // Both halves together.
            order.sort_by_key(|row| block.experts[row % rows]);
        }
        let until = |expert: usize| {
            let before = order
                .iter()
                .filter(|row| block.experts[**row % rows] < expert);
            before.count() as u32
        };
        let offsets: Vec<u32> = (0..=num_experts).map(until).collect();
        let tokens: Vec<u32> = order.iter().map(|row| *row as u32).collect();
        Ok(Self {
            experts: DeviceBuffer::from_slice(memory(), &[&experts[..]; 2].concat())?,
            offsets: DeviceBuffer::from_slice(memory(), &offsets)?,
            tokens: DeviceBuffer::from_slice(memory(), &tokens)?,
            num_experts,
            order,
        })
    }

    fn routing(&self, block: &GoldenBlock) -> Result<ExpertRouting<'_>, RuntimeError> {
        let rows = 2 * block.rows();
        Ok(match block.is_sorted {
            false => ExpertRouting::Unsorted {
                experts: self.experts.expert_ids(rows)?,
                top_k: block.top_k,
            },
            true => ExpertRouting::Sorted {
                offsets: self.offsets.row_indices(self.num_experts + 1)?,
                tokens: self.tokens.row_indices(rows)?,
            },
        })
    }
}
