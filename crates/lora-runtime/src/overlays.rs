//! Vocabulary rows of adapters: bound to slots as adapters come and go, and applied to a batch.

use crate::{Adapter, LoraRuntime, RoutedBatch, RuntimeError};
use lora_config::TokenTable;
use lora_kernels::overlay::{HeadRows, LogitsMut, OverlayTokens};
use lora_kernels::{Applied, MatMut, MatRef, Stream, TokenIds};
use lora_overlay::{
    EmbedOverlay, OverlayBuilder, OverlaySlotRows, ServedTables, TokenOverlaySet, build_overlay,
    stage_overlay_raw,
};
use lora_weights::{AuditReport, SlotExtension};
use std::sync::Arc;

/// What an engine registered.
#[derive(Debug)]
pub(crate) struct Vocabulary {
    tables: ServedTables<'static>,
    set: Arc<TokenOverlaySet>,
}

impl LoraRuntime {
    /// Registers the vocabulary tables that the engine serves, once. From then on adapters with token overlays load: trained tokens, whole tables of
    /// embedding or head, resized vocabularies. Without, they are refused by name (`overlay-unapplied`).
    ///
    /// Views must stay readable for the runtime's life: that is what `'static` says of them.
    ///
    /// # Errors
    /// [`RuntimeError::TablesRegistered`]; [`RuntimeError::ServedTable`] where a table has fewer rows than the model has tokens,
    /// or the tables are tied and the model's are not, or the reverse; [`RuntimeError::Overlay`] for another width, and for what
    /// allocations give.
    pub fn serve_tables(
        &self,
        tables: ServedTables<'static>,
    ) -> Result<&Arc<TokenOverlaySet>, RuntimeError> {
        self.check_tables(&tables)?;
        let shape = tables.shape(self.model().hidden_size)?;
        let slots = self.weights().layout().slots();
        let set = TokenOverlaySet::from_slots(self.memory(), shape, (0..slots).map(|_| None))?
            .with_embed_scale(tables.embed_scale());
        let set = Arc::new(set);
        let vocabulary = Vocabulary { tables, set };
        match self.vocabulary.set(vocabulary) {
            Ok(()) => self.overlays().ok_or(RuntimeError::TablesRegistered),
            Err(_) => Err(RuntimeError::TablesRegistered),
        }
    }

    fn check_tables(&self, tables: &ServedTables<'_>) -> Result<(), RuntimeError> {
        let model = self.model();
        if tables.is_tied() != model.tied_embeddings {
            let word = |tied| if tied { "tied" } else { "not tied" };
            return Err(RuntimeError::ServedTable {
                what: format!(
                    "embedding and head are registered as {}, and the model's are {}",
                    word(tables.is_tied()),
                    word(model.tied_embeddings)
                ),
            });
        }
        for table in [TokenTable::Embed, TokenTable::LmHead] {
            let rows = tables.table(table).rows();
            if rows < model.vocab_size {
                return Err(RuntimeError::ServedTable {
                    what: format!(
                        "{} has {rows} rows, and the model has {} tokens",
                        table.peft_name(),
                        model.vocab_size
                    ),
                });
            }
        }
        Ok(())
    }

    /// The overlays of all slots; `None` before [`serve_tables`](Self::serve_tables).
    pub fn overlays(&self) -> Option<&Arc<TokenOverlaySet>> {
        self.vocabulary.get().map(|vocabulary| &vocabulary.set)
    }

    /// Replaces embedding rows: row i of `out`, `[rows, hidden]`, gathered from the served table by `ids`, becomes the row that
    /// the adapter of the batch's row i has for `ids[i]`, where it has one. Every other row keeps its bits. Returns without a
    /// launch where no tables are registered; else it always launches, so that a captured graph follows adapters that come later
    /// ([`TokenOverlaySet::any_active`] says whether there is anything to apply now).
    ///
    /// # Errors
    /// [`RuntimeError::RowMapElsewhere`] for a batch that was routed from the device; [`RuntimeError::Overlay`] for sizes that do not fit.
    pub fn apply_embedding_overlay(
        &self,
        stream: Stream,
        batch: &RoutedBatch,
        ids: TokenIds<'_>,
        out: MatMut<'_>,
    ) -> Result<Applied, RuntimeError> {
        let Some(set) = self.overlays() else {
            return Ok(Applied::Empty);
        };
        let slots = batch.slot_of_row()?.ok_or(RuntimeError::RowMapElsewhere)?;
        let tokens = OverlayTokens { ids, slots };
        Ok(set.apply_embeddings((self.kernels(), stream), tokens, out)?)
    }

    /// Recomputes the logits of overridden ids: for each row of the batch, from `hidden`, `[rows, hidden]`, what the head reads,
    /// with the rows of the row's own adapter. `logits` is BF16 or F32, `[rows, vocabulary or more]`; every other logit keeps its
    /// bits. Where logits are computed for some rows of a step alone (the last of each prompt), those rows are a batch of their
    /// own. Returns without a launch where no tables are registered, as
    /// [`apply_embedding_overlay`](Self::apply_embedding_overlay).
    ///
    /// # Errors
    /// [`RuntimeError::Overlay`] for sizes that do not fit.
    pub fn apply_logits_overlay(
        &self,
        stream: Stream,
        batch: &RoutedBatch,
        hidden: MatRef<'_>,
        logits: LogitsMut<'_>,
    ) -> Result<Applied, RuntimeError> {
        let Some(set) = self.overlays() else {
            return Ok(Applied::Empty);
        };
        let rows = HeadRows::Grouped(batch.groups());
        Ok(set.apply_logits((self.kernels(), stream), hidden, rows, logits)?)
    }

    /// The adapter's overlay, built and ready to be bound to a slot. Slots without one get an empty one, once tables are registered.
    pub(crate) fn overlay_extension(
        &self,
        adapter: &Adapter,
        report: &AuditReport,
    ) -> Result<Option<Arc<dyn SlotExtension>>, RuntimeError> {
        let Some(vocabulary) = self.vocabulary.get() else {
            return Ok(None);
        };
        let overlay = self.build_overlay(adapter, report, vocabulary)?;
        let rows = OverlaySlotRows::new(Arc::clone(&vocabulary.set), overlay);
        Ok(Some(Arc::new(rows)))
    }

    fn build_overlay(
        &self,
        adapter: &Adapter,
        report: &AuditReport,
        vocabulary: &Vocabulary,
    ) -> Result<Option<EmbedOverlay>, RuntimeError> {
        let hidden = self.model().hidden_size;
        let raw = stage_overlay_raw(
            &self.memory(),
            adapter.store(),
            adapter.config(),
            &report.overlays,
            hidden,
        )?;
        let Some(raw) = raw else {
            return Ok(None);
        };
        let _span = tracing::info_span!("lora_overlay", adapter = adapter.name()).entered();
        let builder = OverlayBuilder {
            backend: self.kernels().backend(),
            stream: Stream::OWN,
            threshold: self.row_diff_threshold,
        };
        let overlay = build_overlay(builder, raw, &vocabulary.tables)?;
        if let Some(overlay) = &overlay {
            let under = overlay.rows_under_threshold();
            if under > 0 {
                tracing::warn!(
                    adapter = adapter.name(),
                    rows = under,
                    threshold = self.row_diff_threshold,
                    "rows of a saved table differ from the served one by no more than the threshold and are served as the base model has them"
                );
            }
        }
        Ok(overlay)
    }
}
