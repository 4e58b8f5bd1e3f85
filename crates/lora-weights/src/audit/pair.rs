use crate::store::Walk;
use crate::{AdapterStore, LoraTarget, StackedLayout, TensorId, TensorMeta};
use half::bf16;
use lora_config::LoraBLayout;

/// A pair that passed the audit: what packing needs.
#[derive(Debug, Clone, PartialEq)]
pub struct AuditedPair {
    /// Global layer index.
    pub layer: usize,
    /// Target inside the layer.
    pub target: LoraTarget,
    /// Path that the config's patterns match: the module's, or for stacked experts and `target_parameters` the parameter's,
    /// without PEFT's prefix.
    pub path: String,
    /// True rank.
    pub rank: u32,
    /// Width of x: columns of A.
    pub k_in: usize,
    /// Width of out: rows of B.
    pub n_out: usize,
    /// FP32 scale, never folded into B.
    pub scale: f32,
    /// Where the values are.
    pub source: PairSource,
}

/// Where a pair's values are in its store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PairSource {
    /// A is all of tensor `a`, B all of tensor `b`.
    Whole {
        /// `[r, in]`.
        a: TensorId,
        /// `[out, r]`.
        b: TensorId,
    },
    /// One expert's projection out of tensors that hold all experts.
    Stacked(StackedPair),
}

/// One expert's projection out of stacked tensors: A is `[E * r, dimA]` with the experts' rows one after the other, B is
/// `[dimB, E * r]` with columns as [`order`](Self::order) says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StackedPair {
    /// The stacked A.
    pub a: TensorId,
    /// The stacked B.
    pub b: TensorId,
    /// Experts in each.
    pub experts: usize,
    /// The expert.
    pub expert: usize,
    /// Rank of each expert.
    pub rank: usize,
    /// What the stacked A covers.
    ///
    /// Where it covers `in`, the expert's A and B are slices of the stacked ones. Where it covers `out`, the
    /// delta is the transposed product `(B_e A_e)^T = A_e^T B_e^T`, so that the pair's A is `B_e^T` and its B `A_e^T`.
    pub layout: StackedLayout,
    /// Order of the stacked B's columns.
    pub order: LoraBLayout,
    /// The projection's rows of the parameter's output.
    pub rows: OutputRows,
}

/// Rows `start, start + step, ...` of a parameter's output axis: a half of a fused gate and up, every second row of an
/// interleaved one, or all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutputRows {
    /// First row.
    pub start: usize,
    /// From one row to the next.
    pub step: usize,
    /// How many.
    pub count: usize,
}

impl PairSource {
    /// The tensors that hold lora_A and lora_B, in this order. Pairs of one stack share them.
    pub fn tensors(&self) -> [TensorId; 2] {
        match self {
            Self::Whole { a, b } => [*a, *b],
            Self::Stacked(pair) => [pair.a, pair.b],
        }
    }

    /// Reads A as BF16 into `dst[..r * in]`, row-major, without a gap.
    ///
    /// # Panics
    /// If `store` is not the one that was audited, or `dst` is too short.
    pub fn read_a(&self, store: &AdapterStore, dst: &mut [bf16]) {
        let (id, walk) = self.a_walk(store.tensors());
        store.walk_bf16(id, &walk, dst);
    }

    /// Reads B as BF16, row `i` into `dst[i * dst_stride..][..r]`; `dst_stride` is in elements. What lies between the rows is not
    /// touched.
    ///
    /// # Panics
    /// If `store` is not the one that was audited, or `dst` is too short.
    pub fn read_b(&self, store: &AdapterStore, dst: &mut [bf16], dst_stride: usize) {
        let (id, walk) = self.b_walk(store.tensors(), dst_stride);
        store.walk_bf16(id, &walk, dst);
    }

    /// The tensor that A's values are in, and the walk over it that gives A's rows without a gap.
    pub(crate) fn a_walk(&self, tensors: &[TensorMeta]) -> (TensorId, Walk) {
        match self {
            Self::Whole { a, .. } => (*a, whole(tensors, *a, None)),
            Self::Stacked(pair) => pair.a_walk(tensors),
        }
    }

    /// The tensor that B's values are in, and the walk over it that gives B's rows `dst_stride` elements apart.
    pub(crate) fn b_walk(&self, tensors: &[TensorMeta], dst_stride: usize) -> (TensorId, Walk) {
        match self {
            Self::Whole { b, .. } => (*b, whole(tensors, *b, Some(dst_stride))),
            Self::Stacked(pair) => pair.b_walk(tensors, dst_stride),
        }
    }
}

impl StackedPair {
    fn a_walk(&self, tensors: &[TensorMeta]) -> (TensorId, Walk) {
        match self.layout {
            StackedLayout::AIn => {
                let [_, k_in] = dims2(tensors, self.a);
                let walk = Walk {
                    start: self.expert * self.rank * k_in,
                    counts: [self.rank, k_in],
                    src: [k_in, 1],
                    dst: [k_in, 1],
                };
                (self.a, walk)
            }
            StackedLayout::AOut => {
                let [k_in, columns] = dims2(tensors, self.b);
                let (first, step) = self.b_columns();
                let walk = Walk {
                    start: first,
                    counts: [k_in, self.rank],
                    src: [columns, step],
                    dst: [1, k_in],
                };
                (self.b, walk)
            }
        }
    }

    fn b_walk(&self, tensors: &[TensorMeta], dst_stride: usize) -> (TensorId, Walk) {
        let OutputRows { start, step, count } = self.rows;
        match self.layout {
            StackedLayout::AIn => {
                let [_, columns] = dims2(tensors, self.b);
                let (first, column_step) = self.b_columns();
                let walk = Walk {
                    start: start * columns + first,
                    counts: [count, self.rank],
                    src: [step * columns, column_step],
                    dst: [dst_stride, 1],
                };
                (self.b, walk)
            }
            StackedLayout::AOut => {
                let [_, n_out] = dims2(tensors, self.a);
                let walk = Walk {
                    start: self.expert * self.rank * n_out + start,
                    counts: [self.rank, count],
                    src: [n_out, step],
                    dst: [1, dst_stride],
                };
                (self.a, walk)
            }
        }
    }

    /// First column of the expert in the stacked B, and from one to the next.
    fn b_columns(&self) -> (usize, usize) {
        match self.order {
            LoraBLayout::RankMajor => (self.expert, self.experts),
            LoraBLayout::GroupedByExpert => (self.expert * self.rank, 1),
        }
    }
}

/// Every element of a matrix, rows `dst_stride` elements apart, or without a gap.
fn whole(tensors: &[TensorMeta], id: TensorId, dst_stride: Option<usize>) -> Walk {
    let [rows, columns] = dims2(tensors, id);
    Walk {
        start: 0,
        counts: [rows, columns],
        src: [columns, 1],
        dst: [dst_stride.unwrap_or(columns), 1],
    }
}

/// Shape of a matrix that the audit let through.
fn dims2(tensors: &[TensorMeta], id: TensorId) -> [usize; 2] {
    match *tensors[id.0].shape.as_slice() {
        [rows, columns] => [rows, columns],
        ref shape => panic!("a matrix of shape {shape:?}"),
    }
}
