//! From an adapter's raw tables to compact rows, on the device.

use crate::overlay::Extension;
use crate::plan::place_ids;
use crate::stage::rows_of;
use crate::{
    EmbedOverlay, HeadOverlay, LmHeadOverlay, OverlayError, OverlayRaw, OverlayRawSlot,
    OverrideSource, RowDifference, ServedTable, ServedTables, TrainedTokens, VocabShape,
    build_override_set, clamp_trainable_to_vocab, fill_slot_map, override_source,
};
use lora_config::TokenTable;
use lora_kernels::overlay::{GatherSources, gather_rows, row_diff};
use lora_kernels::{DeviceBuffer, KernelError, LoraBackend, MatRef, Stream};
use lora_weights::device::{Completion, DeviceMemory, StagingBuffer, UploadCopy};
use std::sync::Arc;

/// Largest absolute difference in a row up to which it counts as unchanged, by default. A table that was saved without being trained differs from
/// the served one by rounding alone, and there is no telling rounding from a fine-tune that moves every element of a row by less than this:
/// such rows are lost, that is served as the base model has them. [`RowDifference::under`] counts them; a threshold of 0 loses none.
pub const ROWDIFF_THRESH: f32 = 0.1;

/// Rows that are looked at together: most rows of most tables are not taken.
const CHUNK: usize = 16;

/// Where an overlay is built, and by what rule.
#[derive(Clone, Copy)]
pub struct OverlayBuilder<'a> {
    /// Device that holds the raw and the served tables.
    pub backend: &'a Arc<dyn LoraBackend>,
    /// Queue that reads them; the build waits for it.
    pub stream: Stream,
    /// A row of the adapter's own table is taken where it differs from the served one by strictly more than this: [`ROWDIFF_THRESH`], or what suits
    /// the adapters.
    pub threshold: f32,
}

/// The tables that make up an overlay of one served table.
struct Sources<'a> {
    table: TokenTable,
    base: Option<MatRef<'a>>,
    delta: Option<MatRef<'a>>,
    trainable: &'a [u32],
}

/// Compact rows of one table.
struct Compact {
    ids: Vec<u32>,
    ids_dev: DeviceBuffer,
    rows: DeviceBuffer,
    slot_map: DeviceBuffer,
    difference: RowDifference,
    extension: Option<Extension>,
}

/// What was launched; dropped, it waits. It stands before the memory that the launch works on, so that where building fails this is not freed too early.
struct Running<'a>(OverlayBuilder<'a>);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        // A device that cannot be waited for says so again to whoever uses it next.
        let _ = self.0.backend.synchronize(self.0.stream);
    }
}

/// Rows of the adapter's own table beside those of the served one.
enum Comparison<'a> {
    /// So many, all taken: there is nothing to compare them with.
    AllOf(u32),
    /// Being compared.
    Distances(Distances<'a>),
}

/// Distances of rows, and where the host reads them.
struct Distances<'a> {
    _running: Running<'a>,
    device: DeviceBuffer,
    host: Box<dyn StagingBuffer>,
}

/// Memory of a slot map, on both sides; on the host's no id has a place yet.
struct SlotMapRoom {
    device: DeviceBuffer,
    host: Box<dyn StagingBuffer>,
}

/// A slot map on its way. The upload comes first: dropped, it waits, and only then may its memory go.
struct SentSlotMap {
    completion: Box<dyn Completion>,
    device: DeviceBuffer,
}

/// Rows that the device is copying together, and the list that says from where.
struct Gather<'a> {
    running: Running<'a>,
    rows: DeviceBuffer,
    sources: Vec<u32>,
    list: DeviceBuffer,
}

/// Where a tied or untied head takes its rows from.
enum Head<'a> {
    Untouched,
    Embed,
    Own(Sources<'a>),
}

/// Builds the overlay of an adapter against the tables that the engine serves, and frees the raw buffers.
///
/// Overridden are the rows of the adapter's own table that differ from the served one, and the trained ids; a trained id takes
/// its delta row, any other the row of the adapter's own table. `Ok(None)` when nothing is overridden and nothing is offered. An
/// untied head is overridden by tables of its own alone. Where head and embedding are one parameter, trained rows and a re-saved
/// table change both; a table that PEFT put beside the original for one of them (`modules_to_save`) changes that one.
///
/// Blocks until the rows are there.
///
/// # Errors
/// [`OverlayError::TokenBeyondVocab`], [`DeltaMissing`](OverlayError::DeltaMissing), [`TokenCount`](OverlayError::TokenCount),
/// [`Shape`](OverlayError::Shape); what allocations and launches give.
pub fn build_overlay(
    builder: OverlayBuilder<'_>,
    raw: OverlayRaw,
    served: &ServedTables<'_>,
) -> Result<Option<EmbedOverlay>, OverlayError> {
    let shape = served.shape(raw.hidden)?;
    let embed = sources(&raw, TokenTable::Embed)?;
    let head = head_sources(&raw, served.is_tied())?;
    let built = builder.build(&embed, served, shape)?;
    let lmhead = match head {
        Head::Untouched => HeadOverlay::Untouched,
        Head::Embed => HeadOverlay::Embed,
        Head::Own(sources) => {
            let built = builder.build(&sources, served, shape)?;
            built.into_head(shape.lm_head)
        }
    };
    let overlay = built.into_overlay(lmhead, shape);
    let is_empty = overlay.n_override == 0
        && overlay.n_override_head() == 0
        && overlay.extension_counts() == (0, 0);
    Ok((!is_empty).then_some(overlay))
}

/// What the adapter holds of one table.
fn sources(raw: &OverlayRaw, table: TokenTable) -> Result<Sources<'_>, OverlayError> {
    let slot = match table {
        TokenTable::Embed => &raw.embed,
        TokenTable::LmHead => &raw.lm_head,
    };
    check_counts(slot, table)?;
    Ok(Sources {
        table,
        base: rows_of(slot.base.as_ref(), slot.base_rows, raw.hidden)?,
        delta: rows_of(slot.delta.as_ref(), slot.delta_rows, raw.hidden)?,
        trainable: &slot.trainable,
    })
}

fn check_counts(slot: &OverlayRawSlot, table: TokenTable) -> Result<(), OverlayError> {
    let (ids, rows) = (slot.trainable.len(), slot.delta_rows as usize);
    if ids > 0 && slot.delta.is_none() {
        return Err(OverlayError::DeltaMissing { table, ids });
    }
    if ids != rows {
        return Err(OverlayError::TokenCount { table, rows, ids });
    }
    Ok(())
}

/// What the head takes its rows from.
fn head_sources(raw: &OverlayRaw, is_tied: bool) -> Result<Head<'_>, OverlayError> {
    let (embed, own) = (&raw.embed, &raw.lm_head);
    if !is_tied {
        return Ok(match own.is_empty() {
            true => Head::Untouched,
            false => Head::Own(sources(raw, TokenTable::LmHead)?),
        });
    }
    // PEFT saves the rows of a tied pair once, under the embedding.
    let shares_delta =
        own.delta.is_none() && (own.trainable.is_empty() || own.trainable == embed.trainable);
    let shares_base = own.base.is_none() && (raw.base_is_tied || embed.base.is_none());
    let table = TokenTable::LmHead;
    let of_embed = sources(raw, TokenTable::Embed)?;
    let (base, base_rows) = match shares_base {
        true => (&embed.base, embed.base_rows),
        false => (&own.base, own.base_rows),
    };
    let base = rows_of(base.as_ref(), base_rows, raw.hidden)?;
    if shares_delta && shares_base {
        return Ok(match embed.is_empty() {
            true => Head::Untouched,
            false => Head::Embed,
        });
    }
    let with_delta = match shares_delta {
        true => of_embed,
        false => sources(raw, table)?,
    };
    if base.is_none() && with_delta.delta.is_none() {
        return Ok(Head::Untouched);
    }
    Ok(Head::Own(Sources {
        table,
        base,
        ..with_delta
    }))
}

impl<'a> OverlayBuilder<'a> {
    fn on(&self) -> (&dyn LoraBackend, Stream) {
        (&**self.backend, self.stream)
    }

    fn memory(&self) -> Arc<dyn DeviceMemory> {
        Arc::clone(self.backend) as Arc<_>
    }

    fn build(
        &self,
        sources: &Sources<'_>,
        served: &ServedTables<'_>,
        shape: VocabShape,
    ) -> Result<Compact, OverlayError> {
        let vocab = match sources.table {
            TokenTable::Embed => shape.embed,
            TokenTable::LmHead => shape.lm_head,
        };
        let base_rows = sources.base.map_or(0, |base| base.rows() as u32);
        let trained = clamp_trainable_to_vocab(sources.trainable, vocab, base_rows)?;
        let comparison = self.compare(sources.base, served.table(sources.table))?;
        // While the device reads both tables.
        let room = match sources.table {
            TokenTable::Embed => Some(self.slot_map_room(vocab)?),
            TokenTable::LmHead => None,
        };
        let (differing, difference) = self.differing(comparison, &trained)?;
        let ids = build_override_set(&differing, &trained.served);
        let width = shape.hidden as usize;
        // On its way while memory is found for rows, and while they are copied.
        let slot_map = match room {
            Some(room) if !ids.is_empty() => Some(room.send(&ids)?),
            _ => None,
        };
        let own = self.gather(sources, &ids, &trained.served, width)?;
        let offered: Vec<u32> = (vocab..base_rows).collect();
        let offers = self.gather(sources, &offered, &trained.extension, width)?;
        self.backend.synchronize(self.stream)?;
        let slot_map = match slot_map {
            Some(sent) => sent.landed()?,
            None => DeviceBuffer::zeroed(self.memory(), 0)?,
        };
        let (rows, ids_dev) = own.finished(&ids)?;
        Ok(Compact {
            rows,
            ids_dev,
            slot_map,
            ids,
            difference,
            extension: offered.first().map(|&first_id| Extension {
                first_id,
                rows: offers.rows,
                count: offered.len() as u32,
            }),
        })
    }

    /// Has the device compare the rows that both tables have.
    fn compare(
        &self,
        base: Option<MatRef<'_>>,
        served: &ServedTable<'_>,
    ) -> Result<Comparison<'a>, OverlayError> {
        let Some(base) = base else {
            return Ok(Comparison::AllOf(0));
        };
        let rows = base.rows().min(served.rows());
        let Some(values) = served.values()? else {
            return Ok(Comparison::AllOf(rows as u32));
        };
        let (a, b) = (base.row_range(0..rows)?, values.row_range(0..rows)?);
        let bytes = rows * size_of::<f32>();
        let mut device = DeviceBuffer::zeroed(self.memory(), bytes as u64)?;
        row_diff(self.on(), a, b, device.f32_mat_mut(1, rows, rows)?)?;
        let _running = Running(*self);
        let host = self.memory().stage(bytes).map_err(KernelError::from)?;
        Ok(Comparison::Distances(Distances {
            _running,
            device,
            host,
        }))
    }

    fn slot_map_room(&self, vocab: u32) -> Result<SlotMapRoom, KernelError> {
        let bytes = vocab as usize * size_of::<i32>();
        let device = DeviceBuffer::zeroed(self.memory(), bytes as u64)?;
        let mut host = self.memory().stage(bytes)?;
        fill_slot_map(&[], bytemuck::cast_slice_mut(host.bytes_mut()));
        Ok(SlotMapRoom { device, host })
    }

    /// Ids whose row of the adapter's own table is taken, among those that both tables have. Waits for the comparison.
    fn differing(
        &self,
        comparison: Comparison<'_>,
        trained: &TrainedTokens,
    ) -> Result<(Vec<u32>, RowDifference), OverlayError> {
        match comparison {
            Comparison::AllOf(over) => Ok(((0..over).collect(), RowDifference { over, under: 0 })),
            Comparison::Distances(mut distances) => {
                self.backend.synchronize(self.stream)?;
                let host = distances.host.bytes_mut();
                let landed = self.memory().download(distances.device.ptr(), host);
                landed.map_err(KernelError::from)?;
                let values = bytemuck::cast_slice(distances.host.bytes());
                Ok(self.over_threshold(values, trained))
            }
        }
    }

    /// Ids of the rows whose distance is over the threshold.
    fn over_threshold(
        &self,
        distances: &[f32],
        trained: &TrainedTokens,
    ) -> (Vec<u32>, RowDifference) {
        let is_over = |distance: f32| distance > self.threshold;
        let is_under = |distance: f32| distance > 0.0 && !is_over(distance);
        let mut differing: Vec<u32> = Vec::new();
        for (first, chunk) in (0..).step_by(CHUNK).zip(distances.chunks(CHUNK)) {
            // Without a branch for each row, so that rows are compared some at a time.
            if chunk.iter().fold(false, |any, d| any | is_over(*d)) {
                let over = (first..).zip(chunk).filter(|(_, d)| is_over(**d));
                differing.extend(over.map(|(id, _)| id));
            }
        }
        let under: u32 = distances.iter().map(|d| u32::from(is_under(*d))).sum();
        let own_rows = trained.served.iter();
        let of_trained = own_rows.filter(|row| {
            let distance = distances.get(row.id as usize);
            distance.is_some_and(|d| is_under(*d))
        });
        let difference = RowDifference {
            over: differing.len() as u32,
            under: under - of_trained.count() as u32,
        };
        (differing, difference)
    }

    /// Has the device copy the rows of `ids`, each from where the adapter holds it.
    fn gather(
        &self,
        sources: &Sources<'_>,
        ids: &[u32],
        trained: &[crate::TrainedRow],
        width: usize,
    ) -> Result<Gather<'a>, OverlayError> {
        let none = DeviceBuffer::zeroed(self.memory(), 0)?;
        let empty = none.mat(0, width, width)?;
        let base = sources.base.unwrap_or(empty);
        let delta = sources.delta.unwrap_or(empty);
        let first_delta = base.rows() as u32;
        let index: Vec<u32> = ids
            .iter()
            .map(|&id| match override_source(id, trained) {
                OverrideSource::Delta { row } => first_delta + row,
                OverrideSource::Base { row } => row,
            })
            .collect();
        let bytes = (ids.len() * width * 2) as u64;
        let mut rows = DeviceBuffer::zeroed(self.memory(), bytes)?;
        let list = DeviceBuffer::from_slice(self.memory(), &index)?;
        if !ids.is_empty() {
            gather_rows(
                self.on(),
                GatherSources { base, delta },
                list.row_indices(ids.len())?,
                rows.mat_mut(ids.len(), width, width)?,
            )?;
        }
        Ok(Gather {
            running: Running(*self),
            rows,
            sources: index,
            list,
        })
    }
}

impl SlotMapRoom {
    /// Sends the slot map of `ids`.
    fn send(mut self, ids: &[u32]) -> Result<SentSlotMap, KernelError> {
        let map = bytemuck::cast_slice_mut(self.host.bytes_mut());
        place_ids(ids, map);
        let copy = UploadCopy::contiguous(0, self.device.ptr(), size_of_val(map));
        let completion = self.device.memory().upload(self.host, &[copy])?;
        Ok(SentSlotMap {
            completion,
            device: self.device,
        })
    }
}

impl SentSlotMap {
    fn landed(self) -> Result<DeviceBuffer, KernelError> {
        self.completion.wait()?;
        Ok(self.device)
    }
}

impl Gather<'_> {
    /// The rows, and the list made one of `ids`, once nothing is being copied any more.
    fn finished(mut self, ids: &[u32]) -> Result<(DeviceBuffer, DeviceBuffer), KernelError> {
        drop(self.running);
        if self.sources != ids {
            self.list.upload(0, ids)?;
        }
        Ok((self.rows, self.list))
    }
}

impl Compact {
    fn into_overlay(self, lmhead: HeadOverlay, shape: VocabShape) -> EmbedOverlay {
        EmbedOverlay {
            ids_dev: self.ids_dev,
            slot_map: self.slot_map,
            n_override: self.ids.len() as u32,
            rows: self.rows,
            vocab: shape.embed,
            lmhead,
            hidden: shape.hidden,
            difference: self.difference,
            extension: self.extension,
        }
    }

    fn into_head(self, vocab: u32) -> HeadOverlay {
        HeadOverlay::Own(LmHeadOverlay {
            ids_dev: self.ids_dev,
            n_override: self.ids.len() as u32,
            rows: self.rows,
            vocab,
            difference: self.difference,
            extension: self.extension,
        })
    }
}
