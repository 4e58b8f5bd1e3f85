//! Tables by which every row follows its own adapter's expert: one entry a (resident adapter, expert) for each layer and projection.

use crate::MoeError;
use lora_kernels::{DeviceBuffer, ExpertSpace, KernelError, MAX_ENTRIES};
use lora_weights::device::{DeviceMemory, DevicePtr, LoraPair, LoraRoute, UploadCopy};
use lora_weights::{
    AdapterSlot, ExpertLoraLayer, ExpertProj, LoraTarget, PoolLayout, SlotExtension, padded_rank,
};
use parking_lot::Mutex;
use std::error::Error;
use std::sync::Arc;

/// Bytes of an entry of each kind of table: addresses of A and B (u64), scale (f32), true rank (u32).
const ENTRY_BYTES: [usize; 4] = [8, 8, 4, 4];

/// Every table starts on a multiple of this.
const TABLE_ALIGN: u64 = 16;

/// What [`ExpertTables`] are made for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertTablesSpec {
    /// MoE layers by global index, ascending.
    pub layers: Vec<usize>,
    /// Experts a layer.
    pub num_experts: u32,
    /// Slots of the pool.
    pub slots: u32,
    /// Adapters with experts that can be resident at once, at most `slots`: what the size of the tables follows.
    pub residents: u32,
    /// `(k_in, n_out)` of gate, up and down.
    pub projections: [(u32, u32); 3],
    /// Largest padded rank of a pair.
    pub max_rank: u32,
}

impl ExpertTablesSpec {
    /// Tables for a pool; `None` where it has no expert region. Without `residents` every slot can be one, up to [`MAX_ENTRIES`] in all.
    pub fn of_layout(layout: &PoolLayout, residents: Option<u32>) -> Option<Self> {
        let experts = layout.experts()?;
        let num_experts = u32::try_from(experts.num_experts()).ok()?;
        let most = layout.slots().min(MAX_ENTRIES / num_experts.max(1));
        let mut projections = [(0, 0); 3];
        for proj in ExpertProj::ALL {
            let (n_out, k_in) = experts.dims(LoraTarget::Expert { n: 0, proj })?;
            projections[proj as usize] = (k_in, n_out);
        }
        Some(Self {
            layers: experts.router_layers().to_vec(),
            num_experts,
            slots: layout.slots(),
            residents: residents.unwrap_or(most),
            projections,
            max_rank: experts.max_rank(),
        })
    }

    /// Device bytes of the tables: 24 for each layer, projection, resident and expert, and 4 a slot.
    ///
    /// # Errors
    /// [`MoeError::BadTables`] for sizes that are 0 or too large.
    pub fn bytes(&self) -> Result<u64, MoeError> {
        Ok(self.places()?.end)
    }

    /// Where everything lies, once all sizes are known to be possible.
    fn places(&self) -> Result<Places, MoeError> {
        let check = |quantity, value: u64, max: u64| {
            if (1..=max).contains(&value) {
                return Ok(value);
            }
            Err(MoeError::BadTables {
                quantity,
                value,
                max,
            })
        };
        let limit = u64::from(MAX_ENTRIES);
        check("slots", self.slots.into(), limit)?;
        check("residents", self.residents.into(), self.slots.into())?;
        check("experts", self.num_experts.into(), limit)?;
        let layers = check("layers", self.layers.len() as u64, 1 << 20)?;
        let entries = u64::from(self.residents) * u64::from(self.num_experts);
        check("residents times experts", entries, limit)?;
        // At most 3 * 2^20 tables of 2^21 entries of 8 bytes: far from 64 bits.
        let mut end = 0;
        let mut kinds = [(0, 0); 4];
        for (kind, bytes) in kinds.iter_mut().zip(ENTRY_BYTES) {
            let pitch = (entries * bytes as u64).next_multiple_of(TABLE_ALIGN);
            *kind = (end, pitch);
            end += pitch * layers * ExpertProj::ALL.len() as u64;
        }
        Ok(Places {
            kinds,
            residents: end,
            end: end + u64::from(self.slots) * 4,
        })
    }
}

/// Byte offsets in the one allocation.
#[derive(Debug, Clone, Copy)]
struct Places {
    /// First byte of each kind's tables, and bytes from one table to the next.
    kinds: [(u64, u64); 4],
    /// First byte of the list from slot to resident.
    residents: u64,
    end: u64,
}

/// The expert tables of a pool, in one allocation at an address fixed for life: captured graphs stay valid while adapters come and go.
///
/// Routes have `residents x num_experts` entries, experts of one adapter together. A slot takes a resident's place when an adapter with experts
/// is [installed](Self::install), and gives it back when it is [removed](Self::remove). Both may be called from any thread, while no launch uses the slot;
/// launches for other slots go on meanwhile. As a [`SlotExtension`] of every adapter of the pool, the tables follow the slots by themselves.
#[derive(Debug)]
pub struct ExpertTables {
    spec: ExpertTablesSpec,
    places: Places,
    buffer: DeviceBuffer,
    /// The slot in each resident's place.
    residents: Mutex<Vec<Option<u32>>>,
}

impl ExpertTables {
    /// Allocates tables with nothing in them.
    ///
    /// # Errors
    /// [`MoeError::BadTables`]; what allocation and upload give.
    pub fn new(memory: Arc<dyn DeviceMemory>, spec: ExpertTablesSpec) -> Result<Self, MoeError> {
        let places = spec.places()?;
        let buffer = DeviceBuffer::zeroed(memory, places.end)?;
        let nobody = vec![0xff; spec.slots as usize * 4];
        let list = buffer.ptr().offset(places.residents);
        buffer.memory().upload_blocking(list, &nobody)?;
        Ok(Self {
            residents: Mutex::new(vec![None; spec.residents as usize]),
            spec,
            places,
            buffer,
        })
    }

    /// What they were made for.
    pub fn spec(&self) -> &ExpertTablesSpec {
        &self.spec
    }

    /// Device bytes.
    pub fn bytes(&self) -> u64 {
        self.buffer.bytes()
    }

    /// Slots whose experts are reachable, ascending.
    pub fn resident_slots(&self) -> Vec<u32> {
        let mut slots: Vec<u32> = self.residents.lock().iter().flatten().copied().collect();
        slots.sort_unstable();
        slots
    }

    /// Entries of each table.
    pub fn entries(&self) -> u32 {
        // Checked when the tables were made.
        self.spec.residents * self.spec.num_experts
    }

    /// What entries are numbered over, as [`RowGroups::build_experts`](lora_kernels::RowGroups::build_experts) takes it.
    ///
    /// # Errors
    /// [`KernelError::ViewOutside`], never in practice.
    pub fn space(&self) -> Result<ExpertSpace<'_>, KernelError> {
        let all = self.buffer.resident_of_slot(self.places.end as usize / 4)?;
        let list = all.range(self.places.residents as usize / 4..self.places.end as usize / 4)?;
        Ok(ExpertSpace {
            resident_of_slot: list,
            residents: self.spec.residents,
            num_experts: self.spec.num_experts,
        })
    }

    /// The tables of a projection in a layer: addresses fixed for life. `None` for a layer that is not MoE.
    pub fn route(&self, layer: usize, proj: ExpertProj) -> Option<LoraRoute> {
        let table = self.table(layer, proj)?;
        let at = |kind: usize| {
            let (start, pitch) = self.places.kinds[kind];
            self.buffer.ptr().offset(start + pitch * table as u64)
        };
        let (k_in, n_out) = self.spec.projections[proj as usize];
        Some(LoraRoute {
            a_table: at(0),
            b_table: at(1),
            scale_table: at(2),
            rank_table: at(3),
            slots: self.entries(),
            k_in,
            n_out,
            max_rank: self.spec.max_rank,
        })
    }

    /// Makes the experts of `slot` reachable, in place of those it had; `layers` has one entry a model layer, by global index. An adapter without
    /// experts takes no resident's place. Blocks until the entries are on the device. On an error the slot has no fold.
    ///
    /// # Errors
    /// [`MoeError::SlotOutOfRange`], [`MoeError::NotMoe`], [`MoeError::ExpertOutOfRange`], [`MoeError::PairMismatch`], [`MoeError::TablesFull`]; what the upload
    /// gives.
    pub fn install(&self, slot: u32, layers: &[ExpertLoraLayer]) -> Result<(), MoeError> {
        self.check_slot(slot)?;
        let mut residents = self.residents.lock();
        self.clear(&mut residents, slot)?;
        self.check_pairs(layers)?;
        if layers.iter().all(|layer| layer.pairs().next().is_none()) {
            return Ok(());
        }
        let place = residents
            .iter()
            .position(Option::is_none)
            .ok_or(MoeError::TablesFull {
                residents: self.spec.residents,
            })?;
        self.write(place, (slot, place as i32), layers)?;
        residents[place] = Some(slot);
        Ok(())
    }

    /// Takes a slot's experts out: no row of it folds from then on. A slot that has none is left as it is.
    ///
    /// # Errors
    /// [`MoeError::SlotOutOfRange`]; what the upload gives.
    pub fn remove(&self, slot: u32) -> Result<(), MoeError> {
        self.check_slot(slot)?;
        self.clear(&mut self.residents.lock(), slot)
    }

    fn clear(&self, residents: &mut [Option<u32>], slot: u32) -> Result<(), MoeError> {
        let Some(place) = residents.iter().position(|other| *other == Some(slot)) else {
            return Ok(());
        };
        self.write(place, (slot, -1), &[])?;
        residents[place] = None;
        Ok(())
    }

    /// Writes all entries of a place, zero where `layers` has no pair, and who `slot` is; the last copy is the one that makes entries reachable.
    fn write(
        &self,
        place: usize,
        (slot, resident): (u32, i32),
        layers: &[ExpertLoraLayer],
    ) -> Result<(), MoeError> {
        let experts = self.spec.num_experts as usize;
        let tables = self.spec.layers.len() * ExpertProj::ALL.len();
        let starts = ENTRY_BYTES.map(|bytes| bytes * experts * tables);
        let image: usize = starts.iter().sum();
        let memory = self.buffer.memory();
        let mut staging = memory.stage(image + 4)?;
        let bytes = staging.bytes_mut();
        for (table, expert, pair) in self.entries_of(layers) {
            let mut block = 0;
            for (kind, value) in entry(&pair).into_iter().enumerate() {
                let size = ENTRY_BYTES[kind];
                let at = block + (table * experts + expert) * size;
                bytes[at..at + size].copy_from_slice(&value[..size]);
                block += starts[kind];
            }
        }
        bytes[image..].copy_from_slice(&resident.to_ne_bytes());
        let list = self.ptr(self.places.residents + u64::from(slot) * 4);
        let reach = UploadCopy::contiguous(image, list, 4);
        let mut copies = Vec::with_capacity(5);
        let mut src_offset = 0;
        for kind in 0..4 {
            let (start, pitch) = self.places.kinds[kind];
            let row_bytes = ENTRY_BYTES[kind] * experts;
            copies.push(UploadCopy {
                src_offset,
                src_stride: row_bytes,
                dst: self.ptr(start + (place * row_bytes) as u64),
                dst_stride: pitch as usize,
                row_bytes,
                rows: tables,
            });
            src_offset += starts[kind];
        }
        // A place becomes reachable after its entries are there, and unreachable before they go.
        copies.insert(if resident < 0 { 0 } else { 4 }, reach);
        memory.upload(staging, &copies)?.wait()?;
        Ok(())
    }

    /// Table, expert and pair of everything that `layers` adapts.
    fn entries_of<'a>(
        &'a self,
        layers: &'a [ExpertLoraLayer],
    ) -> impl Iterator<Item = (usize, usize, LoraPair)> + 'a {
        let tables = self.spec.layers.iter().enumerate();
        tables.flat_map(move |(index, layer)| {
            let pairs = layers
                .get(*layer)
                .into_iter()
                .flat_map(|layer| layer.pairs());
            pairs.map(move |(expert, proj, pair)| (table_of(index, proj), expert, pair))
        })
    }

    fn check_slot(&self, slot: u32) -> Result<(), MoeError> {
        if slot < self.spec.slots {
            return Ok(());
        }
        Err(MoeError::SlotOutOfRange {
            slot,
            slots: self.spec.slots,
        })
    }

    fn check_pairs(&self, layers: &[ExpertLoraLayer]) -> Result<(), MoeError> {
        for (layer, weights) in layers.iter().enumerate() {
            for (expert, proj, pair) in weights.pairs() {
                if self.table(layer, proj).is_none() {
                    return Err(MoeError::NotMoe { layer });
                }
                if expert >= self.spec.num_experts as usize {
                    return Err(MoeError::ExpertOutOfRange {
                        layer,
                        expert,
                        num_experts: self.spec.num_experts,
                    });
                }
                let (k_in, n_out) = self.spec.projections[proj as usize];
                let max_rank = padded_rank(pair.rank).min(self.spec.max_rank);
                let expected = (k_in, n_out, max_rank);
                let found = (pair.k_in, pair.n_out, pair.max_rank);
                if found != expected {
                    return Err(MoeError::PairMismatch {
                        layer,
                        expert,
                        proj,
                        found,
                        expected,
                    });
                }
            }
        }
        Ok(())
    }

    fn table(&self, layer: usize, proj: ExpertProj) -> Option<usize> {
        let index = self.spec.layers.binary_search(&layer).ok()?;
        Some(table_of(index, proj))
    }

    fn ptr(&self, offset: u64) -> DevicePtr {
        self.buffer.ptr().offset(offset)
    }
}

/// The tables are allocated once for all slots: a slot's end frees none of their bytes.
impl SlotExtension for ExpertTables {
    fn install(&self, adapter: &AdapterSlot) -> Result<(), Box<dyn Error + Send + Sync>> {
        Ok(self.install(adapter.slot(), adapter.experts())?)
    }

    fn uninstall(&self, slot: u32) {
        if let Err(error) = self.remove(slot) {
            tracing::error!(%error, slot, "expert entries could not be zeroed");
        }
    }
}

/// Projections of a layer lie next to each other.
fn table_of(layer_index: usize, proj: ExpertProj) -> usize {
    layer_index * ExpertProj::ALL.len() + proj as usize
}

/// A pair's entry in each kind of table, in the first bytes.
fn entry(pair: &LoraPair) -> [[u8; 8]; 4] {
    let narrow = |bytes: [u8; 4]| {
        let mut wide = [0; 8];
        wide[..4].copy_from_slice(&bytes);
        wide
    };
    [
        pair.a.0.to_ne_bytes(),
        pair.b.0.to_ne_bytes(),
        narrow(pair.scale.to_ne_bytes()),
        narrow(pair.rank.to_ne_bytes()),
    ]
}
