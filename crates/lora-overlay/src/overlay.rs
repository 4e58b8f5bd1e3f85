//! Built overlays: compact rows, and the way from a token id to its row.

use lora_kernels::OverlaySlot;
use lora_kernels::{DeviceBuffer, KernelError, MatRef};

/// The overlay of an adapter: rows that replace those of the input embedding, and what becomes of the LM head.
#[derive(Debug)]
pub struct EmbedOverlay {
    /// Rows of the overridden ids, BF16 `[n_override, hidden]`, in the order of `ids_dev`.
    pub rows: DeviceBuffer,
    /// Overridden ids, u32, ascending and unique.
    pub ids_dev: DeviceBuffer,
    /// For each of `vocab` ids its place in `rows`, i32, -1 where it is not overridden.
    pub slot_map: DeviceBuffer,
    /// Overridden ids; 0 where the adapter has an overlay of the head alone.
    pub n_override: u32,
    /// Rows of the served embedding.
    pub vocab: u32,
    /// The LM head.
    pub lmhead: HeadOverlay,
    /// Width of a row.
    pub hidden: u32,
    /// What the comparison with the served embedding found.
    pub difference: RowDifference,
    pub(crate) extension: Option<Extension>,
}

/// What an adapter's overlay does to the LM head.
#[derive(Debug)]
pub enum HeadOverlay {
    /// Nothing.
    Untouched,
    /// Head and embedding are one parameter of the model, and the embedding's rows serve both.
    Embed,
    /// Rows of its own.
    Own(LmHeadOverlay),
}

/// Rows that replace those of an LM head.
#[derive(Debug)]
pub struct LmHeadOverlay {
    /// Rows of the overridden ids, BF16 `[n_override, hidden]`, in the order of `ids_dev`.
    pub rows: DeviceBuffer,
    /// Overridden ids, u32, ascending and unique.
    pub ids_dev: DeviceBuffer,
    /// Overridden ids.
    pub n_override: u32,
    /// Rows of the served head.
    pub vocab: u32,
    /// What the comparison with the served head found.
    pub difference: RowDifference,
    pub(crate) extension: Option<Extension>,
}

/// What comparing an adapter's own table with the served one found. All 0 without a table of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RowDifference {
    /// Rows that differ by more than the threshold, and are overridden.
    pub over: u32,
    /// Rows that differ by no more than the threshold and are served as the base model has them, unless they were trained by id:
    /// what a threshold over 0 loses.
    pub under: u32,
}

/// Rows of ids that the served vocabulary does not have.
#[derive(Debug, Clone, Copy)]
pub struct ExtensionRows<'a> {
    /// Id of the first row; the others follow it one by one.
    pub first_id: u32,
    /// BF16 `[ids, hidden]`, trained rows among them in their places.
    pub rows: MatRef<'a>,
}

/// Rows from `first_id` on.
#[derive(Debug)]
pub(crate) struct Extension {
    pub(crate) first_id: u32,
    pub(crate) rows: DeviceBuffer,
    pub(crate) count: u32,
}

impl Extension {
    fn rows(&self, hidden: u32) -> Result<ExtensionRows<'_>, KernelError> {
        let width = hidden as usize;
        Ok(ExtensionRows {
            first_id: self.first_id,
            rows: self.rows.mat(self.count as usize, width, width)?,
        })
    }
}

impl EmbedOverlay {
    /// Embedding rows of ids past the served vocabulary, which the adapter's own table has. Whether to serve such ids is the
    /// engine's choice: one that does extends its tables, copies these rows in and registers the longer tables.
    ///
    /// # Errors
    /// None in practice: the view is inside the overlay's own buffer.
    pub fn extension_rows(&self) -> Result<Option<ExtensionRows<'_>>, KernelError> {
        let extension = self.extension.as_ref();
        extension.map(|rows| rows.rows(self.hidden)).transpose()
    }

    /// LM-head rows of ids past the served head, as [`extension_rows`](Self::extension_rows).
    ///
    /// # Errors
    /// As [`extension_rows`](Self::extension_rows).
    pub fn head_extension_rows(&self) -> Result<Option<ExtensionRows<'_>>, KernelError> {
        match &self.lmhead {
            HeadOverlay::Untouched => Ok(None),
            HeadOverlay::Embed => self.extension_rows(),
            HeadOverlay::Own(head) => {
                let extension = head.extension.as_ref();
                extension.map(|rows| rows.rows(self.hidden)).transpose()
            }
        }
    }

    /// Overridden ids of the LM head.
    pub fn n_override_head(&self) -> u32 {
        match &self.lmhead {
            HeadOverlay::Untouched => 0,
            HeadOverlay::Embed => self.n_override,
            HeadOverlay::Own(head) => head.n_override,
        }
    }

    /// Rows of saved tables, embedding and head together, that differ from the served ones by no more than the threshold and are not overridden.
    pub fn rows_under_threshold(&self) -> u32 {
        let head = match &self.lmhead {
            HeadOverlay::Own(head) => head.difference.under,
            _ => 0,
        };
        self.difference.under.saturating_add(head)
    }

    /// Rows offered past the served vocabulary: embedding and head.
    pub fn extension_counts(&self) -> (u32, u32) {
        let count = |extension: &Option<Extension>| extension.as_ref().map_or(0, |e| e.count);
        let embed = count(&self.extension);
        match &self.lmhead {
            HeadOverlay::Untouched => (embed, 0),
            HeadOverlay::Embed => (embed, embed),
            HeadOverlay::Own(head) => (embed, count(&head.extension)),
        }
    }

    /// Device bytes of rows, ids and map, extension rows included.
    pub fn device_bytes(&self) -> u64 {
        let extension = |e: &Option<Extension>| e.as_ref().map_or(0, |e| e.rows.bytes());
        let own = self.rows.bytes() + self.ids_dev.bytes() + self.slot_map.bytes();
        let head = match &self.lmhead {
            HeadOverlay::Own(head) => {
                head.rows.bytes() + head.ids_dev.bytes() + extension(&head.extension)
            }
            _ => 0,
        };
        own + extension(&self.extension) + head
    }

    /// The slot's record in the table of embeddings.
    pub(crate) fn embed_record(&self) -> OverlaySlot {
        if self.n_override == 0 {
            return OverlaySlot::NONE;
        }
        OverlaySlot {
            rows: self.rows.ptr().0,
            ids: self.ids_dev.ptr().0,
            slot_map: self.slot_map.ptr().0,
            n_override: self.n_override,
            reserved: 0,
        }
    }

    /// The slot's record in the table of heads.
    pub(crate) fn head_record(&self) -> OverlaySlot {
        match &self.lmhead {
            HeadOverlay::Untouched => OverlaySlot::NONE,
            HeadOverlay::Embed => self.embed_record(),
            HeadOverlay::Own(head) if head.n_override == 0 => OverlaySlot::NONE,
            HeadOverlay::Own(head) => OverlaySlot {
                rows: head.rows.ptr().0,
                ids: head.ids_dev.ptr().0,
                slot_map: 0,
                n_override: head.n_override,
                reserved: 0,
            },
        }
    }
}
