//! Packing: an audited adapter's values into the host image of one slot.

use crate::device::{DevicePtr, LoraPair};
use crate::layout::{ELEMENT_BYTES, unit_b_offset};
use crate::{
    AdapterStore, AuditedPair, ExpertLoraLayer, LoraLayerWeights, LoraTarget, PoolLayout,
    WeightsError, padded_rank,
};
use half::bf16;
use rayon::prelude::*;

/// Zeros are written in pieces of this many elements, so that threads share a large gap.
const ZERO_PIECE: usize = 1 << 19;

/// What is packed: a store and its audited pairs.
#[derive(Clone, Copy)]
pub struct PackSource<'a> {
    /// Holds the values.
    pub store: &'a AdapterStore,
    /// The pairs of its audit report, in any order.
    pub pairs: &'a [AuditedPair],
}

/// Bytes of the image of `pairs`: the slot and one unit for each router or expert pair.
///
/// # Errors
/// [`WeightsError::LayoutOverflow`] where the sum does not fit.
pub fn image_bytes(layout: &PoolLayout, pairs: &[AuditedPair]) -> Result<usize, WeightsError> {
    let bytes = layout.bytes();
    unit_count(pairs)
        .checked_mul(bytes.expert_unit)
        .and_then(|units| units.checked_add(bytes.slot))
        .and_then(|sum| usize::try_from(sum).ok())
        .ok_or(WeightsError::LayoutOverflow {
            what: "a slot image",
        })
}

/// Packs an adapter into `image` on rayon's current thread pool: F16 and F32 become BF16 (nearest even), A's rows are
/// contiguous, B's rows lie [`padded_rank`] of the pair's own rank apart, everything else is zero. So what is read of B is contiguous too,
/// however large a rank the pool has room for.
///
/// An image is what goes to the device as it is: the slot ([`PoolLayout`]), then one unit of the expert region for each
/// router or expert pair in (layer, target) order. It does not depend on the slot it will be uploaded into. Every byte is
/// written, pads and unadapted modules as zero, so that a recycled staging buffer leaves no trace.
///
/// `image` is [`image_bytes`] long or longer (the rest is left alone) and at least 2-byte aligned.
///
/// # Errors
/// [`WeightsError::PairMismatch`] for a pair that has no place in the layout or another size than it,
/// [`WeightsError::BadStaging`] for an image too short or misaligned.
pub fn pack_adapter(
    source: PackSource<'_>,
    layout: &PoolLayout,
    image: &mut [u8],
) -> Result<(), WeightsError> {
    let mut segments = segments(source.pairs, layout)?;
    let needed = image_bytes(layout, source.pairs)?;
    let mut rest = elements(image, needed)?;
    segments.sort_unstable_by_key(|segment| segment.offset);
    let mut jobs = Vec::with_capacity(2 * segments.len());
    let mut at = 0;
    for segment in segments {
        rest = zero_jobs(rest, segment.offset - at, &mut jobs);
        let (values, after) = rest.split_at_mut(segment.elements);
        jobs.push(segment.job(values));
        rest = after;
        at = segment.offset + segment.elements;
    }
    let gap = rest.len();
    zero_jobs(rest, gap, &mut jobs);
    jobs.into_par_iter().for_each(|job| job.run(source.store));
    Ok(())
}

/// Router and expert pairs among `pairs`: the units they take.
pub(crate) fn unit_count(pairs: &[AuditedPair]) -> u64 {
    pairs.iter().filter(|pair| in_expert_region(pair)).count() as u64
}

/// The device pairs of an adapter whose image lies in a slot and units of the expert region: one entry a model layer in each,
/// by global index.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SlotPairs {
    /// Dense pairs.
    pub layers: Vec<LoraLayerWeights>,
    /// Router and expert pairs.
    pub experts: Vec<ExpertLoraLayer>,
}

impl SlotPairs {
    /// No pair in any of `layers` layers.
    pub(crate) fn empty(layers: usize) -> Self {
        Self {
            layers: vec![LoraLayerWeights::empty(); layers],
            experts: vec![ExpertLoraLayer::default(); layers],
        }
    }

    /// Puts `pair` at a target of `layer`, which exists.
    pub(crate) fn set(&mut self, layer: usize, target: LoraTarget, pair: LoraPair) {
        match target {
            LoraTarget::Attn(module) => self.layers[layer].set(module, pair),
            LoraTarget::Router => self.experts[layer].set_router(pair),
            LoraTarget::Expert { n, proj } => self.experts[layer].set(n, proj, pair),
        }
    }
}

/// The pairs as they lie on the device once the image is uploaded: the slot at `slot_base`, the i-th router or expert
/// pair in (layer, target) order at the i-th of `units`.
///
/// # Errors
/// [`WeightsError::PairMismatch`] as [`pack_adapter`], and where `units` are too few.
pub(crate) fn place_pairs(
    pairs: &[AuditedPair],
    layout: &PoolLayout,
    slot_base: DevicePtr,
    mut units: impl Iterator<Item = DevicePtr>,
) -> Result<SlotPairs, WeightsError> {
    let mut placed = SlotPairs::empty(layout.layers());
    for pair in in_order(pairs) {
        let place = place_of(pair, layout)?;
        let base = if place.in_unit {
            units.next().ok_or_else(|| mismatch(pair, "pairs", 1, 0))?
        } else {
            slot_base
        };
        let device = LoraPair {
            a: base.offset(place.a),
            b: base.offset(place.b),
            rank: pair.rank,
            k_in: place.k_in,
            n_out: place.n_out,
            scale: pair.scale,
            max_rank: padded_rank(pair.rank),
        };
        placed.set(pair.layer, pair.target, device);
    }
    Ok(placed)
}

/// Where a pair goes: byte offsets of A and B inside the slot, or inside its unit of the expert region.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) in_unit: bool,
    pub(crate) a: u64,
    pub(crate) b: u64,
    pub(crate) n_out: u32,
    pub(crate) k_in: u32,
    pub(crate) max_rank: u32,
}

/// The place of a pair, having checked that it fits: the audit says the same with more words, but a report may come from
/// another pool spec.
pub(crate) fn place_of(pair: &AuditedPair, layout: &PoolLayout) -> Result<Place, WeightsError> {
    let layers = layout.layers() as u64;
    if pair.layer as u64 >= layers {
        return Err(mismatch(pair, "layer", pair.layer as u64, layers));
    }
    let place = match pair.target {
        LoraTarget::Attn(module) => layout.region(pair.layer, module).map(|(_, region)| Place {
            in_unit: false,
            a: region.a_offset,
            b: region.b_offset,
            n_out: region.n_out,
            k_in: region.k_in,
            max_rank: region.max_rank,
        }),
        target => layout.experts().and_then(|experts| {
            experts.router_layers().binary_search(&pair.layer).ok()?;
            let (n_out, k_in) = experts.dims(target)?;
            let max_rank = experts.max_rank();
            Some(Place {
                in_unit: true,
                a: 0,
                b: unit_b_offset(k_in, max_rank),
                n_out,
                k_in,
                max_rank,
            })
        }),
    };
    let place = place.ok_or_else(|| mismatch(pair, "module", 1, 0))?;
    for (what, found, expected) in [
        ("k_in", pair.k_in, place.k_in),
        ("n_out", pair.n_out, place.n_out),
    ] {
        if found as u64 != u64::from(expected) {
            return Err(mismatch(pair, what, found as u64, expected.into()));
        }
    }
    if !(1..=place.max_rank).contains(&pair.rank) {
        return Err(mismatch(
            pair,
            "rank",
            pair.rank.into(),
            place.max_rank.into(),
        ));
    }
    Ok(place)
}

/// One matrix of the image.
struct Segment<'a> {
    pair: &'a AuditedPair,
    is_a: bool,
    /// First element in the image.
    offset: usize,
    elements: usize,
}

impl<'a> Segment<'a> {
    fn job<'d>(&self, values: &'d mut [bf16]) -> Job<'a, 'd> {
        if self.is_a {
            Job::A(self.pair, values)
        } else {
            Job::B(self.pair, values)
        }
    }
}

/// Both matrices of every pair, refusing a place that two pairs claim.
fn segments<'a>(
    pairs: &'a [AuditedPair],
    layout: &PoolLayout,
) -> Result<Vec<Segment<'a>>, WeightsError> {
    let bytes = layout.bytes();
    let mut segments = Vec::with_capacity(2 * pairs.len());
    let mut units = 0;
    let mut previous: Option<&AuditedPair> = None;
    for pair in in_order(pairs) {
        if previous.is_some_and(|p| (p.layer, p.target) == (pair.layer, pair.target)) {
            return Err(mismatch(pair, "pairs", 2, 1));
        }
        previous = Some(pair);
        let place = place_of(pair, layout)?;
        let mut base = 0;
        if place.in_unit {
            base = bytes.slot + units * bytes.expert_unit;
            units += 1;
        }
        let rank = padded_rank(pair.rank) as usize;
        for (is_a, offset, side) in [(true, place.a, pair.k_in), (false, place.b, pair.n_out)] {
            segments.push(Segment {
                pair,
                is_a,
                offset: ((base + offset) / ELEMENT_BYTES) as usize,
                elements: side * rank,
            });
        }
    }
    Ok(segments)
}

/// What one thread does at a time.
enum Job<'a, 'd> {
    Zero(&'d mut [bf16]),
    /// A: `[padded_rank, k_in]`, its true rows first.
    A(&'a AuditedPair, &'d mut [bf16]),
    /// B: `[n_out, padded_rank]`, the true columns of every row first.
    B(&'a AuditedPair, &'d mut [bf16]),
}

impl Job<'_, '_> {
    fn run(self, store: &AdapterStore) {
        match self {
            Self::Zero(values) => values.fill(bf16::ZERO),
            Self::A(pair, values) => {
                let (rows, pad) = values.split_at_mut(pair.rank as usize * pair.k_in);
                pair.source.read_a(store, rows);
                pad.fill(bf16::ZERO);
            }
            Self::B(pair, values) => {
                let rank = pair.rank as usize;
                let stride = padded_rank(pair.rank) as usize;
                pair.source.read_b(store, values, stride);
                if rank < stride {
                    for row in values.chunks_exact_mut(stride) {
                        row[rank..].fill(bf16::ZERO);
                    }
                }
            }
        }
    }
}

fn zero_jobs<'d>(
    rest: &'d mut [bf16],
    elements: usize,
    jobs: &mut Vec<Job<'_, 'd>>,
) -> &'d mut [bf16] {
    let (gap, after) = rest.split_at_mut(elements);
    jobs.extend(gap.chunks_mut(ZERO_PIECE).map(Job::Zero));
    after
}

/// The first `needed` bytes of a staging buffer as BF16.
fn elements(image: &mut [u8], needed: usize) -> Result<&mut [bf16], WeightsError> {
    let bytes = image.len() as u64;
    let alignment = 1 << image.as_ptr().addr().trailing_zeros().min(4);
    image
        .get_mut(..needed)
        .and_then(|image| bytemuck::try_cast_slice_mut(image).ok())
        .ok_or(WeightsError::BadStaging {
            bytes,
            alignment,
            needed: needed as u64,
        })
}

fn in_expert_region(pair: &AuditedPair) -> bool {
    !matches!(pair.target, LoraTarget::Attn(_))
}

/// (layer, target) order: the order of units.
pub(crate) fn in_order(pairs: &[AuditedPair]) -> Vec<&AuditedPair> {
    let mut sorted: Vec<_> = pairs.iter().collect();
    sorted.sort_by_key(|pair| (pair.layer, pair.target));
    sorted
}

pub(crate) fn mismatch(
    pair: &AuditedPair,
    what: &'static str,
    found: u64,
    expected: u64,
) -> WeightsError {
    WeightsError::PairMismatch {
        path: pair.path.clone(),
        what,
        found,
        expected,
    }
}
