//! Overlays: embedding rows and logits of every case in one batch, with base rows in between.

use super::case::Case;
use super::compare::Worst;
use super::matrix::Matrix;
use super::run::{BaseRows, ModuleResult, Place};
use super::tables::{BaseTables, GoldenTable, TableInput};
use half::bf16;
use lora_runtime::config::TokenTable;
use lora_runtime::kernels::overlay::LogitsMut;
use lora_runtime::kernels::{DeviceBuffer, Stream};
use lora_runtime::overlay::{HeadOverlay, ServedTable, ServedTables};
use lora_runtime::weights::BASE_SLOT;
use lora_runtime::{LoraRuntime, RuntimeError};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Registers the base model's tables. One that is not known is served unread: every row of an adapter's own table then replaces one of it.
pub(super) fn serve_tables(runtime: &LoraRuntime, tables: &BaseTables) -> Result<(), RuntimeError> {
    let model = runtime.model();
    let (vocab, hidden) = (model.vocab_size, model.hidden_size);
    let served = |values: &Option<Vec<bf16>>| -> Result<ServedTable<'static>, RuntimeError> {
        Ok(match values {
            Some(values) => ServedTable::shared(Arc::new(runtime.buffer(values)?), vocab, hidden)?,
            None => ServedTable::opaque(vocab),
        })
    };
    let embed = served(&tables.embed)?;
    let mut tables = match model.tied_embeddings {
        true => ServedTables::tied(embed),
        false => ServedTables::untied(embed, served(&tables.lm_head)?),
    };
    if let Some(scale) = model.embed_scale() {
        tables = tables.with_embed_scale(bf16::from_f32(scale).to_f32());
    }
    runtime.serve_tables(tables)?;
    Ok(())
}

/// Adapters in a pool, and the cases that they are of.
pub(super) struct Loaded<'a> {
    pub(super) runtime: &'a LoraRuntime,
    pub(super) cases: &'a [&'a Case],
    /// Slot of each case.
    pub(super) slots: &'a [Option<u32>],
}

/// A row of a batch: its recorded table, the row of it, and the slot it follows, or none.
struct Row<'a> {
    position: usize,
    golden: &'a GoldenTable,
    at: usize,
    slot: Option<u32>,
}

impl Loaded<'_> {
    /// Compares every recorded row of `table`. Results by the position of their case.
    pub(super) fn verify(
        &self,
        table: TokenTable,
        base: &mut BaseRows,
    ) -> Result<Vec<(usize, ModuleResult)>, RuntimeError> {
        let rows = self.rows(table);
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let width = rows[0].golden.base.shape().1;
        let nothing = vec![0.0; width];
        let mut results: BTreeMap<usize, ModuleResult> = BTreeMap::new();
        // Logits come in two widths, and a case's result is the worse of them.
        for pass in self.passes(table, &rows)? {
            for (row, got) in rows.iter().zip(pass.values.chunks(width)) {
                let Some(slot) = row.slot else {
                    let before = pass.rounded(row.golden.base.row(row.at));
                    base.rows += 1;
                    base.changed +=
                        usize::from(!before.map(f32::to_bits).eq(got.iter().map(|v| v.to_bits())));
                    continue;
                };
                let magnitude = self.magnitude(row, slot)?;
                let wanted = row.golden.out.row(row.at);
                // Replaced, not added to: what the base gave is no term of the sum.
                let Some(worst) = Worst::of_row(row.at, got, &nothing, wanted, &magnitude) else {
                    continue;
                };
                let result = results.entry(row.position).or_insert_with(|| ModuleResult {
                    path: row.golden.path.clone(),
                    place: Place::Table(table),
                    rows: row.golden.base.shape().0,
                    worst,
                });
                result.worst = result.worst.further(worst);
            }
        }
        Ok(results.into_iter().collect())
    }

    /// The recorded rows of every case, a base row after each.
    fn rows(&self, table: TokenTable) -> Vec<Row<'_>> {
        let mut rows = Vec::new();
        for (position, case) in self.cases.iter().enumerate() {
            let Some(slot) = self.slots[position] else {
                continue;
            };
            for golden in case.golden.tables.iter().filter(|g| g.table() == table) {
                for at in 0..golden.base.shape().0 {
                    rows.extend([Some(slot), None].map(|slot| Row {
                        position,
                        golden,
                        at,
                        slot,
                    }));
                }
            }
        }
        rows
    }

    fn passes(&self, table: TokenTable, rows: &[Row<'_>]) -> Result<Vec<Pass>, RuntimeError> {
        match table {
            TokenTable::Embed => Ok(vec![self.embed(rows)?]),
            TokenTable::LmHead => Ok(vec![self.logits(rows, false)?, self.logits(rows, true)?]),
        }
    }

    /// Gathered rows of the base, overlaid.
    fn embed(&self, rows: &[Row<'_>]) -> Result<Pass, RuntimeError> {
        let (count, hidden) = (rows.len(), self.runtime.model().hidden_size);
        let ids: Vec<i32> = rows
            .iter()
            .map(|row| match &row.golden.input {
                TableInput::Tokens(ids) => ids[row.at],
                TableInput::Hidden(_) => -1,
            })
            .collect();
        let ids = self.buffer(&ids)?;
        let mut out = self
            .runtime
            .buffer(&gathered(rows, |golden| &golden.base))?;
        let batch = self.routed(rows)?;
        let _ = self.runtime.apply_embedding_overlay(
            Stream::OWN,
            &batch,
            ids.token_ids(count)?,
            out.mat_mut(count, hidden, hidden)?,
        )?;
        self.runtime.kernels().backend().synchronize(Stream::OWN)?;
        Pass::bf16(&out, count * hidden)
    }

    /// Logits of the base, those of overridden ids computed anew.
    fn logits(&self, rows: &[Row<'_>], is_f32: bool) -> Result<Pass, RuntimeError> {
        let model = self.runtime.model();
        let (count, hidden, vocab) = (rows.len(), model.hidden_size, model.vocab_size);
        let x = gathered(rows, |golden| match &golden.input {
            TableInput::Hidden(x) => x,
            TableInput::Tokens(_) => &golden.base,
        });
        let x = self.runtime.buffer(&x)?;
        let base = rows.iter().flat_map(|row| row.golden.base.row(row.at));
        let mut out = match is_f32 {
            true => self.buffer(&base.copied().collect::<Vec<f32>>())?,
            false => self
                .runtime
                .buffer(&gathered(rows, |golden| &golden.base))?,
        };
        let batch = self.routed(rows)?;
        let logits = match is_f32 {
            true => LogitsMut::F32(out.f32_mat_mut(count, vocab, vocab)?),
            false => LogitsMut::Bf16(out.mat_mut(count, vocab, vocab)?),
        };
        let x = x.mat(count, hidden, hidden)?;
        let _ = self
            .runtime
            .apply_logits_overlay(Stream::OWN, &batch, x, logits)?;
        self.runtime.kernels().backend().synchronize(Stream::OWN)?;
        match is_f32 {
            true => Ok(Pass {
                values: out.download(0, count * vocab)?,
                is_f32,
            }),
            false => Pass::bf16(&out, count * vocab),
        }
    }

    fn routed(&self, rows: &[Row<'_>]) -> Result<lora_runtime::RoutedBatch, RuntimeError> {
        let request = |row: &Row<'_>| {
            let slot = row.slot.and_then(|slot| i32::try_from(slot).ok());
            slot.unwrap_or(BASE_SLOT)
        };
        let requests: Vec<i32> = rows.iter().map(request).collect();
        let most = u32::try_from(rows.len()).unwrap_or(u32::MAX);
        let mut batch = self.runtime.batch(most)?;
        self.runtime
            .route(&mut batch, Stream::OWN, &requests, rows.len())?;
        Ok(batch)
    }

    fn buffer<T: bytemuck::Pod>(&self, values: &[T]) -> Result<DeviceBuffer, RuntimeError> {
        let memory = self.runtime.kernels().backend().clone();
        Ok(DeviceBuffer::from_slice(memory, values)?)
    }

    /// The size of the terms of each overridden logit before any cancels; empty for embedding rows, which are copied.
    fn magnitude(&self, row: &Row<'_>, slot: u32) -> Result<Vec<f64>, RuntimeError> {
        let TableInput::Hidden(x) = &row.golden.input else {
            return Ok(Vec::new());
        };
        let mut magnitude = vec![0.0; row.golden.base.shape().1];
        let overlay = self.runtime.overlays().and_then(|set| set.overlay(slot));
        let Some(overlay) = overlay else {
            return Ok(magnitude);
        };
        let (ids, rows) = match &overlay.lmhead {
            HeadOverlay::Own(head) => (&head.ids_dev, &head.rows),
            _ => (&overlay.ids_dev, &overlay.rows),
        };
        let (count, width) = (overlay.n_override_head() as usize, x.shape().1);
        let ids: Vec<u32> = ids.download(0, count)?;
        let values: Vec<bf16> = rows.download(0, count * width)?;
        for (id, values) in ids.into_iter().zip(values.chunks(width)) {
            let terms = x.row(row.at).iter().zip(values);
            let size = terms.map(|(x, w)| f64::from((x * w.to_f32()).abs())).sum();
            if let Some(place) = magnitude.get_mut(id as usize) {
                *place = size;
            }
        }
        Ok(magnitude)
    }
}

/// What came out of one launch.
struct Pass {
    values: Vec<f32>,
    is_f32: bool,
}

impl Pass {
    fn bf16(out: &DeviceBuffer, len: usize) -> Result<Self, RuntimeError> {
        let values = out.download::<bf16>(0, len)?;
        Ok(Self {
            values: values.into_iter().map(bf16::to_f32).collect(),
            is_f32: false,
        })
    }

    /// Recorded values as they went in.
    fn rounded<'a>(&self, values: &'a [f32]) -> impl Iterator<Item = f32> + use<'a> {
        let is_f32 = self.is_f32;
        values.iter().map(move |value| match is_f32 {
            true => *value,
            false => bf16::from_f32(*value).to_f32(),
        })
    }
}

/// Rows of a recorded matrix, rounded.
fn gathered<'a>(rows: &[Row<'a>], pick: impl Fn(&'a GoldenTable) -> &'a Matrix) -> Vec<bf16> {
    let row = |row: &Row<'a>| pick(row.golden).row_bf16(row.at);
    rows.iter().flat_map(row).collect()
}
