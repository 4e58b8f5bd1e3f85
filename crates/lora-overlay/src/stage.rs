//! An adapter's vocabulary rows in device memory, before the served tables are known.

use crate::OverlayError;
use half::bf16;
use lora_config::{AdapterConfig, TokenTable};
use lora_kernels::{DeviceBuffer, KernelError, MatRef};
use lora_weights::device::{DeviceMemory, UploadCopy};
use lora_weights::{AdapterStore, OverlayTensor, OverlayTensorKind, OverlayTensors};
use std::sync::Arc;

/// Most bytes that are converted and uploaded at a time.
const CHUNK_BYTES: usize = 32 << 20;

/// What an adapter holds of one vocabulary table, on the device as BF16.
#[derive(Debug, Default)]
pub struct OverlayRawSlot {
    /// The adapter's own table, `[base_rows, hidden]`: `token_adapter.base_layer.weight`, else a full table. Most token adapters hold none.
    pub base: Option<DeviceBuffer>,
    /// Rows of `base`, 0 without.
    pub base_rows: u32,
    /// Trained rows, `[delta_rows, hidden]`: they replace rows, they are not added.
    pub delta: Option<DeviceBuffer>,
    /// Rows of `delta`, 0 without.
    pub delta_rows: u32,
    /// Trained ids in the config's order: the k-th takes row k of `delta`.
    pub trainable: Vec<u32>,
}

impl OverlayRawSlot {
    /// Whether the adapter leaves the table alone.
    pub fn is_empty(&self) -> bool {
        self.base.is_none() && self.delta.is_none() && self.trainable.is_empty()
    }

    /// Device bytes.
    pub fn device_bytes(&self) -> u64 {
        let buffers = [&self.base, &self.delta].into_iter().flatten();
        buffers.map(DeviceBuffer::bytes).sum()
    }
}

/// An adapter's vocabulary rows on the device, in buffers of their own. [`build_overlay`](crate::build_overlay) takes it once the served tables are
/// known, and frees what it does not keep.
#[derive(Debug)]
pub struct OverlayRaw {
    /// Width of every row.
    pub hidden: usize,
    /// The input embedding.
    pub embed: OverlayRawSlot,
    /// The LM head.
    pub lm_head: OverlayRawSlot,
    /// Whether the embedding's own table is the head's too where head and embedding are one parameter. PEFT writes a resized or
    /// re-saved table over that parameter, so both change; `modules_to_save` without `ensure_weight_tying` puts a copy beside it,
    /// so only the embedding changes.
    pub base_is_tied: bool,
}

impl OverlayRaw {
    /// Device bytes.
    pub fn device_bytes(&self) -> u64 {
        self.embed.device_bytes() + self.lm_head.device_bytes()
    }
}

/// Uploads the vocabulary rows of an adapter whose audit gave `overlays`: base and delta of either table, rounded to BF16 where they are not.
///
/// `Ok(None)` without overlay tensors, and with low-rank embedding LoRA, which nothing here applies.
///
/// # Errors
/// [`OverlayError::Shape`] for a tensor that is not `[rows, hidden]`; what allocation and upload give.
///
/// # Panics
/// Where `overlays` is another store's, or a tensor's dtype does not load: an audit that passed answers for both.
pub fn stage_overlay_raw(
    memory: &Arc<dyn DeviceMemory>,
    store: &AdapterStore,
    config: &AdapterConfig,
    overlays: &OverlayTensors,
    hidden: usize,
) -> Result<Option<OverlayRaw>, OverlayError> {
    let is_low_rank = |tensor: &OverlayTensor| {
        matches!(
            tensor.kind,
            OverlayTensorKind::EmbeddingA | OverlayTensorKind::EmbeddingB
        )
    };
    if overlays.is_empty() || overlays.iter().any(is_low_rank) {
        return Ok(None);
    }
    let stage = |table| stage_table(memory, store, (config, overlays), table, hidden);
    Ok(Some(OverlayRaw {
        hidden,
        embed: stage(TokenTable::Embed)?,
        lm_head: stage(TokenTable::LmHead)?,
        base_is_tied: is_tied(config, overlays),
    }))
}

fn stage_table(
    memory: &Arc<dyn DeviceMemory>,
    store: &AdapterStore,
    (config, overlays): (&AdapterConfig, &OverlayTensors),
    table: TokenTable,
    hidden: usize,
) -> Result<OverlayRawSlot, OverlayError> {
    let upload = |tensor: Option<&OverlayTensor>| match tensor {
        Some(tensor) => {
            let (buffer, rows) = upload_rows(memory, store, tensor, hidden)?;
            Ok::<_, OverlayError>((Some(buffer), rows))
        }
        None => Ok((None, 0)),
    };
    let (base, base_rows) = upload(overlays.own_table(table))?;
    let (delta, delta_rows) = upload(overlays.get(table, OverlayTensorKind::Delta))?;
    let trained = config.trainable_tokens().and_then(|tokens| match table {
        TokenTable::Embed => tokens.embed.clone(),
        TokenTable::LmHead => tokens.lm_head.clone(),
    });
    Ok(OverlayRawSlot {
        base,
        base_rows,
        delta,
        delta_rows,
        trainable: trained.unwrap_or_default(),
    })
}

/// Whether the embedding's own table replaces the parameter that a tied head shares, rather than standing beside it.
fn is_tied(config: &AdapterConfig, overlays: &OverlayTensors) -> bool {
    let has_base = overlays
        .get(TokenTable::Embed, OverlayTensorKind::Base)
        .is_some();
    let mut saved = config.modules_to_save().iter();
    let is_saved = saved.any(|saved| saved.table == TokenTable::Embed);
    has_base || !is_saved || config.ensure_weight_tying()
}

/// Converts and uploads a tensor chunk by chunk.
fn upload_rows(
    memory: &Arc<dyn DeviceMemory>,
    store: &AdapterStore,
    tensor: &OverlayTensor,
    hidden: usize,
) -> Result<(DeviceBuffer, u32), OverlayError> {
    let bad_shape = || OverlayError::Shape {
        what: tensor.name.clone(),
        shape: tensor.shape.clone(),
        hidden,
    };
    let rows = match *tensor.shape.as_slice() {
        [rows, width] if width == hidden && hidden > 0 => rows,
        _ => return Err(bad_shape()),
    };
    // As many as token ids tell apart: row numbers of a base and a delta together then fit u32.
    let count = i32::try_from(rows).map_err(|_| bad_shape())?.unsigned_abs();
    let row_bytes = hidden * size_of::<bf16>();
    let bytes = rows.checked_mul(row_bytes).ok_or_else(bad_shape)?;
    let buffer = DeviceBuffer::zeroed(Arc::clone(memory), bytes as u64)?;
    if rows == 0 {
        return Ok((buffer, 0));
    }
    let chunk = (CHUNK_BYTES / row_bytes).clamp(1, rows);
    let mut staging = memory.stage(chunk * row_bytes).map_err(KernelError::from)?;
    for first in (0..rows).step_by(chunk) {
        let part = first..rows.min(first + chunk);
        let part_bytes = part.len() * row_bytes;
        let place = buffer.ptr().offset((first * row_bytes) as u64);
        let values = bytemuck::cast_slice_mut(&mut staging.bytes_mut()[..part_bytes]);
        store.read_rows_bf16(tensor.id, part, values, hidden);
        staging = memory
            .upload(staging, &[UploadCopy::contiguous(0, place, part_bytes)])
            .and_then(|upload| upload.wait())
            .map_err(KernelError::from)?;
    }
    Ok((buffer, count))
}

/// The rows of a buffer, or none.
pub(crate) fn rows_of(
    buffer: Option<&DeviceBuffer>,
    rows: u32,
    hidden: usize,
) -> Result<Option<MatRef<'_>>, KernelError> {
    buffer
        .map(|buffer| buffer.mat(rows as usize, hidden, hidden))
        .transpose()
}
