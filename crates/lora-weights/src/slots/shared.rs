//! What every handle of a pool shares, and the steps on a slot that its owner has reserved.

use super::adapter::{AdapterSlot, Contents};
use super::memory::{DeviceRegion, StagingCache};
use super::metrics::Counters;
use super::state::{ReleaseStep, SlotStates};
use super::sync::Mutex;
use super::units::UnitRuns;
use super::{FreedSlot, Released};
use crate::device::{DeviceMemory, DevicePtr, LoraPair, MemoryError, StagingBuffer, UploadCopy};
use crate::pack::image_bytes;
use crate::{AuditedPair, PoolLayout, PoolSpec, WeightsError};
use lora_config::ModelSpec;
use std::sync::Arc;

pub(super) struct Shared {
    pub(super) memory: Arc<dyn DeviceMemory>,
    pub(super) model: ModelSpec,
    pub(super) pool: PoolSpec,
    pub(super) layout: PoolLayout,
    pub(super) staging: StagingCache,
    /// Held for a few instructions at a time, never across a call into `memory` or an extension.
    pub(super) states: Mutex<SlotStates>,
    pub(super) metrics: Counters,
    slots: DeviceRegion,
    tables: DeviceRegion,
    experts: DeviceRegion,
}

impl Shared {
    pub(super) fn allocate(
        memory: Arc<dyn DeviceMemory>,
        model: ModelSpec,
        pool: PoolSpec,
    ) -> Result<Self, WeightsError> {
        let layout = PoolLayout::new(&model, &pool)?;
        let bytes = layout.bytes();
        let free = memory.memory_info()?.free;
        // What is left must be no less than what is taken: the engine's own caches and scratch come after the pool.
        if free.saturating_sub(bytes.total()) < bytes.total() {
            return Err(WeightsError::InsufficientMemory {
                required: bytes.total(),
                slots_bytes: bytes.slots,
                table_bytes: bytes.tables,
                expert_bytes: bytes.experts,
                free,
            });
        }
        let units = layout.experts().map_or(0, |experts| experts.units());
        Ok(Self {
            slots: DeviceRegion::zeroed(&memory, bytes.slots)?,
            tables: DeviceRegion::zeroed(&memory, bytes.tables)?,
            experts: DeviceRegion::zeroed(&memory, bytes.experts)?,
            staging: StagingCache::new(&memory),
            states: Mutex::new(SlotStates::new(
                layout.slots(),
                units,
                pool.policy.allow_rotation,
            )),
            metrics: Counters::default(),
            memory,
            model,
            pool,
            layout,
        })
    }

    /// A staging buffer for the image of `pairs` and, behind it, its table entries; and the bytes of the image. Its contents are
    /// unspecified.
    pub(super) fn stage_image(
        &self,
        pairs: &[AuditedPair],
    ) -> Result<(Box<dyn StagingBuffer>, usize), WeightsError> {
        let image = image_bytes(&self.layout, pairs)?;
        let with_tables = image
            .checked_add(self.layout.tables().image_bytes())
            .ok_or(WeightsError::LayoutOverflow {
                what: "a slot image",
            })?;
        Ok((self.staging.take(with_tables)?, image))
    }

    pub(super) fn slot_base(&self, slot: u32) -> DevicePtr {
        // Within the allocation, whose size was checked.
        self.slots
            .base()
            .offset(u64::from(slot) * self.layout.bytes().slot)
    }

    pub(super) fn unit_base(&self, unit: u64) -> DevicePtr {
        self.experts
            .base()
            .offset(unit * self.layout.bytes().expert_unit)
    }

    pub(super) fn tables_base(&self) -> DevicePtr {
        self.tables.base()
    }

    /// The copies that bring an image, from the first byte of its staging buffer on, into a slot and its units.
    pub(super) fn image_copies(&self, slot: u32, units: &UnitRuns) -> Vec<UploadCopy> {
        let bytes = self.layout.bytes();
        let mut copies = Vec::with_capacity(1 + units.runs().len());
        let mut at = 0usize;
        let mut push = |dst, bytes: u64| {
            // At most the length of a buffer that exists.
            let bytes = bytes as usize;
            if bytes > 0 {
                copies.push(UploadCopy::contiguous(at, dst, bytes));
            }
            at += bytes;
        };
        push(self.slot_base(slot), bytes.slot);
        for run in units.runs() {
            let run_bytes = (run.end - run.start) * bytes.expert_unit;
            push(self.unit_base(run.start), run_bytes);
        }
        copies
    }

    /// Every table of the pool with the pair that `adapter` has for it.
    pub(super) fn table_pairs<'a>(
        &'a self,
        adapter: &'a AdapterSlot,
    ) -> impl Iterator<Item = (usize, LoraPair)> + 'a {
        let layout = &self.layout;
        let dense = adapter.layers.iter().enumerate();
        let dense = dense.flat_map(move |(layer, pairs)| {
            let table = move |module| layout.region(layer, module).map(|(table, _)| table);
            pairs
                .pairs()
                .filter_map(move |(module, pair)| Some((table(module)?, pair)))
        });
        let routers = adapter.experts.iter().enumerate();
        let routers = routers.filter_map(move |(layer, experts)| {
            Some((layout.router_table(layer)?, experts.router()?))
        });
        dense.chain(routers)
    }

    /// Writes a slot's table entries (all zero for no pairs) from the staging bytes at `at`, and waits.
    pub(super) fn write_tables(
        &self,
        slot: u32,
        pairs: impl Iterator<Item = (usize, LoraPair)>,
        mut staging: Box<dyn StagingBuffer>,
        at: usize,
    ) -> Result<Box<dyn StagingBuffer>, MemoryError> {
        let tables = self.layout.tables();
        let copies = tables.copies(self.tables_base(), slot, at);
        if copies.is_empty() {
            return Ok(staging);
        }
        let bytes = staging.bytes_mut();
        let image = bytes
            .get_mut(at..at + tables.image_bytes())
            .ok_or(MemoryError::BadCopy {
                rows: 1,
                row_bytes: tables.image_bytes() as u64,
                side: "source",
            })?;
        tables.write_image(pairs, image);
        self.memory.upload(staging, &copies)?.wait()
    }

    /// Zeroes a slot's table entries out of a small buffer of its own.
    pub(super) fn clear_tables(&self, slot: u32) -> Result<(), MemoryError> {
        let bytes = self.layout.tables().image_bytes();
        if bytes > 0 {
            let staging = self.memory.stage(bytes)?;
            self.write_tables(slot, std::iter::empty(), staging, 0)?;
        }
        Ok(())
    }

    /// Frees what an unloaded adapter held, on a slot that is reserved for this, and makes the slot a placeholder.
    pub(super) fn retire(&self, contents: Contents) -> Result<FreedSlot, MemoryError> {
        let Contents {
            adapter,
            units,
            mut extensions,
        } = contents;
        let slot = adapter.slot;
        let bytes = self.layout.bytes();
        let freed = FreedSlot {
            slot,
            name: adapter.name.clone(),
            generation: adapter.generation,
            slot_bytes: bytes.slot,
            expert_bytes: units.len() * bytes.expert_unit,
            extension_bytes: extensions.device_bytes(),
        };
        let cleared = self.clear_tables(slot);
        extensions.uninstall(slot);
        self.states.lock().vacate(slot, units, cleared.is_err());
        tracing::info!(slot, adapter = %freed.name, generation = freed.generation, "adapter unloaded");
        cleared.map(|()| freed)
    }

    /// Gives up a held slot that cannot be made whole again.
    pub(super) fn abandon(&self, contents: Contents) {
        let slot = contents.adapter.slot;
        self.states.lock().retire_generation(slot);
        if let Err(error) = self.retire(contents) {
            tracing::warn!(slot, %error, "tables of an abandoned slot were not zeroed");
        }
    }

    pub(super) fn release(&self, slot: i32) -> Released {
        let Ok(slot) = u32::try_from(slot) else {
            return Released::Unheld;
        };
        let step = self.states.lock().release(slot);
        match step {
            ReleaseStep::Unheld => Released::Unheld,
            ReleaseStep::Held(refs) => Released::Held { refs },
            ReleaseStep::Retire(contents) => match self.retire(contents) {
                Ok(freed) => Released::Freed(freed),
                Err(source) => Released::FreedWithStaleTables { slot, source },
            },
        }
    }
}
