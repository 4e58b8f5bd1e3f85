//! The engine's own vocabulary tables.

use crate::OverlayError;
use lora_config::TokenTable;
use lora_kernels::{DeviceBuffer, MatRef};
use std::sync::Arc;

/// One vocabulary table as an engine serves it.
#[derive(Debug, Clone)]
pub struct ServedTable<'a> {
    rows: usize,
    values: Values<'a>,
}

#[derive(Debug, Clone)]
enum Values<'a> {
    View(MatRef<'a>),
    Shared(Arc<DeviceBuffer>, usize),
    Opaque,
}

impl<'a> ServedTable<'a> {
    /// BF16 rows in memory of the backend that overlays are built on, `[rows, hidden]`. A view of an engine's own memory comes from
    /// [`MatRef::from_raw`]; one that lives as long as the engine is `'static`.
    pub fn view(rows: MatRef<'a>) -> Self {
        Self {
            rows: rows.rows(),
            values: Values::View(rows),
        }
    }

    /// The `rows` BF16 rows of `hidden` elements at the start of a buffer, which is kept.
    ///
    /// # Errors
    /// [`OverlayError::Kernel`] where the buffer has not that many.
    pub fn shared(
        buffer: Arc<DeviceBuffer>,
        rows: usize,
        hidden: usize,
    ) -> Result<Self, OverlayError> {
        buffer.mat(rows, hidden, hidden)?;
        Ok(Self {
            rows,
            values: Values::Shared(buffer, hidden),
        })
    }

    /// A table of `rows` rows whose values are not BF16 (quantised), or not to be read. Every row of an adapter's own table
    /// counts as different from it.
    pub fn opaque(rows: usize) -> Self {
        Self {
            rows,
            values: Values::Opaque,
        }
    }

    /// Rows: the vocabulary, padding included.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The rows, where they can be read.
    pub(crate) fn values(&self) -> Result<Option<MatRef<'_>>, OverlayError> {
        Ok(match &self.values {
            Values::View(rows) => Some(*rows),
            Values::Shared(buffer, hidden) => Some(buffer.mat(self.rows, *hidden, *hidden)?),
            Values::Opaque => None,
        })
    }
}

/// Sizes of the served tables, which every overlay of a set shares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VocabShape {
    /// Width of a row.
    pub hidden: u32,
    /// Rows of the embedding.
    pub embed: u32,
    /// Rows of the LM head.
    pub lm_head: u32,
}

/// The vocabulary tables that an engine serves: what the tables of adapters are compared with.
#[derive(Debug, Clone)]
pub struct ServedTables<'a> {
    embed: ServedTable<'a>,
    /// `None` where the embedding is the head.
    lm_head: Option<ServedTable<'a>>,
    is_tied: bool,
    embed_scale: Option<f32>,
}

impl<'a> ServedTables<'a> {
    /// An embedding that is the LM head too.
    pub fn tied(embed: ServedTable<'a>) -> Self {
        Self::new(embed, None, true)
    }

    /// An embedding that is the LM head too, where the engine serves the head from a copy of its own: a quantised one, say.
    pub fn tied_with_copy(embed: ServedTable<'a>, lm_head: ServedTable<'a>) -> Self {
        Self::new(embed, Some(lm_head), true)
    }

    /// Two tables.
    pub fn untied(embed: ServedTable<'a>, lm_head: ServedTable<'a>) -> Self {
        Self::new(embed, Some(lm_head), false)
    }

    fn new(embed: ServedTable<'a>, lm_head: Option<ServedTable<'a>>, is_tied: bool) -> Self {
        Self {
            embed,
            lm_head,
            is_tied,
            embed_scale: None,
        }
    }

    /// With the factor that the model multiplies embedding rows by (Gemma: the square root of the hidden size, rounded to BF16),
    /// where the engine has done so by the time overlays are applied: rows that replace others are then multiplied too, in FP32,
    /// and rounded once.
    #[must_use]
    pub fn with_embed_scale(self, scale: f32) -> Self {
        Self {
            embed_scale: Some(scale),
            ..self
        }
    }

    /// What embedding rows have been multiplied by when overlays are applied.
    pub fn embed_scale(&self) -> Option<f32> {
        self.embed_scale
    }

    /// Whether embedding and head are one parameter of the model.
    pub fn is_tied(&self) -> bool {
        self.is_tied
    }

    /// The table that serves as `table`.
    pub fn table(&self, table: TokenTable) -> &ServedTable<'a> {
        match (table, &self.lm_head) {
            (TokenTable::LmHead, Some(lm_head)) => lm_head,
            _ => &self.embed,
        }
    }

    /// Sizes of both tables.
    ///
    /// # Errors
    /// [`OverlayError::Shape`] where a table is not rows of `hidden` elements, or has no rows, or more than `i32` token ids tell apart.
    pub fn shape(&self, hidden: usize) -> Result<VocabShape, OverlayError> {
        let rows = |table: TokenTable| {
            let served = self.table(table);
            let width = served.values()?.map_or(hidden, |rows| rows.cols());
            let rows = i32::try_from(served.rows)
                .ok()
                .filter(|rows| *rows > 0 && width == hidden && hidden > 0);
            rows.map(i32::unsigned_abs)
                .ok_or_else(|| OverlayError::Shape {
                    what: format!("the served {}", table.peft_name()),
                    shape: vec![served.rows, width],
                    hidden,
                })
        };
        Ok(VocabShape {
            hidden: u32::try_from(hidden).unwrap_or(u32::MAX),
            embed: rows(TokenTable::Embed)?,
            lm_head: rows(TokenTable::LmHead)?,
        })
    }
}
