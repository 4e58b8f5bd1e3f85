//! A whole expert block against what PEFT gave: routing, both launches, activation and weighted sum, every token with its own adapter.
//!
//! Recorded are the block's input and output, the experts and weights that the router chose, and the stacked parameters before and after. Base
//! projections are computed from the parameters before, deltas come from the runtime, and the tolerance of each projection ([`super::Worst`]) is carried
//! through activation and sum to the block's output.

use super::case::Case;
use super::compare::{Factors, UNIT, Worst};
use super::golden::{Tensors, matrix};
use super::matrix::Matrix;
use super::stacked::expert_weight;
use crate::CliError;
use half::bf16;
use lora_runtime::config::{ModelFamily, ModelSpec, MoeSpec};
use lora_runtime::kernels::{DeviceBuffer, ExpertRouting, GateUpOut, RoutedX, Scratch, Stream};
use lora_runtime::moe::ExpertRows;
use lora_runtime::weights::{BASE_SLOT, ExpertProj, LoraTarget};
use lora_runtime::{LoraRuntime, RuntimeError};
use std::num::NonZeroU32;
use std::sync::Arc;

/// Largest distance, as a fraction of the largest base output, at which a recorded base still is what its parameters give: they are F32 both.
const SAME_BASE: f32 = 1e-4;

/// What a family's experts do between gate, up and down.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Activation {
    /// `silu(gate) * up`
    Silu,
    /// GPT-OSS: `(up + 1) * gate * sigmoid(1.702 * gate)`, gate at most 7, up within 7 of 0 (the defaults of its config class).
    ClampedSwish,
}

impl Activation {
    /// `None` where it is not known.
    fn of(spec: &ModelSpec) -> Option<Self> {
        match spec.family {
            ModelFamily::GptOss => Some(Self::ClampedSwish),
            _ if spec.hidden_act == "silu" => Some(Self::Silu),
            _ => None,
        }
    }

    fn apply(self, gate: f32, up: f32) -> f32 {
        let swish = |x: f32, slope: f32| x / (1.0 + (-slope * x).exp());
        match self {
            Self::Silu => swish(gate, 1.0) * up,
            Self::ClampedSwish => (up.clamp(-7.0, 7.0) + 1.0) * swish(gate.min(7.0), 1.702),
        }
    }

    /// How far the result may be off where gate and up are off by so much.
    fn spread(self, (gate, up): (f32, f32), (gate_off, up_off): (f64, f64)) -> f64 {
        let at = f64::from(self.apply(gate, up));
        let corners = [(-1.0, -1.0), (-1.0, 1.0), (1.0, -1.0), (1.0, 1.0)];
        let off = corners.map(|(g, u)| {
            let moved = self.apply(
                (f64::from(gate) + g * gate_off) as f32,
                (f64::from(up) + u * up_off) as f32,
            );
            (f64::from(moved) - at).abs()
        });
        off.into_iter().fold(0.0, f64::max)
    }
}

/// A recorded block.
#[derive(Debug, Clone)]
pub struct GoldenBlock {
    /// Its path.
    pub path: String,
    /// Global layer index.
    pub layer: usize,
    /// `[tokens, hidden]`.
    hidden: Matrix,
    /// `[tokens, hidden]`: what PEFT gave.
    out: Matrix,
    /// Expert of each row; rows are tokens times top-k, or sorted by expert, a row a token.
    experts: Vec<usize>,
    /// Weight of each row in its token's sum.
    weights: Vec<f32>,
    top_k: NonZeroU32,
    /// Rows are sorted by expert.
    is_sorted: bool,
    activation: Activation,
    /// `[out, in]` of each expert and projection, before and after.
    before: Vec<[Matrix; 3]>,
    after: Vec<[Matrix; 3]>,
}

impl GoldenBlock {
    /// The block at `path`; `None` where routing, a parameter or the activation is not known, or biases take part, which are not recorded.
    pub(super) fn read(
        tensors: &Tensors,
        path: &str,
        spec: &ModelSpec,
    ) -> Result<Option<Self>, String> {
        let (Some(moe), Some(activation)) = (&spec.moe, Activation::of(spec)) else {
            return Ok(None);
        };
        let recorded = |name: &str| tensors.contains_key(&format!("{path}{name}"));
        if !recorded(".gate_up_proj|w_adapted") || !recorded(".down_proj|w_adapted") {
            return Ok(None);
        }
        let Some(layer) = super::stacked::layer_of(path) else {
            return Ok(None);
        };
        let hidden = matrix(tensors, path, "hidden")?;
        let tokens = hidden.shape().0;
        let is_sorted = !recorded("|top_k_index");
        let (experts, weights, top_k) = if is_sorted {
            let run = tokens / moe.num_experts.max(1);
            let experts = (0..tokens).map(|row| row / run.max(1)).collect();
            (experts, vec![1.0; tokens], 1)
        } else {
            let (chosen, weights) = (
                matrix(tensors, path, "top_k_index")?,
                matrix(tensors, path, "top_k_weights")?,
            );
            if chosen.shape() != weights.shape() || chosen.shape().0 != tokens {
                return Err(format!("{path}: routing is not that of {tokens} tokens"));
            }
            let all = |m: &Matrix| -> Vec<f32> {
                (0..tokens).flat_map(|row| m.row(row).to_vec()).collect()
            };
            let experts = all(&chosen).into_iter().map(|expert| expert as usize);
            (experts.collect(), all(&weights), chosen.shape().1)
        };
        let block = Self {
            path: path.to_owned(),
            layer,
            out: matrix(tensors, path, "out")?,
            hidden,
            experts,
            weights,
            top_k: u32::try_from(top_k)
                .ok()
                .and_then(NonZeroU32::new)
                .ok_or_else(|| format!("{path}: no expert is chosen"))?,
            is_sorted,
            activation,
            before: stacked_weights(tensors, path, "w", moe)?,
            after: stacked_weights(tensors, path, "w_adapted", moe)?,
        };
        if let Some(expert) = block.experts.iter().find(|e| **e >= moe.num_experts) {
            return Err(format!(
                "{path}: expert {expert} of {} is chosen",
                moe.num_experts
            ));
        }
        Ok(block
            .base_follows(&matrix(tensors, path, "base")?)
            .then_some(block))
    }

    /// Tokens.
    pub(super) fn tokens(&self) -> usize {
        self.hidden.shape().0
    }

    /// Rows of the block's projections.
    fn rows(&self) -> usize {
        self.experts.len()
    }

    fn token(&self, row: usize) -> usize {
        row / self.top_k.get() as usize
    }

    /// `x * w^T` of a row of the block, by its expert.
    fn product(
        &self,
        weights: &[[Matrix; 3]],
        row: usize,
        proj: ExpertProj,
        x: &[f32],
    ) -> Vec<f32> {
        let weight = &weights[self.experts[row]][proj as usize];
        let x = Matrix::new(1, x.len(), x.to_vec());
        x.times_transposed(weight).row(0).to_vec()
    }

    /// The weighted sum over each token's rows.
    fn sum(&self, rows: &[Vec<f32>]) -> Matrix {
        let (tokens, width) = self.out.shape();
        let mut total = Matrix::new(tokens, width, vec![0.0; tokens * width]);
        for (row, values) in rows.iter().enumerate() {
            let to = total.row_mut(self.token(row));
            for (to, value) in to.iter_mut().zip(values) {
                *to += self.weights[row] * value;
            }
        }
        total
    }

    /// Whether the parameters alone give the recorded base.
    fn base_follows(&self, base: &Matrix) -> bool {
        let rows: Vec<Vec<f32>> = (0..self.rows())
            .map(|row| {
                let x = self.hidden.row(self.token(row));
                let project = |proj| self.product(&self.before, row, proj, x);
                let (gate, up) = (project(ExpertProj::Gate), project(ExpertProj::Up));
                let pairs = gate.iter().zip(&up);
                let act: Vec<f32> = pairs.map(|(g, u)| self.activation.apply(*g, *u)).collect();
                self.product(&self.before, row, ExpertProj::Down, &act)
            })
            .collect();
        let computed = self.sum(&rows);
        let tokens = 0..base.shape().0;
        let values =
            |m: &Matrix| -> Vec<f32> { tokens.clone().flat_map(|t| m.row(t).to_vec()).collect() };
        let (computed, base) = (values(&computed), values(base));
        let largest = base.iter().fold(0.0_f32, |most, v| most.max(v.abs()));
        let pairs = computed.iter().zip(&base);
        computed.len() == base.len()
            && pairs
                .into_iter()
                .all(|(a, b)| (a - b).abs() <= SAME_BASE * largest)
    }
}

fn stacked_weights(
    tensors: &Tensors,
    path: &str,
    role: &str,
    moe: &MoeSpec,
) -> Result<Vec<[Matrix; 3]>, String> {
    let experts = (0..moe.num_experts).map(|expert| {
        let weight = |parameter: &str, proj| {
            let name = format!("{path}.{parameter}|{role}");
            expert_weight(tensors, &name, expert, (proj, moe))
        };
        Ok([
            weight("gate_up_proj", ExpertProj::Gate)?,
            weight("gate_up_proj", ExpertProj::Up)?,
            weight("down_proj", ExpertProj::Down)?,
        ])
    });
    experts.collect()
}

/// One projection's base output on the device and what became of it, a vector a row.
struct Folded {
    base: Vec<Vec<f32>>,
    got: Vec<Vec<f32>>,
}

/// What running a block gave.
pub(super) struct BlockOutcome {
    /// The element of the block's output that lies furthest from what was recorded.
    pub(super) worst: Option<Worst>,
    /// Rows of projections of tokens without an adapter, and how many of them changed.
    pub(super) base_rows: (usize, usize),
}

/// A block on a device: its tokens with the adapter of `request`, then the same tokens without one.
pub(super) struct BlockRun<'a> {
    pub(super) runtime: &'a LoraRuntime,
    pub(super) case: &'a Case,
    pub(super) block: &'a GoldenBlock,
    /// The case's slot, as requests name it.
    pub(super) slot: i32,
}

impl BlockRun<'_> {
    /// Routes, folds and compares.
    ///
    /// # Errors
    /// What allocation and launches give.
    pub(super) fn run(&self) -> Result<BlockOutcome, CliError> {
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
