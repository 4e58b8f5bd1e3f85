//! Where everything lies: one walk over layers and modules gives a slot's regions, the device tables and the expert
//! region their places. Pure arithmetic, checked in 64 bits; nothing is allocated here.

mod experts;
mod tables;
#[cfg(test)]
mod tests;

pub(crate) use experts::unit_b_offset;
pub use experts::{ExpertLayout, expert_router_bytes, packed_stride};
pub use tables::TableLayout;

use crate::{LoraModule, PoolSpec, WeightsError, padded_rank};
use lora_config::ModelSpec;
use serde::Serialize;

/// Bytes of a BF16 value.
pub(crate) const ELEMENT_BYTES: u64 = 2;

/// Every region starts on a multiple of this: the widest load of a kernel.
pub const REGION_ALIGNMENT: u64 = 16;

/// Place of one (layer, module) in every slot, in bytes from the slot's first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModuleRegion {
    /// Global layer index.
    pub layer: usize,
    /// Module.
    pub module: LoraModule,
    /// Width of x: columns of A.
    pub k_in: u32,
    /// Width of out: rows of B.
    pub n_out: u32,
    /// Padded rank: rows of A, and B's row stride in elements.
    pub max_rank: u32,
    /// First byte of A, `[max_rank, k_in]` BF16.
    pub a_offset: u64,
    /// First byte of B, `[n_out, max_rank]` BF16.
    pub b_offset: u64,
}

/// Bytes a pool takes on the device, part by part: what `lora plan` shows and what is checked before allocating.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PoolBytes {
    /// One slot.
    pub slot: u64,
    /// All slots.
    pub slots: u64,
    /// The per-slot tables of every (layer, module) and router.
    pub tables: u64,
    /// One unit of the expert region; 0 without one.
    pub expert_unit: u64,
    /// The expert region.
    pub experts: u64,
}

impl PoolBytes {
    /// Slots, tables and expert region together.
    pub fn total(&self) -> u64 {
        self.slots
            .saturating_add(self.tables)
            .saturating_add(self.experts)
    }
}

/// The layout of a pool: a pure function of model and pool spec.
///
/// A slot is the concatenation, layers ascending and modules in [`ModuleSet::iter`](crate::ModuleSet::iter) order where
/// the layer has them, of A (`[padded rank, in]`) and B (`[out, padded rank]`), both BF16 and row-major. The padded rank is
/// a multiple of [`RANK_GRANULE`](crate::RANK_GRANULE), so that every region starts and ends on a 32-byte boundary without
/// filler, and all slots are equal and adjacent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolLayout {
    regions: Vec<ModuleRegion>,
    /// `regions[layer_starts[l]..layer_starts[l + 1]]` are layer `l`'s.
    layer_starts: Vec<usize>,
    tables: TableLayout,
    experts: Option<ExpertLayout>,
    slots: u32,
    max_rank: u32,
    bytes: PoolBytes,
}

impl PoolLayout {
    /// Lays a pool out.
    ///
    /// # Errors
    /// [`WeightsError::BadPoolSpec`] for a slot count or rank of 0 or too large, [`WeightsError::LayoutOverflow`] where a
    /// size does not fit.
    pub fn new(model: &ModelSpec, pool: &PoolSpec) -> Result<Self, WeightsError> {
        check_range("max_loras", pool.max_loras, i32::MAX as u32)?;
        check_range("max_rank", pool.max_rank, padded_rank(u32::MAX))?;
        let (regions, slot) = walk(model, pool)?;
        let layer_starts = (0..=model.layers.len())
            .map(|layer| regions.partition_point(|region| region.layer < layer))
            .collect();
        let experts = match &pool.experts {
            Some(spec) => ExpertLayout::new(model, spec)?,
            None => None,
        };
        let routers = experts.as_ref().map_or(0, |e| e.router_layers().len());
        let tables = TableLayout::new(regions.len() + routers, pool.max_loras)?;
        let slots = mul(slot, u64::from(pool.max_loras), "all slots together")?;
        let bytes = PoolBytes {
            slot,
            slots,
            tables: tables.bytes(),
            expert_unit: experts.as_ref().map_or(0, ExpertLayout::unit_bytes),
            experts: experts.as_ref().map_or(0, ExpertLayout::region_bytes),
        };
        slots
            .checked_add(bytes.tables)
            .and_then(|sum| sum.checked_add(bytes.experts))
            .ok_or(WeightsError::LayoutOverflow {
                what: "slots, tables and experts together",
            })?;
        Ok(Self {
            regions,
            layer_starts,
            tables,
            experts,
            slots: pool.max_loras,
            max_rank: padded_rank(pool.max_rank),
            bytes,
        })
    }

    /// Bytes, part by part.
    pub fn bytes(&self) -> PoolBytes {
        self.bytes
    }

    /// Slots.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Layers of the model.
    pub fn layers(&self) -> usize {
        self.layer_starts.len() - 1
    }

    /// Padded rank of every dense region.
    pub fn max_rank(&self) -> u32 {
        self.max_rank
    }

    /// Every region, in address order.
    pub fn regions(&self) -> &[ModuleRegion] {
        &self.regions
    }

    /// The region of a module in a layer, with its position in [`regions`](Self::regions) (which is its position in the
    /// tables too); `None` where the layer has no such module or the pool leaves it out.
    pub fn region(&self, layer: usize, module: LoraModule) -> Option<(usize, &ModuleRegion)> {
        let first = *self.layer_starts.get(layer)?;
        let end = *self.layer_starts.get(layer + 1)?;
        let position = self.regions[first..end]
            .iter()
            .position(|region| region.module == module)?;
        Some((first + position, &self.regions[first + position]))
    }

    /// The device tables.
    pub fn tables(&self) -> &TableLayout {
        &self.tables
    }

    /// The table of a layer's router; `None` where the layer is not MoE or the pool has no room for experts.
    pub fn router_table(&self, layer: usize) -> Option<usize> {
        let routers = self.experts.as_ref()?.router_layers();
        let position = routers.binary_search(&layer).ok()?;
        Some(self.regions.len() + position)
    }

    /// The expert region; `None` where the pool has no room for experts or the model has none.
    pub fn experts(&self) -> Option<&ExpertLayout> {
        self.experts.as_ref()
    }
}

/// Bytes of one slot: the end of the walk over layers and modules.
///
/// # Errors
/// [`WeightsError::LayoutOverflow`] where it does not fit.
pub fn pool_slot_bytes(model: &ModelSpec, pool: &PoolSpec) -> Result<u64, WeightsError> {
    Ok(walk(model, pool)?.1)
}

/// The regions of a slot, in address order.
///
/// # Errors
/// [`WeightsError::LayoutOverflow`] where an offset does not fit.
pub fn module_slot_offsets(
    model: &ModelSpec,
    pool: &PoolSpec,
) -> Result<Vec<ModuleRegion>, WeightsError> {
    Ok(walk(model, pool)?.0)
}

/// Bytes from the pool's first byte to `slot`'s, with slots of `slot_bytes`.
///
/// # Errors
/// [`WeightsError::LayoutOverflow`] past 64 bits.
pub fn slot_base_offset(slot: u32, slot_bytes: u64) -> Result<u64, WeightsError> {
    mul(u64::from(slot), slot_bytes, "a slot's offset")
}

fn walk(model: &ModelSpec, pool: &PoolSpec) -> Result<(Vec<ModuleRegion>, u64), WeightsError> {
    let max_rank = padded_rank(pool.max_rank);
    let mut regions = Vec::new();
    let mut end = 0u64;
    for layer in 0..model.layers.len() {
        for module in pool.modules.iter() {
            // `None` is what `applies_to_layer` says no to.
            let Some((n_out, k_in)) = module.dims(model, layer) else {
                continue;
            };
            let a_offset = end;
            let b_offset = add(a_offset, matrix_bytes(k_in, max_rank)?)?;
            end = add(b_offset, matrix_bytes(n_out, max_rank)?)?;
            regions.push(ModuleRegion {
                layer,
                module,
                k_in: narrow(k_in)?,
                n_out: narrow(n_out)?,
                max_rank,
                a_offset,
                b_offset,
            });
        }
    }
    Ok((regions, end))
}

fn check_range(field: &'static str, value: u32, maximum: u32) -> Result<(), WeightsError> {
    if (1..=maximum).contains(&value) {
        return Ok(());
    }
    Err(WeightsError::BadPoolSpec {
        field,
        value: value.into(),
        minimum: 1,
        maximum: maximum.into(),
    })
}

/// Bytes of a BF16 matrix with one side the model's and the other the padded rank.
fn matrix_bytes(side: usize, max_rank: u32) -> Result<u64, WeightsError> {
    let elements = mul(side as u64, u64::from(max_rank), "a matrix")?;
    mul(elements, ELEMENT_BYTES, "a matrix")
}

/// Widths travel to kernels as 32 bits.
fn narrow(width: usize) -> Result<u32, WeightsError> {
    u32::try_from(width).map_err(|_| WeightsError::LayoutOverflow {
        what: "a module's width",
    })
}

fn mul(a: u64, b: u64, what: &'static str) -> Result<u64, WeightsError> {
    a.checked_mul(b)
        .ok_or(WeightsError::LayoutOverflow { what })
}

fn add(a: u64, b: u64) -> Result<u64, WeightsError> {
    a.checked_add(b)
        .ok_or(WeightsError::LayoutOverflow { what: "a slot" })
}
