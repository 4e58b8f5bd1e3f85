//! The overlays of a pool's slots, as launches see them.

use crate::{EmbedOverlay, OverlayError, VocabShape};
use lora_kernels::overlay::{
    HeadRows, LogitsMut, OverlayTable, OverlayTokens, head_logits, replace_rows,
};
use lora_kernels::{Applied, DeviceBuffer, LoraKernels, MatMut, MatRef, OverlaySlot, Stream};
use lora_weights::device::DeviceMemory;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// The overlays of a pool's slots: two tables on the device, of embeddings and of heads, one record a slot, at addresses fixed
/// for life, so that captured graphs stay valid while adapters come and go. Every overlay of a set is built for the same
/// vocabulary.
///
/// A slot gets its overlay by [`install`](Self::install) and loses it by [`remove`](Self::remove);
/// [`OverlaySlotRows`](crate::OverlaySlotRows) binds both to the slot's life. Both may be called from any thread, while no launch
/// uses the slot; launches for other slots go on meanwhile.
#[derive(Debug)]
pub struct TokenOverlaySet {
    shape: VocabShape,
    slots: u32,
    embed_scale: Option<f32>,
    embed: DeviceBuffer,
    lm_head: DeviceBuffer,
    state: Mutex<Vec<SlotState>>,
    /// Whether a slot has an overlay, and the most ids that one of them overrides in the head: read by launches, which never wait for an install.
    any_active: AtomicBool,
    most_head_ids: AtomicU32,
}

/// What the records of a slot point to.
#[derive(Debug, Clone, Default)]
enum SlotState {
    #[default]
    Empty,
    Installed(Arc<EmbedOverlay>),
    /// Records that could not be cleared: what they point to stays allocated until they are written again.
    Stale(Arc<EmbedOverlay>),
}

impl TokenOverlaySet {
    /// The tables of a pool with one slot for each of `overlays`, for an engine that serves tables of these sizes.
    ///
    /// # Errors
    /// As [`install`](Self::install); what allocations and uploads give.
    pub fn from_slots(
        memory: Arc<dyn DeviceMemory>,
        shape: VocabShape,
        overlays: impl IntoIterator<Item = Option<Arc<EmbedOverlay>>>,
    ) -> Result<Self, OverlayError> {
        let overlays: Vec<_> = overlays.into_iter().collect();
        let bytes = size_of::<OverlaySlot>() as u64 * overlays.len() as u64;
        let set = Self {
            shape,
            slots: u32::try_from(overlays.len()).unwrap_or(u32::MAX),
            embed_scale: None,
            embed: DeviceBuffer::zeroed(Arc::clone(&memory), bytes)?,
            lm_head: DeviceBuffer::zeroed(memory, bytes)?,
            state: Mutex::new(vec![SlotState::Empty; overlays.len()]),
            any_active: AtomicBool::new(false),
            most_head_ids: AtomicU32::new(0),
        };
        for (slot, overlay) in (0..).zip(overlays) {
            set.install(slot, overlay)?;
        }
        Ok(set)
    }

    /// With [`ServedTables::embed_scale`](crate::ServedTables::embed_scale).
    #[must_use]
    pub fn with_embed_scale(mut self, scale: Option<f32>) -> Self {
        self.embed_scale = scale;
        self
    }

    /// Sizes of the tables that overlays are built for.
    pub fn shape(&self) -> VocabShape {
        self.shape
    }

    /// Slots.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Whether any slot has an overlay. An engine without captured graphs may leave both launches out where none has; a graph
    /// that is captured without them would not follow an adapter that comes later.
    pub fn any_active(&self) -> bool {
        self.any_active.load(Ordering::Relaxed)
    }

    /// The overlay of a slot.
    pub fn overlay(&self, slot: u32) -> Option<Arc<EmbedOverlay>> {
        match self.state.lock().get(slot as usize)? {
            SlotState::Installed(overlay) => Some(Arc::clone(overlay)),
            _ => None,
        }
    }

    /// Device bytes of the tables and of every slot's overlay.
    pub fn device_bytes(&self) -> u64 {
        let state = self.state.lock();
        let overlays = state.iter().map(|state| match state {
            SlotState::Empty => 0,
            SlotState::Installed(overlay) | SlotState::Stale(overlay) => overlay.device_bytes(),
        });
        self.embed.bytes() + self.lm_head.bytes() + overlays.sum::<u64>()
    }

    /// Gives a slot an overlay, or none, in place of what it had. Blocks until its records are on the device. After an error the slot has none.
    ///
    /// # Errors
    /// [`OverlayError::SlotOutOfRange`], [`OverlayError::Mismatch`]; what the upload gives.
    pub fn install(
        &self,
        slot: u32,
        overlay: Option<Arc<EmbedOverlay>>,
    ) -> Result<(), OverlayError> {
        self.remove(slot)?;
        let Some(overlay) = overlay else {
            return Ok(());
        };
        self.check(slot, &overlay)?;
        let mut state = self.state.lock();
        // Until both records are known to be written, whatever was written points to what is kept.
        state[slot as usize] = SlotState::Stale(Arc::clone(&overlay));
        self.write(slot, overlay.embed_record(), overlay.head_record())?;
        state[slot as usize] = SlotState::Installed(overlay);
        self.note(&state);
        Ok(())
    }

    /// Takes a slot's overlay out and frees it, where nobody else holds it. A slot that has none is left as it is.
    ///
    /// # Errors
    /// [`OverlayError::SlotOutOfRange`]. What the upload gives: the overlay is kept then, so that the records that could not be
    /// cleared point to memory that is still there, and cleared when the slot is next written.
    pub fn remove(&self, slot: u32) -> Result<(), OverlayError> {
        let mut state = self.state.lock();
        let Some(entry) = state.get_mut(slot as usize) else {
            return Err(OverlayError::SlotOutOfRange {
                slot,
                slots: self.slots,
            });
        };
        *entry = match std::mem::take(entry) {
            SlotState::Empty => return Ok(()),
            SlotState::Installed(overlay) | SlotState::Stale(overlay) => SlotState::Stale(overlay),
        };
        self.note(&state);
        self.write(slot, OverlaySlot::NONE, OverlaySlot::NONE)?;
        state[slot as usize] = SlotState::Empty;
        Ok(())
    }

    /// Replaces embedding rows: row i of `out` (BF16 `[rows, hidden]`, gathered from the served table) becomes the row that its
    /// own slot's overlay has for `ids[i]`, bit for bit. Rows without an overlay, and ids that theirs does not override, keep
    /// their bits. Enqueues one launch; legal under graph capture.
    ///
    /// # Errors
    /// [`OverlayError::Kernel`]: sizes and addresses that do not fit.
    pub fn apply_embeddings(
        &self,
        on: (&LoraKernels, Stream),
        tokens: OverlayTokens<'_>,
        out: MatMut<'_>,
    ) -> Result<Applied, OverlayError> {
        let table = self.table(&self.embed, self.shape.embed);
        Ok(replace_rows(on, &table, tokens, out, self.embed_scale)?)
    }

    /// Recomputes LM-head logits: for every id that a row's own slot overrides, `logits[row][id] = hidden[row] . rows[id]`,
    /// summed in FP32. `hidden` is what the head reads, BF16 `[rows, hidden]`; `logits` is BF16 or F32, `[rows, vocabulary or
    /// more]`. Every other logit keeps its bits. Enqueues only; legal under graph capture.
    ///
    /// # Errors
    /// [`OverlayError::Kernel`]: sizes and addresses that do not fit.
    pub fn apply_logits(
        &self,
        on: (&LoraKernels, Stream),
        hidden: MatRef<'_>,
        rows: HeadRows<'_>,
        logits: LogitsMut<'_>,
    ) -> Result<Applied, OverlayError> {
        let table = self.table(&self.lm_head, self.shape.lm_head);
        Ok(head_logits(on, &table, hidden, rows, logits)?)
    }

    fn table(&self, records: &DeviceBuffer, vocab: u32) -> OverlayTable {
        OverlayTable {
            entries: records.ptr(),
            slots: self.slots,
            vocab,
            hidden: self.shape.hidden,
            expected_ids: self.most_head_ids.load(Ordering::Relaxed),
        }
    }

    /// Keeps what launches read in step with the slots.
    fn note(&self, state: &[SlotState]) {
        let ids = state.iter().filter_map(|state| match state {
            SlotState::Installed(overlay) => Some(overlay.n_override_head()),
            _ => None,
        });
        let most = ids.max();
        self.any_active.store(most.is_some(), Ordering::Relaxed);
        self.most_head_ids
            .store(most.unwrap_or(0), Ordering::Relaxed);
    }

    fn check(&self, slot: u32, overlay: &EmbedOverlay) -> Result<(), OverlayError> {
        let head = match &overlay.lmhead {
            crate::HeadOverlay::Own(head) => head.vocab,
            _ => self.shape.lm_head,
        };
        for (quantity, found, expected) in [
            ("hidden size", overlay.hidden, self.shape.hidden),
            ("vocabulary", overlay.vocab, self.shape.embed),
            ("head vocabulary", head, self.shape.lm_head),
        ] {
            if found != expected {
                return Err(OverlayError::Mismatch {
                    slot,
                    quantity,
                    found,
                    expected,
                });
            }
        }
        Ok(())
    }

    fn write(&self, slot: u32, embed: OverlaySlot, head: OverlaySlot) -> Result<(), OverlayError> {
        let offset = u64::from(slot) * size_of::<OverlaySlot>() as u64;
        for (records, record) in [(&self.embed, embed), (&self.lm_head, head)] {
            let place = records.ptr().offset(offset);
            let upload = records
                .memory()
                .upload_blocking(place, bytemuck::bytes_of(&record));
            upload.map_err(lora_kernels::KernelError::from)?;
        }
        Ok(())
    }
}
