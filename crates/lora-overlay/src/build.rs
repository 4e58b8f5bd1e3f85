//! From an adapter's raw tables to compact rows, on the device.

use crate::overlay::Extension;
use crate::stage::rows_of;
use crate::{
    EmbedOverlay, HeadOverlay, LmHeadOverlay, OverlayError, OverlayRaw, OverlayRawSlot,
    OverrideSource, RowDifference, ServedTable, ServedTables, TrainedTokens, VocabShape,
    build_override_set, clamp_trainable_to_vocab, fill_slot_map, override_source,
};
use lora_config::TokenTable;
use lora_kernels::overlay::{GatherSources, gather_rows, row_diff};
use lora_kernels::{DeviceBuffer, KernelError, LoraBackend, MatRef, Stream};
use lora_weights::device::{DeviceMemory, UploadCopy};
use std::sync::Arc;

/// Largest absolute difference in a row up to which it counts as unchanged, by default. A table that was saved without being trained differs from
/// the served one by rounding alone, and there is no telling rounding from a fine-tune that moves every element of a row by less than this:
/// such rows are lost, that is served as the base model has them. [`RowDifference::under`] counts them; a threshold of 0 loses none.
pub const ROWDIFF_THRESH: f32 = 0.1;

/// Rows that are looked at together.
const CHUNK: usize = 64;

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
    /// Four bytes for each id of the vocabulary: distances of rows at first, room for a slot map then.
    words: DeviceBuffer,
    difference: RowDifference,
    extension: Option<Extension>,
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
    let overlay = builder.overlay(built, lmhead, shape)?;
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

impl OverlayBuilder<'_> {
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
        let served = served.table(sources.table);
        let vocab = match sources.table {
            TokenTable::Embed => shape.embed,
            TokenTable::LmHead => shape.lm_head,
        };
        let base_rows = sources.base.map_or(0, |base| base.rows() as u32);
        let trained = clamp_trainable_to_vocab(sources.trainable, vocab, base_rows)?;
        let mut words = DeviceBuffer::zeroed(self.memory(), u64::from(vocab) * 4)?;
        let (differing, difference) = self.differing(sources.base, served, &trained, &mut words)?;
        let ids = build_override_set(&differing, &trained.served);
        let width = shape.hidden as usize;
        let (rows, ids_dev) = self.gather(sources, &ids, &trained.served, width)?;
        let offered: Vec<u32> = (vocab..base_rows).collect();
        let extension = match offered.first() {
            None => None,
            Some(&first_id) => Some(Extension {
                first_id,
                rows: self.gather(sources, &offered, &trained.extension, width)?.0,
                count: offered.len() as u32,
            }),
        };
        Ok(Compact {
            ids,
            ids_dev,
            rows,
            words,
            difference,
            extension,
        })
    }

    /// Ids whose row of the adapter's own table is taken, among those that both tables have.
    fn differing(
        &self,
        base: Option<MatRef<'_>>,
        served: &ServedTable<'_>,
        trained: &TrainedTokens,
        distances: &mut DeviceBuffer,
    ) -> Result<(Vec<u32>, RowDifference), OverlayError> {
        let Some(base) = base else {
            return Ok((Vec::new(), RowDifference::default()));
        };
        let rows = base.rows().min(served.rows());
        let Some(values) = served.values()? else {
            let over = rows as u32;
            return Ok(((0..over).collect(), RowDifference { over, under: 0 }));
        };
        let (a, b) = (base.row_range(0..rows)?, values.row_range(0..rows)?);
        row_diff(self.on(), a, b, distances.f32_mat_mut(1, rows, rows)?)?;
        // While the device reads both tables.
        let memory = self.memory();
        let mut staging = memory
            .stage(rows * size_of::<f32>())
            .map_err(KernelError::from)?;
        self.backend.synchronize(self.stream)?;
        let landed = memory.download(distances.ptr(), staging.bytes_mut());
        landed.map_err(KernelError::from)?;
        Ok(self.over_threshold(bytemuck::cast_slice(staging.bytes()), trained))
    }

    /// Ids of the rows whose distance is over the threshold.
    fn over_threshold(
        &self,
        distances: &[f32],
        trained: &TrainedTokens,
    ) -> (Vec<u32>, RowDifference) {
        let is_trained = |id: &u32| {
            matches!(
                override_source(*id, &trained.served),
                OverrideSource::Delta { .. }
            )
        };
        let (mut differing, mut under) = (Vec::new(), 0);
        // Most rows of most tables do not differ at all.
        for (first, chunk) in (0..).step_by(CHUNK).zip(distances.chunks(CHUNK)) {
            if chunk.iter().fold(0, |bits, d| bits | d.to_bits()) == 0 {
                continue;
            }
            for (id, &distance) in (first..).zip(chunk) {
                if distance > self.threshold {
                    differing.push(id);
                } else if distance > 0.0 && !is_trained(&id) {
                    under += 1;
                }
            }
        }
        let over = differing.len() as u32;
        (differing, RowDifference { over, under })
    }

    /// The rows of `ids`, each from where the adapter holds it, and `ids` themselves.
    fn gather(
        &self,
        sources: &Sources<'_>,
        ids: &[u32],
        trained: &[crate::TrainedRow],
        width: usize,
    ) -> Result<(DeviceBuffer, DeviceBuffer), OverlayError> {
        let bytes = (ids.len() * width * 2) as u64;
        let mut rows = DeviceBuffer::zeroed(self.memory(), bytes)?;
        let mut list = DeviceBuffer::zeroed(self.memory(), size_of_val(ids) as u64)?;
        if ids.is_empty() {
            return Ok((rows, list));
        }
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
        list.upload(0, &index)?;
        gather_rows(
            self.on(),
            GatherSources { base, delta },
            list.row_indices(ids.len())?,
            rows.mat_mut(ids.len(), width, width)?,
        )?;
        // Before the list changes and the raw buffers go.
        self.backend.synchronize(self.stream)?;
        if index != ids {
            list.upload(0, ids)?;
        }
        Ok((rows, list))
    }

    fn overlay(
        &self,
        built: Compact,
        lmhead: HeadOverlay,
        shape: VocabShape,
    ) -> Result<EmbedOverlay, OverlayError> {
        let map = match built.ids.is_empty() {
            true => DeviceBuffer::zeroed(self.memory(), 0)?,
            false => self.slot_map(built.words, &built.ids)?,
        };
        Ok(EmbedOverlay {
            ids_dev: built.ids_dev,
            slot_map: map,
            n_override: built.ids.len() as u32,
            rows: built.rows,
            vocab: shape.embed,
            lmhead,
            hidden: shape.hidden,
            difference: built.difference,
            extension: built.extension,
        })
    }

    /// Turns the words into a slot map.
    fn slot_map(&self, words: DeviceBuffer, ids: &[u32]) -> Result<DeviceBuffer, KernelError> {
        let memory = self.memory();
        let bytes = words.bytes() as usize;
        let mut staging = memory.stage(bytes)?;
        fill_slot_map(ids, bytemuck::cast_slice_mut(staging.bytes_mut()));
        let copy = UploadCopy::contiguous(0, words.ptr(), bytes);
        memory.upload(staging, &[copy])?.wait()?;
        Ok(words)
    }
}

impl Compact {
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
