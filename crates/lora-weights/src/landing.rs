//! Landing plans: where the rows of an adapter's tensors go in a slot, for an engine that brings the bytes itself.

use crate::audit::audit_weights_manifest;
use crate::device::{DevicePtr, LoraPair};
use crate::layout::ELEMENT_BYTES;
use crate::pack::{Place, in_order, mismatch, place_of, unit_count};
use crate::store::Walk;
use crate::{
    AdapterAb, AuditReason, AuditReport, AuditedPair, Finding, LoraTarget, PoolLayout, PoolSpec,
    SlotPairs, TensorDtype, TensorId, WeightManifest, WeightsError, padded_rank,
};
use lora_config::{
    AdapterConfig, ConfigError, FindingLevel, ModelSpec, ParseOptions, parse_peft_adapter_config,
};
use std::ops::Range;

/// An adapter as far as it is known before its data: its config, and what the header of its weights says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterManifest {
    /// Where it is: a URL, a folder, whatever names it in reports.
    pub location: String,
    /// Text of its `adapter_config.json`.
    pub config_json: String,
    /// Names, dtypes, shapes and byte ranges of its `adapter_model.safetensors`.
    pub weights: WeightManifest,
}

impl AdapterManifest {
    /// The parsed config: rank, alpha and scale of every module.
    ///
    /// # Errors
    /// As [`parse_peft_adapter_config`].
    pub fn config(&self, options: &ParseOptions) -> Result<AdapterConfig, ConfigError> {
        parse_peft_adapter_config(&self.config_json, options)
    }
}

/// What is to land: an adapter's header and config, and the pool it is for.
#[derive(Debug, Clone, Copy)]
pub struct LandRequest<'a> {
    /// Name of the adapter, for errors.
    pub name: &'a str,
    /// Where its bytes are in the file.
    pub weights: &'a WeightManifest,
    /// Rank and scale of its modules, and how its stacked tensors are to be read.
    pub config: &'a AdapterConfig,
    /// The model that the pool is laid out for.
    pub model: &'a ModelSpec,
    /// The pool.
    pub pool: &'a PoolSpec,
}

/// Where it is to land.
#[derive(Debug, Clone, Copy)]
pub struct LandPlace<'a> {
    /// First byte of the slot.
    pub slot: DevicePtr,
    /// Units of the expert region: one for each router or expert pair, taken in (layer, target) order. More may be given.
    pub units: &'a [DevicePtr],
}

/// One strided copy that brings a matrix of a pair to its place: `rows` rows of `row_bytes` bytes.
///
/// A is one row, since its rows are contiguous on both sides. B's rows are `dst_stride` apart, the padded rank; where that is
/// the true rank, B is one row too. What no target covers (rows of A and columns of B past the true rank, modules that are not
/// adapted) must be zero.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LandTarget {
    /// The tensor that the rows are of.
    pub tensor: TensorId,
    /// Global layer index.
    pub layer: usize,
    /// Target inside the layer.
    pub target: LoraTarget,
    /// Which matrix of the target's pair the rows make.
    pub ab: AdapterAb,
    /// Path that the config's patterns match, from which the scale is found again.
    pub path: String,
    /// True rank.
    pub rank: u32,
    /// The matrix' other side: columns of A, rows of B.
    pub width: u32,
    /// The true rank rounded to the granule: rows of A, and elements from one row of B to the next.
    pub max_rank: u32,
    /// First byte, counted from the start of the file.
    pub src_offset: u64,
    /// Bytes from one row in the file to the next.
    pub src_stride: u64,
    /// First byte in device memory.
    pub dst: DevicePtr,
    /// Bytes from one row in device memory to the next.
    pub dst_stride: u64,
    /// Bytes a row.
    pub row_bytes: u64,
    /// Rows.
    pub rows: u64,
}

impl LandTarget {
    /// Bytes of the file from the first that is copied to the last.
    pub fn source(&self) -> Range<u64> {
        let last = self.rows.saturating_sub(1);
        self.src_offset..self.src_offset + last * self.src_stride + self.row_bytes
    }

    /// Copies as much of the target as lies in `piece`, the bytes of the file from `start` on, into `memory`, whose first byte has
    /// address 0: pieces may come in any order and end anywhere.
    ///
    /// # Panics
    /// Where `memory` does not hold the destination.
    pub fn copy_piece(&self, start: u64, piece: &[u8], memory: &mut [u8]) {
        let end = start + piece.len() as u64;
        let first = start.saturating_sub(self.src_offset) / self.src_stride.max(1);
        for row in first..self.rows {
            let from = self.src_offset + row * self.src_stride;
            let (low, high) = (from.max(start), (from + self.row_bytes).min(end));
            if from >= end {
                break;
            }
            if low < high {
                let to = self.dst.0 + row * self.dst_stride + (low - from);
                // Inside two buffers that exist.
                let bytes = &piece[(low - start) as usize..(high - start) as usize];
                memory[to as usize..][..bytes.len()].copy_from_slice(bytes);
            }
        }
    }
}

/// Plans the landing of an adapter into a slot: for each matrix of each pair one copy, in (layer, target) order, A before B.
/// Touches no device.
///
/// The bytes go where they go unchanged, so that only BF16 can land, and only where copies of rows do it: F16 and F32 (which
/// need rounding), stacked experts that would have to be transposed or gathered element by element, and rows of the vocabulary
/// are refused as `landing-geometry`. A store or a source takes all of them.
///
/// The values are not seen here. An engine with a pool of its own checks them for NaN and infinity before a request can reach the
/// slot; for slots of [`LoraWeights`](crate::LoraWeights), [`stage_landed`](crate::LoraWeights::stage_landed) does.
///
/// # Errors
/// [`WeightsError::Refused`] with everything that the audit finds, `landing-geometry` among it;
/// [`WeightsError::ExpertRegionFull`] where `place` has too few units; as [`PoolLayout::new`].
pub fn build_land_targets(
    request: LandRequest<'_>,
    place: LandPlace<'_>,
) -> Result<Vec<LandTarget>, WeightsError> {
    let layout = PoolLayout::new(request.model, request.pool)?;
    let report = accept(request)?;
    plan(request.weights, &report, &layout, place)
}

/// What the audit says of an adapter that copies of rows bring to its place.
pub(crate) fn accept(request: LandRequest<'_>) -> Result<AuditReport, WeightsError> {
    let LandRequest {
        name,
        weights,
        config,
        model,
        pool,
    } = request;
    let mut report = audit_weights_manifest(weights, config, model, pool);
    if report.ok() {
        check_geometry(weights, &mut report);
    }
    if report.ok() {
        return Ok(report);
    }
    Err(WeightsError::Refused {
        adapter: name.to_owned(),
        report: Box::new(report),
    })
}

/// The copies of an accepted adapter.
pub(crate) fn plan(
    weights: &WeightManifest,
    report: &AuditReport,
    layout: &PoolLayout,
    place: LandPlace<'_>,
) -> Result<Vec<LandTarget>, WeightsError> {
    let (needed, free) = (unit_count(&report.pairs), place.units.len() as u64);
    if needed > free {
        return Err(WeightsError::ExpertRegionFull {
            needed,
            free,
            total: free,
        });
    }
    let mut units = place.units.iter();
    let mut targets = Vec::with_capacity(2 * report.pairs.len());
    for pair in in_order(&report.pairs) {
        let at = place_of(pair, layout)?;
        let base = if at.in_unit {
            *units.next().ok_or_else(|| mismatch(pair, "pairs", 1, 0))?
        } else {
            place.slot
        };
        targets.extend(land(weights, pair, &at, base));
    }
    Ok(targets)
}

/// The pairs as they lie on the device once every target has landed, with rank and scale of `config`: one entry a layer of the
/// model that the targets were planned for.
///
/// # Errors
/// [`WeightsError::LandingGeometry`] where the config gives a module another rank than was planned, a target is of a layer past
/// `layers`, or A or B of a pair is missing or there twice.
pub fn rebuild_slot_layers(
    targets: &[LandTarget],
    config: &AdapterConfig,
    layers: usize,
) -> Result<SlotPairs, WeightsError> {
    let mut sorted: Vec<&LandTarget> = targets.iter().collect();
    sorted.sort_by_key(|target| (target.layer, target.target, target.ab == AdapterAb::B));
    let mut pairs = SlotPairs::empty(layers);
    for group in sorted.chunk_by(|x, y| (x.layer, x.target) == (y.layer, y.target)) {
        let error = |what, found, expected| WeightsError::LandingGeometry {
            path: group[0].path.clone(),
            what,
            found,
            expected,
        };
        let (&[a, b], true) = (group, group[0].ab == AdapterAb::A) else {
            return Err(error("matrices", group.len() as u64, 2));
        };
        if b.ab != AdapterAb::B {
            return Err(error("matrices", 1, 2));
        }
        if a.layer >= layers {
            return Err(error("layer", a.layer as u64, layers as u64));
        }
        let scaling = config.module(&a.path);
        for rank in [a.rank, b.rank] {
            if rank != scaling.rank {
                return Err(error("rank", rank.into(), scaling.rank.into()));
            }
        }
        let pair = LoraPair {
            a: a.dst,
            b: b.dst,
            rank: a.rank,
            k_in: a.width,
            n_out: b.width,
            scale: scaling.scaling,
            max_rank: a.max_rank,
        };
        pairs.set(a.layer, a.target, pair);
    }
    Ok(pairs)
}

/// What copies of rows cannot do.
fn check_geometry(weights: &WeightManifest, report: &mut AuditReport) {
    let mut refuse = |tensor: TensorId, message: String| {
        report.findings.push(Finding {
            level: FindingLevel::Error,
            reason: AuditReason::LandingGeometry.as_str().to_owned(),
            tensor: Some(weights.tensors()[tensor.0].name.clone()),
            message,
        });
    };
    for overlay in report.overlays.iter() {
        let message = "rows of the vocabulary have no place in a slot; load the adapter through a store or a source";
        refuse(overlay.id, message.to_owned());
    }
    let mut seen = std::collections::BTreeSet::new();
    for pair in &report.pairs {
        let walks = [
            pair.source.a_walk(weights.tensors()),
            // The widest stride: rows that lie apart are copies of rows where adjacent ones are.
            pair.source.b_walk(weights.tensors(), usize::MAX),
        ];
        for (tensor, walk) in walks {
            let dtype = weights.tensors()[tensor.0].dtype;
            let problem = if dtype != TensorDtype::Bf16 {
                format!("dtype {dtype}, which has to be rounded to BF16 on the way")
            } else if !is_rows(&walk) {
                "its stacked experts have to be transposed or gathered element by element on the way".to_owned()
            } else {
                continue;
            };
            if seen.insert(tensor) {
                let way_out = "load the adapter through a store or a source";
                refuse(tensor, format!("{problem}; {way_out}"));
            }
        }
    }
    report.findings.sort_by_key(|finding| finding.level);
}

/// Whether a walk is a copy of rows that are contiguous on both sides.
fn is_rows(walk: &Walk) -> bool {
    walk.counts[1] == 1 || (walk.src[1] == 1 && walk.dst[1] == 1)
}

/// Both matrices of a pair whose walks are copies of rows.
fn land(
    weights: &WeightManifest,
    pair: &AuditedPair,
    place: &Place,
    base: DevicePtr,
) -> [LandTarget; 2] {
    let max_rank = padded_rank(pair.rank);
    let a = pair.source.a_walk(weights.tensors());
    let b = pair.source.b_walk(weights.tensors(), max_rank as usize);
    let sides = [
        (AdapterAb::A, a, place.a, place.k_in),
        (AdapterAb::B, b, place.b, place.n_out),
    ];
    sides.map(|(ab, (tensor, walk), offset, width)| {
        let bytes = |elements: usize| elements as u64 * ELEMENT_BYTES;
        let [rows, columns] = walk.counts;
        // Rows that touch on both sides are one.
        let one = walk.src[0] == columns && walk.dst[0] == columns;
        let (rows, columns) = if one {
            (1, rows * columns)
        } else {
            (rows, columns)
        };
        LandTarget {
            tensor,
            layer: pair.layer,
            target: pair.target,
            ab,
            path: pair.path.clone(),
            rank: pair.rank,
            width,
            max_rank,
            src_offset: weights.range(tensor).start + bytes(walk.start),
            src_stride: bytes(if one { columns } else { walk.src[0] }),
            dst: base.offset(offset),
            dst_stride: bytes(if one { columns } else { walk.dst[0] }),
            row_bytes: bytes(columns),
            rows: rows as u64,
        }
    })
}
